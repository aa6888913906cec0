"""Each kernel of a decode step and of a prefill against the roofline: achieved bytes/s and FLOP/s, and their ceilings.

Times are medians of graph replays, so launches from Python do not count; inputs rotate, so that weights come from
memory and not from the cache. Owns the measurements; the kernels are `stretto.kernels`'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.bench import workloads
from stretto.bench.decode_state import w1_decode_step
from stretto.bench.gpu import environment
from stretto.kernels import few_rows
from stretto.kernels.decode_attention import decode_attention
from stretto.kernels.decode_work import DecodeWork, plan_decode
from stretto.kernels.elementwise import add_rms_norm, silu_and_mul
from stretto.kernels.gated_matmul import gated_matmul
from stretto.kernels.prefill_attention import prefill_attention, query_block
from stretto.kernels.prefill_work import PrefillWork, plan_prefill
from stretto.kernels.rope_write import HeadTransform, rope_write
from stretto.kernels.sampling import SampleScratch, sample_rows
from stretto.kernels.sampling_filters import FilterScratch, RowFilters
from stretto.kernels.small_matmul import Norm, small_matmul

DEVICE = torch.device("cuda")
_CACHE_BYTES = 200e6
"""Inputs rotate through this many bytes at least: several times the L2 cache."""


def time_us(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Median microseconds of one call, over graphs of all calls in a row."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(sorted(times)[len(times) // 2])


def time_eagerly_us(call: Callable[[], object], rounds: int = 5) -> float:
    """Median microseconds of a long call that may not be capturable."""
    call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(sorted(times)[len(times) // 2])


def random(*shape: int) -> Tensor:
    """bf16."""
    return torch.randn(*shape, device=DEVICE).mul_(0.05).to(torch.bfloat16)


CEILINGS = {"bytes_per_s": "read 2 GiB", "flops_per_s": "product 8192^3"}
"""By what is measured, the row that says how much of it this GPU does at best."""


class Report:
    """Rows of (name, time, bytes/s, FLOP/s)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, us: float, num_bytes: float = 0.0, flops: float = 0.0) -> None:
        """Record and print a measurement."""
        row: dict[str, Any] = {"name": name, "us": us}
        text = f"{name}: {us:.2f} us"
        if num_bytes:
            row["bytes_per_s"] = num_bytes / us * 1e6
            text += f", {num_bytes / us * 1e-6:.2f} TB/s"
        if flops:
            row["flops_per_s"] = flops / us * 1e6
            text += f", {flops / us * 1e-6:.0f} TFLOP/s"
        self.rows.append(row)
        print(text, flush=True)


def add_shares(rows: Sequence[dict[str, Any]]) -> None:
    """To each row, the share of the ceiling that it reaches."""
    by_name = {row["name"]: row for row in rows}
    for measured, name in CEILINGS.items():
        for row in rows:
            if measured in row:
                row["share"] = row[measured] / by_name[name][measured]


def ceilings(report: Report) -> None:
    """What this GPU does at best: copy, read, matrix product."""
    big = torch.empty(2**31, dtype=torch.uint8, device=DEVICE).random_()
    other = torch.empty_like(big)
    report.add("copy 2 GiB", time_us([lambda: other.copy_(big)]), 2 * big.nbytes)
    wide = big.view(torch.int64)
    report.add(CEILINGS["bytes_per_s"], time_us([lambda: wide.sum()]), big.nbytes)
    a, b = random(8192, 8192), random(8192, 8192)
    report.add(CEILINGS["flops_per_s"], time_us([lambda: a @ b]), flops=2 * 8192**3)


def matrices(report: Report, model: str, rows: int) -> None:
    """The products of one layer: cuBLAS, and ours where they take that many rows.

    Ours include the norm, gate and sum for one row, and the gate for more; their sums may be in parts.
    """
    shape = workloads.SHAPES[model]
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    for name, width, outputs, normed, gate, adds in (
        ("qkv", hidden, q + 2 * kv, True, False, False),
        ("o", q, hidden, False, False, True),
        ("gate_up", hidden, 2 * ffn, True, True, False),
        ("down", ffn, hidden, False, False, True),
        ("head", hidden, 151_936, True, False, False),
    ):
        num_bytes = 2 * width * outputs
        weights = [random(outputs, width) for _ in range(max(1, int(_CACHE_BYTES // num_bytes)))]
        x, norm = random(rows, width), Norm(random(width), 1e-6) if normed else None
        target = random(rows, outputs) if adds else None
        label = f"{model} {name} {rows} rows"
        report.add(f"{label} cuBLAS", time_us([partial(F.linear, x, w) for w in weights]), num_bytes)
        if rows == 1:
            ours = partial(small_matmul, x, norm=norm, gate=gate, add_to=target)
            report.add(f"{label} ours", time_us([partial(ours, weight_OI=w) for w in weights]), num_bytes)
        elif rows <= few_rows.MAX_ROWS:
            if gate:
                calls = [partial(few_rows.few_rows_gated, x, w) for w in weights]
            else:
                calls = [partial(few_rows.few_rows_matmul, x, w, whole=name == "head") for w in weights]
            report.add(f"{label} ours", time_us(calls), num_bytes)


def large_products(report: Report, model: str, rows: int) -> None:
    """The products of one layer of a large step, with what cuBLAS or a kernel of ours does behind them."""
    shape = workloads.SHAPES[model]
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    products = {"qkv": (hidden, q + 2 * kv), "o": (q, hidden), "gate_up": (hidden, 2 * ffn), "down": (ffn, hidden)}
    for name, (width, outputs) in products.items():
        x, weights, flops = (
            random(rows, width),
            [random(outputs, width) for _ in range(4)],
            2.0 * rows * width * outputs,
        )
        label = f"{model} {name} {rows} rows"
        report.add(f"{label} cuBLAS", time_us([partial(F.linear, x, w) for w in weights]), flops=flops)
        if name in ("o", "down"):
            target = random(rows, outputs)
            report.add(
                f"{label} cuBLAS, added", time_us([partial(target.addmm_, x, w.t()) for w in weights]), flops=flops
            )
        if name == "gate_up":
            report.add(f"{label} gate inside", time_us([partial(gated_matmul, x, w) for w in weights]), flops=flops)


def elementwise(report: Report, model: str, rows: int) -> None:
    """Norm, gate, and the write of the heads."""
    shape = workloads.SHAPES[model]
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    x, update, weight = random(rows, hidden), random(rows, hidden), random(hidden)
    label = f"{model} {rows} rows"
    report.add(f"{label} add+norm", time_us([lambda: add_rms_norm(x, update, weight, 1e-6)] * 8), 8 * x.numel())
    gate_up = random(rows, 2 * ffn)
    report.add(f"{label} gate", time_us([lambda: silu_and_mul(gate_up)] * 8), 6 * rows * ffn)
    qkv = random(rows, heads + 2 * kv_heads, dim)
    turns = torch.randn(4096, dim, device=DEVICE)
    transform = HeadTransform(heads, kv_heads, random(heads + kv_heads, dim), 1e-6, turns)
    cache = torch.zeros(2, 2 + rows // 16, kv_heads, 16, dim, dtype=torch.bfloat16, device=DEVICE)
    places = torch.arange(rows, device=DEVICE)
    positions = places % 4096
    call = lambda: rope_write(qkv, positions, places, transform, cache[0], cache[1])  # noqa: E731
    report.add(f"{label} norm+rope+write", time_us([call] * 8), 2 * 2 * qkv.numel())


def attention(report: Report, model: str, contexts: Sequence[int], page_size: int = 16) -> None:
    """Decode attention of one layer over several layers' caches, pages in random order."""
    rows, most = len(contexts), -(-max(contexts) // page_size)
    pages = sum(-(-c // page_size) for c in contexts) + 1
    order = (torch.randperm(pages - 1) + 1).tolist()
    table = torch.zeros(rows, most, dtype=torch.int64)
    for row, context in enumerate(contexts):
        count = -(-context // page_size)
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    name = f"{model} decode attention {rows} x {sum(contexts) // rows}"
    _attention(report, model, name, (table, torch.arange(rows), torch.tensor(contexts)), sum(contexts), page_size)


def attention_of_w1(report: Report, model: str, step: int) -> None:
    """The same for what a step of W1 really reads: its rows, padding, and pages as the scheduler gave them out."""
    state = w1_decode_step(step)
    tables = tuple(torch.from_numpy(x) for x in (state.page_table_RM, state.slot_B, state.context_B))
    name = f"{model} decode attention, W1 step {step}, {len(state.slot_B)} rows"
    _attention(report, model, name, tables, state.num_tokens, 16)


def _attention(
    report: Report, model: str, name: str, tables: tuple[Tensor, ...], num_tokens: int, page_size: int
) -> None:
    """`tables`: page table, slots and contexts."""
    shape = workloads.SHAPES[model]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    num_bytes = num_tokens * 4 * kv_heads * dim
    caches = [
        random(2, int(tables[0].max()) + 1, kv_heads, page_size, dim)
        for _ in range(max(1, int(_CACHE_BYTES // num_bytes)))
    ]
    table, slots, lengths = (x.to(DEVICE) for x in tables)
    rows = len(slots)
    q, out = random(rows, heads, dim), random(rows, heads, dim)
    work = DecodeWork.allocate(rows, heads, kv_heads, dim, DEVICE)
    plan_decode(lengths, rows, kv_heads, work)
    calls = [
        lambda c=cache: decode_attention(q, c[0], c[1], table, slots, lengths, dim**-0.5, work, out) for cache in caches
    ]
    # Several calls a graph: the time between the events includes the graph's launch.
    report.add(name, time_us(calls * -(-16 // len(calls))), num_bytes)


def prefill(report: Report, model: str, name: str, chunks: Sequence[tuple[int, int]]) -> None:
    """Chunks of prompts, (cached tokens, new ones): the paged kernel; without a cached prefix torch's flash attention,
    and where they are equally long cuDNN's, too."""
    shape = workloads.SHAPES[model]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    pasts, news = ([chunk[part] for chunk in chunks] for part in (0, 1))
    rows, tokens, longest = len(chunks), sum(news), max(news)
    flops = 4.0 * heads * dim * sum(new * past + new * (new + 1) / 2 for past, new in chunks)
    title = f"{model} prefill {name}"
    qkv = random(tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    pages = [-(-(past + new) // 16) for past, new in chunks]
    cache = random(2, sum(pages) + 1, kv_heads, 16, dim)
    table = torch.zeros(rows, max(pages), dtype=torch.int64)
    free = iter((1 + torch.randperm(sum(pages))).tolist())
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([next(free) for _ in range(count)])
    table, slots = table.to(DEVICE), torch.arange(rows, device=DEVICE)
    contexts, ends = torch.tensor(pasts).add(torch.tensor(news)).to(DEVICE), torch.tensor(news).cumsum(0).to(DEVICE)
    out = torch.empty_like(q)
    work = PrefillWork.allocate(tokens, rows, query_block(dim, heads // kv_heads, tokens), DEVICE)
    plan_prefill(slots, contexts, ends, rows, 0, work)
    programs = work.most_blocks(tokens, rows)
    paged = lambda: prefill_attention(q, cache[0], cache[1], table, work, programs, 0.1, out)  # noqa: E731
    report.add(f"{title} paged", time_us([paged]), flops=flops)
    if any(pasts):
        return
    starts = F.pad(ends, (1, 0)).to(torch.int32)
    flash = torch.ops.aten._flash_attention_forward
    call = lambda: flash(q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=0.1)  # noqa: E731
    report.add(f"{title} flash", time_us([call]), flops=flops)
    if min(news) < longest:
        return
    qs, ks, vs = (x.view(rows, longest, -1, dim).transpose(1, 2) for x in (q, k, v))
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    try:
        sdpa = lambda: cudnn(qs, ks, vs, None, False, 0.0, True, False, scale=0.1)  # noqa: E731
        report.add(f"{title} cuDNN", time_us([sdpa]), flops=flops)
    except RuntimeError as error:
        print(f"cuDNN attention: {error}", flush=True)


_FILTERS: dict[str, dict[str, float]] = {
    "no filter, no search": {},
    "no filter": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-k 1000": {"top_k": 1000},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.999": {"top_p": 0.999},
}


def sampling(report: Report, rows: int) -> None:
    """All of sampling for random rows over bf16 logits, by filter; "no filter" is that of a step where others have one.

    The bytes are those of one read of the logits: what a row without filters needs. Flat logits are those of random
    weights, where thousands of tokens lie close to each boundary, peaked ones like a trained model's.
    """
    vocabulary, table = 151_936, partial(torch.full, (rows + 1,), device=DEVICE)
    slots, positions = torch.arange(1, rows + 1, device=DEVICE), torch.full((rows,), 5, device=DEVICE)
    token_ids, lengths = torch.zeros(rows + 1, 64, dtype=torch.int64, device=DEVICE), table(0)
    tokens, scratch = torch.zeros_like(slots), SampleScratch.allocate(rows, vocabulary, DEVICE)
    found = FilterScratch.allocate(rows, DEVICE)
    for shape, scale in (("flat", 1.0), ("peaked", 3.0)):
        copies = range(max(1, int(_CACHE_BYTES // (2 * rows * vocabulary))))
        all_logits = [torch.randn(rows, vocabulary, device=DEVICE).mul_(scale).to(torch.bfloat16) for _ in copies]
        for name, asked in _FILTERS.items():
            filters = RowFilters(
                table(int(asked.get("top_k", 0))), table(asked.get("top_p", 1.0)), table(asked.get("min_p", 0.0)), found
            )
            call = partial(
                sample_rows,
                slot_S=slots,
                position_S=positions,
                temperature_R=table(0.6),
                seed_R=torch.arange(rows + 1, device=DEVICE),
                token_ids_RL=token_ids,
                length_R=lengths,
                tokens_S=tokens,
                scratch=scratch,
                filters=None if name == "no filter, no search" else filters,
            )
            us = time_us([partial(call, logits) for logits in all_logits])
            report.add(f"sampling {rows} rows, {shape}, {name}", us, all_logits[0].nbytes)
    wide = all_logits[0].float()
    for name, reference in (("sort", partial(torch.sort, wide, dim=1)), ("topk 20", partial(torch.topk, wide, 20))):
        report.add(f"torch.{name} of {rows} rows of logits alone", time_eagerly_us(reference), wide.nbytes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    report = Report()
    with torch.inference_mode():
        ceilings(report)
        for rows in (1, 8, 32, 64, 256):
            matrices(report, "qwen3-0.6b", rows)
        for rows in (1, 32, 64):
            matrices(report, "qwen3-8b", rows)
        for model in ("qwen3-0.6b", "qwen3-8b"):
            large_products(report, model, 8192)
        for rows in (1, 32, 256, 8192):
            elementwise(report, "qwen3-0.6b", rows)
        mixed = [100 + (i * 7919) % 1500 for i in range(256)]
        for contexts in ([384], [384] * 32, [384] * 256, [1024] * 256, mixed, [8192], [8192] * 8):
            attention(report, "qwen3-0.6b", contexts)
        attention(report, "qwen3-8b", [384] * 128)
        for step in (420, 700):
            attention_of_w1(report, "qwen3-0.6b", step)
        whole = [(0, new) for new in (900, 333, 1024, 120, 777, 999, 401, 650, 512, 1000, 700, 352)]
        for model in ("qwen3-0.6b", "qwen3-8b"):
            prefill(report, model, "4 x 2048", [(0, 2048)] * 4)
            prefill(report, model, "64 x 128", [(0, 128)] * 64)
            prefill(report, model, "256 x 32", [(0, 32)] * 256)
            prefill(report, model, "12 whole of 120 to 1024", whole)
            prefill(report, model, "12 whole, 424 behind 600", [(600, 424), *whole])
            prefill(report, model, "200 x 40 behind 1000", [(1000, 40)] * 200)
            prefill(report, model, "2048 behind 2048", [(2048, 2048)])
        for rows in (1, 32, 256, 512):
            sampling(report, rows)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        add_shares(report.rows)
        options.output.write_text(json.dumps({"environment": environment(), "measurements": report.rows}, indent=1))


if __name__ == "__main__":
    main()
