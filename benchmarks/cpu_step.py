"""One bare decode step (and prefill) on the CPU: the model and paged attention, without scheduler and sampling.

`python benchmarks/cpu_step.py [format ...]`: SmolLM2-135M's shapes with made-up weights, rows with contexts from 64
to 256, in milliseconds per step and tokens per second, best of a few rounds. The floor that it is held against is
all weights and all keys and values once through the memory bandwidth that this run measures.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.attention.base import AttentionInputs, AttentionShape
from stretto.attention.paged_torch import CPU_PAGE_SIZE, PagedTorchAttention
from stretto.models.decoder import Decoder
from stretto.models.loader import load_model
from stretto.models.resolve import ResolvedModel

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
FORMATS = ("float32", "float16", "bfloat16", "int4")
BATCHES = (1, 8, 32)
PREFILL = 512
CPU = torch.device("cpu")


class CountOps(TorchDispatchMode):
    """Counts what reaches a kernel or a view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


class Step:
    """Rows that decode on and on, driven as the engine does it."""

    def __init__(self, model: Decoder, contexts: list[int], page_size: int = CPU_PAGE_SIZE) -> None:
        config = model.config
        self.model, self.page_size = model, page_size
        self.context_B = np.array(contexts, dtype=np.int64)
        pages_per_row = -(-(max(contexts) + PREFILL) // page_size)
        self.attention = PagedTorchAttention(
            AttentionShape.of(
                config,
                page_size=page_size,
                num_pages=1 + len(contexts) * pages_per_row,
                dtype=model.kv_dtype,
                device=CPU,
            )
        )
        self.table_BM = np.zeros((len(contexts), pages_per_row), dtype=np.int64)
        # As the pool hands them out: the prompts' pages row by row, then one to each row that grows.
        page = 1
        for b, context in enumerate(contexts):
            used = -(-context // page_size)
            self.table_BM[b, :used] = range(page, page + used)
            page += used
        for m in range(pages_per_row):
            for b in range(len(contexts)):
                if not self.table_BM[b, m]:
                    self.table_BM[b, m], page = page, page + 1

    def run(self, num_new: int = 1) -> None:
        """One step of `num_new` tokens for every row."""
        rows = len(self.context_B)
        position_BT = self.context_B[:, None] + np.arange(num_new)
        self.context_B = self.context_B + num_new
        page_BT = np.take_along_axis(self.table_BM, position_BT // self.page_size, 1)
        location_T = (page_BT * self.page_size + position_BT % self.page_size).reshape(-1)
        most = int(-(-self.context_B.max() // self.page_size))
        table_BM = self.table_BM[:, :most].copy()
        self.attention.begin_step(
            AttentionInputs(
                torch.from_numpy(table_BM),
                torch.from_numpy(location_T),
                torch.arange(rows + 1) * num_new,
                torch.from_numpy(self.context_B),
                np.full(rows, num_new, dtype=np.int64),
                self.context_B,
                table_BM,
            )
        )
        ids_T = torch.from_numpy(location_T % self.model.config.vocab_size)
        hidden_TD = self.model.forward(ids_T, torch.from_numpy(position_BT.reshape(-1)), self.attention.attend)
        self.model.logits(hidden_TD[num_new - 1 :: num_new]).argmax(-1)

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one decode step has to read."""
        config = self.model.config
        width = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.model.kv_dtype.itemsize
        return int(self.context_B.sum()) * width


def made_up_model(dtype: str) -> Decoder:
    """SmolLM2's shapes with random weights."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMOLLM2))
        resolved = ResolvedModel(name="smollm2-shapes", path=Path(directory), kind="directory")
        return load_model(resolved, dtype=dtype, device=CPU, max_model_len=2048, load_format="dummy")


def seconds_per_step(step: Step, steps: int = 16, rounds: int = 3) -> float:
    """The best round's mean time of one step."""
    step.run()
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step.run()
        best = min(best, (time.perf_counter() - begin) / steps)
    return best


def read_bandwidth() -> float:
    """Bytes per second of summing a tensor far larger than the caches."""
    data, best = torch.ones(64 * 2**20), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.nbytes / best


def main() -> None:
    """Print one line for each format and batch."""
    bandwidth = read_bandwidth()
    print(f"{torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s, page size {CPU_PAGE_SIZE}")
    print(f"{'format':>9} {'B':>3} {'ms/step':>8} {'tok/s':>6} {'floor ms':>8} {'ops':>5}")
    with torch.inference_mode():
        for dtype in sys.argv[1:] or FORMATS:
            model = made_up_model(dtype)
            for batch in BATCHES:
                contexts = np.linspace(64, 200, batch).astype(int).tolist() if batch > 1 else [128]
                step = Step(model, contexts)
                seconds = seconds_per_step(step)
                floor = (model.weight_bytes + step.kv_bytes()) / bandwidth
                with CountOps() as ops:
                    step.run()
                rate = f"{seconds * 1e3:>8.1f} {batch / seconds:>6.0f} {floor * 1e3:>8.1f}"
                print(f"{dtype:>9} {batch:>3} {rate} {ops.count:>5}", flush=True)
            best = float("inf")
            for _ in range(3):
                step = Step(model, [0])
                begin = time.perf_counter()
                step.run(PREFILL)
                best = min(best, time.perf_counter() - begin)
            print(f"{dtype:>9} prefill of {PREFILL}: {best * 1e3:.0f} ms, {PREFILL / best:.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
