"""Calls the kernels of the GPU engine at small, odd shapes, for compute-sanitizer to watch: `gpu_sanitize.sh` runs it.

`python scripts/sanitize_kernels.py CASE...` on a CUDA GPU (or under TRITON_INTERPRET=1, to see that it runs) prints a
line of JSON after each case: the launches and seconds of each kernel. Without a case: what cases and kernels there are,
and the GPU. Results are looked at by the kernels' tests, not here.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

import stretto.kernels
from stretto.config import SchedulerConfig
from stretto.engine.staging import PlanLayout
from stretto.engine.tables import DeviceTables
from stretto.kernels import (
    elementwise,
    exchange,
    few_rows,
    peer_buffers,
    plan,
    plan_mixed,
    sampling,
    sampling_filters,
    small_matmul,
    split_sampling,
)
from stretto.kernels.decode_attention import decode_attention
from stretto.kernels.decode_work import DecodeWork, Tuning, plan_decode
from stretto.kernels.gated_matmul import gated_matmul
from stretto.kernels.invariant_attention import PartScratch, invariant_attention
from stretto.kernels.invariant_matmul import invariant_matmul
from stretto.kernels.prefill_attention import prefill_attention, query_blocks
from stretto.kernels.prefill_work import PrefillWork, plan_prefill
from stretto.kernels.rope_write import HeadTransform, rope_write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

floats = partial(torch.randn, device=DEVICE)
longs = partial(torch.tensor, dtype=torch.int64, device=DEVICE)


def low(*shape: int) -> torch.Tensor:
    """Random numbers of the engine's dtype."""
    return floats(*shape).to(DTYPE)


def all_kernels() -> dict[str, Any]:
    """All kernels that some function of `stretto.kernels` launches, by name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(stretto.kernels.__path__):
        module = importlib.import_module(f"stretto.kernels.{info.name}")
        for name in re.findall(r"^ +(\w+)\[", inspect.getsource(module), flags=re.MULTILINE):
            if isinstance(getattr(module, name, None), triton.runtime.jit.KernelInterface):
                found[getattr(module, name).fn.__name__] = getattr(module, name)
    return found


@contextmanager
def launches_watched(*, execute: bool = True) -> Iterator[dict[str, list[float]]]:
    """(launches, seconds) of each kernel by name, as they come; without `execute` nothing is launched. Blocks."""
    seen: dict[str, list[float]] = {}

    def watching(run: Any) -> Any:
        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            count = seen.setdefault(self.fn.__name__, [0, 0.0])
            began = time.perf_counter()
            result = run(self, *arguments, **options) if execute else None
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            count[0] += 1
            count[1] += time.perf_counter() - began
            return result

        return watched

    # Some kernels have a launch of their own (kernels/jit.py), which may fall back on Triton's.
    kinds: list[Any] = sorted({type(one) for one in all_kernels().values()}, key=str)
    before = [kind.run for kind in kinds]
    for kind, run in zip(kinds, before, strict=True):
        kind.run = watching(run)
    try:
        yield seen
    finally:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run


def norms_and_gates() -> None:
    """Row by row."""
    elementwise.add_rms_norm(low(3, 200), low(3, 200), low(200), 1e-6)
    elementwise.add_rms_norm(low(1, 200), None, low(200), 1e-6)
    elementwise.silu_and_mul(low(3, 2 * 1100))
    elementwise.add_rms_norm(low(3, 200), floats(2, 3, 200), low(200), 1e-6)
    elementwise.sum_parts(floats(2, 3, 200), DTYPE)


def products_of_one_row() -> None:
    """With norm and gate, or with what is added to."""
    for norm, gate in ((small_matmul.Norm(low(200), 1e-6), True), (None, False)):
        small_matmul.small_matmul(low(1, 200), low(98, 200), low(98), norm=norm, gate=gate)
    small_matmul.small_matmul(low(1, 200), low(49, 200), add_to=low(1, 49))
    small_matmul.small_matmul(low(1, 2100), low(45, 2100), add_to=low(1, 45))
    small_matmul.small_matmul(low(1, 2100), low(2 * 45, 2100), norm=small_matmul.Norm(low(2100), 1e-6), gate=True)


def products_of_few_rows() -> None:
    """Of a span each, and gated."""
    for rows in (3, 17):
        for width in (64, 1288):  # whole, and in parts
            few_rows.few_rows_matmul(low(rows, width), low(98, width), low(98))
        few_rows.few_rows_matmul(low(rows, 200), low(98, 200), whole=True)
        few_rows.few_rows_matmul(low(rows, 200).half(), low(98, 200).half())
        few_rows.few_rows_gated(low(rows, 200), low(98, 200), low(98))


def gated_products() -> None:
    """Of rows that fill no tile."""
    for rows in (3, 150):
        gated_matmul(low(rows, 128), low(2 * 256, 128))


def invariant_products() -> None:
    """Few rows and more."""
    for rows in (1, 3, 17):
        invariant_matmul(low(rows, 200), low(130, 200), low(130))
    invariant_matmul(low(70, 64), low(8200, 64))


def keys_and_values() -> None:
    """Norm and turn of queries and keys, and the write to the cache."""
    for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 96)):
        norm_weight = low(heads + kv_heads, dim) if dim == 64 else None
        transform = HeadTransform(heads, kv_heads, norm_weight, 1e-6, floats(20, dim))
        cache = low(2, 4, kv_heads, 16, dim)
        rope_write(
            low(5, heads + 2 * kv_heads, dim), longs([0, 3, 19, 7, 1]), longs([16, 31, 47, 48, 63]), transform, *cache
        )


@dataclass(frozen=True)
class Pages:
    """Four rows whose pages lie scattered in a cache."""

    cache: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def scattered(cls, contexts: list[int], kv_heads: int, dim: int, size: int) -> Pages:
        """Rows with these contexts, in pages of `size` tokens."""
        used = [-(-context // size) for context in contexts]
        table = torch.zeros(len(used) + 2, max(used), dtype=torch.int64)
        order = (torch.randperm(sum(used)) + 1).tolist()
        for row, count in enumerate(used):
            table[row + 1, :count] = torch.tensor([order.pop() for _ in range(count)])
        slots = torch.arange(1, len(used) + 1, device=DEVICE)
        return cls(low(2, sum(used) + 1, kv_heads, size, dim), table.to(DEVICE), slots, longs(contexts))


HEADS = ((9, 3, 64, 16), (4, 2, 128, 16), (4, 1, 96, 1), (2, 2, 256, 64))
"""Query heads, key heads, size of a head, tokens of a page."""


def decode_rows() -> None:
    """Decode attention, its work cut as for few and for many rows."""
    for heads, kv_heads, dim, size in HEADS:
        pages = Pages.scattered([1, 65, 130, 17], kv_heads, dim, size)
        for rows in (4, 30, 4000):  # shaped as for so many
            work = DecodeWork.allocate(4, heads, kv_heads, dim, DEVICE, Tuning.of(rows, heads, kv_heads, dim))
            plan_decode(pages.lengths, 4, kv_heads, work)
            q, out = low(4, heads, dim), low(4, heads, dim)
            where = (*pages.cache, pages.table, pages.slots, pages.lengths)
            decode_attention(q, *where, 0.3, work, out)


def prompts() -> None:
    """Attention of prompts: a token, one more than a block, a block and a bit, a chunk behind a prefix."""
    for heads, kv_heads, dim, size in HEADS:
        pages = Pages.scattered([1, 65, 70, 17], kv_heads, dim, size)
        ends = longs([1, 66, 136, 140])
        q, out = low(140, heads, dim), low(140, heads, dim)
        for block_q in query_blocks(dim, heads // kv_heads):
            work = PrefillWork.allocate(140, 4, block_q, DEVICE)
            plan_prefill(pages.slots, pages.lengths, ends, 4, 1, work)
            prefill_attention(q, *pages.cache, pages.table, work, 3, 0.3, out)


def invariant_rows() -> None:
    """Attention with the same bits in any batch: prompts whole, and decode rows in parts of 512 tokens."""
    for heads, kv_heads, dim, size in HEADS:
        pages = Pages.scattered([1, 65, 70, 17], kv_heads, dim, size)
        ends = longs([1, 66, 136, 140])
        q, out = low(140, heads, dim), low(140, heads, dim)
        where = (*pages.cache, pages.table, pages.slots, pages.lengths)
        invariant_attention(q, *where, ends, 4, 0.3, out)
    pages = Pages.scattered([1200, 513], 2, 64, 16)
    scratch = PartScratch.allocate(2, 6, 2, 64, 1280, DEVICE)
    where = (*pages.cache, pages.table, pages.slots, pages.lengths)
    invariant_attention(low(2, 6, 64), *where, pages.slots, 2, 0.3, low(2, 6, 64), scratch)


def sampled_from(rows: int, vocabulary: int) -> tuple[Any, ...]:
    """Logits and the rest of what `sample_rows` takes, temperatures 0 and above."""
    slots, positions = torch.arange(rows, device=DEVICE), torch.full((rows,), 3, device=DEVICE)
    temperature, seeds = torch.linspace(0, 2, rows + 1, device=DEVICE), torch.arange(rows + 1, device=DEVICE)
    ids, lengths = torch.zeros(rows + 1, 8, dtype=torch.int64, device=DEVICE), torch.zeros_like(seeds)
    scratch = sampling.SampleScratch.allocate(rows, vocabulary, DEVICE)
    return (
        low(rows, vocabulary), slots, positions, temperature, seeds, ids, lengths, torch.zeros_like(slots), scratch,
    )  # fmt: skip


def choices() -> None:
    """Sampling of one and of several rows; ids of stop tokens masked."""
    for rows, vocabulary in ((1, 9001), (5, 9001), (3, 11)):
        state = sampled_from(rows, vocabulary)
        logits, slots, positions = state[:3]
        banned_until = torch.arange(rows + 1, device=DEVICE) + 4
        sampling.mask_stop_ids(logits, slots, positions, banned_until, longs([[2, -1]] * (rows + 1)))
        sampling.sample_rows(*state)


def filters() -> None:
    """Sampling with every kind of filter."""
    for rows, vocabulary in ((5, 9001), (3, 11)):
        state = sampled_from(rows, vocabulary)
        for top_k, top_p, min_p in ((0, 0.9, 0.0), (5, 0.9, 0.01), (7, 1.0, 0.0), (0, 1.0, 0.1)):
            asked = (torch.full((rows + 1,), value, device=DEVICE) for value in (top_p, min_p))
            found = sampling_filters.FilterScratch.allocate(rows, DEVICE)
            top = torch.full((rows + 1,), top_k, device=DEVICE)
            sampling.sample_rows(*state, filters=sampling_filters.RowFilters(top, *asked, found))


def plans() -> None:
    """A plan entered, and the inputs of steps made of it."""
    config = SchedulerConfig(max_num_seqs=5, max_model_len=64, num_pages=64, vocab_size=9)
    tables = DeviceTables(config, DEVICE)
    inputs = plan.StepInputs.allocate(5, 64, DEVICE)
    work = DecodeWork.allocate(5, 4, 2, 64, DEVICE)
    layout = PlanLayout(3, 2, 1, 1, 20, config.max_stop_ids)
    words = torch.zeros(layout.num_words, dtype=torch.int32)
    words[:8] = torch.tensor([1, 2, 3, 1, 1, 20, 0, 2])  # rows 1 and 2 decode, row 3 has a chunk; two are sampled from
    words[8:11] = torch.tensor([3, 1, 5])  # page 1 of slot 3 is page 5
    words[11] = 3  # slot 3 is admitted
    staged = words.to(DEVICE)
    plan.apply_plan(staged, layout, tables, inputs)
    blocks = PrefillWork.allocate(64, 4, 64, DEVICE)
    plan_mixed.derive_mixed(staged, layout, 2, 64, config.page_size, tables, inputs, work, 2, blocks)
    table = low(9, 96)
    for first_id in (9, None):
        plan.derive_decode(4, config.page_size, tables, inputs, work, 2, table, low(4, 96), first_id)


def exchanges() -> None:
    """What ranks do together, seen from one of two: the other's words and signals are there already."""
    flagged, signalled = 512, 4096
    size = peer_buffers.PeerBuffers.bytes_of(2, flagged, signalled) // 8
    own, others = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for _ in range(2))
    addresses = longs([own.data_ptr(), others.data_ptr()])

    def peers(call: int = 1) -> peer_buffers.PeerBuffers:
        """For calls from `call` on: flags and signals of that number and of the next one, each in its half."""
        words = own[: 4 * flagged].view(2, 2, flagged)
        signals = own.view(torch.int32)[8 * flagged + 4 * signalled :].view(2, 2, -1)
        for number in (call, call + 1):
            words[number % 2] = number << 32
            signals[number % 2] = number
        state = torch.zeros(peer_buffers.STATE_WORDS, dtype=torch.int32, device=DEVICE)
        return peer_buffers.PeerBuffers(addresses, state, 0, 2, flagged, signalled)

    for rows in (3, 21):  # flagged, and signalled
        exchange.sum_ranks(low(rows, 202), peers())
        exchange.add_sum(low(rows, 202), low(rows, 202), peers())
        exchange.add_sum_rms_norm(low(rows, 202), low(rows, 202), low(202), 1e-6, peers())
    rows, slots = 3, torch.arange(3, device=DEVICE)
    tokens, scratch = torch.zeros_like(slots), sampling.SampleScratch.allocate(rows, 9001, DEVICE)
    split_sampling.sample_split_rows(
        low(rows, 9001), range(9000), slots, slots + 1, torch.linspace(0, 2, 4, device=DEVICE),
        torch.arange(4, device=DEVICE), torch.zeros(4, 8, dtype=torch.int64, device=DEVICE), torch.zeros_like(slots),
        tokens, scratch, split_sampling.AgreedMaxima.allocate(rows, DEVICE), peers(),
    )  # fmt: skip


CONTROL = """
extern "C" __global__ void _control(int* out) {
  __shared__ int words[64];
  words[threadIdx.x] = threadIdx.x;
  out[threadIdx.x + 64] = words[63 - threadIdx.x];
}
"""


def control() -> None:
    """A kernel with both faults, as 64 words are allocated: a tool that does not find its own is not believed."""
    kernel = torch.cuda._compile_kernel(CONTROL, "_control")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[torch.zeros(64, dtype=torch.int32, device=DEVICE)])
    torch.cuda.synchronize()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *(prompts, invariant_rows, decode_rows, filters, choices, products_of_few_rows, products_of_one_row),
        *(gated_products, invariant_products, exchanges, keys_and_values, norms_and_gates, plans),
    )
}
"""What is watched by itself, what takes longest first. Together they launch every kernel: tests/test_sanitizer.py."""


def described() -> dict[str, object]:
    """What there is to be watched, and where."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "kernels": sorted(all_kernels()),
        "cases": list(CASES),
    }


def main() -> None:
    """Command line."""
    if not sys.argv[1:]:
        print(json.dumps(described()))
        return
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        with launches_watched() as seen:
            {**CASES, control.__name__: control}[name]()
        print(json.dumps({"kernels": {kernel: [int(n), round(s, 3)] for kernel, (n, s) in seen.items()}}), flush=True)


if __name__ == "__main__":
    main()
