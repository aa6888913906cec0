"""Decode attention alone on the CPU, as a multiple of its bandwidth floor: `python benchmarks/cpu_attention.py`.

SmolLM2's shapes (30 layers, 9 query heads on 3 kv heads, head dim 64), the write of the new token included. Beside the
paged backend stand two simpler ways: padded slots (every row owns room for the longest context; no pages at all) and
pages gathered into a reused workspace. All alternate within one run; medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from stretto.attention.base import AttentionInputs, AttentionShape
from stretto.attention.paged_torch import PagedTorchAttention

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")
CASES = (
    ("1 x 128", [128]),
    ("8 x 64..256", None),
    ("32 x 64..256", None),
    ("8 x 512", [512] * 8),
    ("32 x 512", [512] * 32),
)


def contexts_of(name: str, contexts: list[int] | None) -> list[int]:
    """The contexts of a case; None means spread evenly over its range."""
    if contexts is not None:
        return contexts
    count, bounds = name.split(" x ")
    low, high = (int(bound) for bound in bounds.split(".."))
    return [int(length) for length in np.linspace(low, high, int(count))]


def paged(contexts: list[int], dtype: torch.dtype, page_size: int, *, scattered: bool = False) -> Callable[[], None]:
    """The backend itself. `scattered`: every row's pages lie anywhere in a pool twice as large."""
    context_B = np.array(contexts, dtype=np.int64)
    used_B = -(-context_B // page_size)
    num_pages = int(used_B.sum()) * (2 if scattered else 1) + 1
    pages = np.arange(1, num_pages)
    if scattered:
        np.random.default_rng(0).shuffle(pages)
    table_BM = np.zeros((len(contexts), used_B.max()), dtype=np.int64)
    ends_B = np.cumsum(used_B)
    for b, (end, used) in enumerate(zip(ends_B, used_B, strict=True)):
        table_BM[b, :used] = pages[end - used : end]
    last_B = context_B - 1
    location_B = table_BM[np.arange(len(contexts)), last_B // page_size] * page_size + last_B % page_size
    backend = PagedTorchAttention(
        AttentionShape(LAYERS, HEADS, KV_HEADS, HEAD_DIM, page_size, num_pages, dtype, CPU, SCALE)
    )
    for tensor in (backend._cache_L2PKSH,):  # real memory: untouched zero pages would all be one
        tensor.fill_(0.5)
    inputs = AttentionInputs(
        torch.from_numpy(table_BM),
        torch.from_numpy(location_B),
        torch.arange(len(contexts) + 1),
        torch.from_numpy(context_B),
        np.ones(len(contexts), dtype=np.int64),
        context_B,
        table_BM,
    )
    qkv_TXH = torch.randn(len(contexts), HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    q_TNH, k_TKH, v_TKH = qkv_TXH.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def step() -> None:
        backend.begin_step(inputs)
        for layer in range(LAYERS):
            backend.attend(layer, q_TNH, k_TKH, v_TKH)

    return step


def dense_step(
    contexts: list[int], dtype: torch.dtype, keys_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Attention over what `keys_values` gives for a layer: [B, K, C, H] each, padded to the longest row."""
    rows, longest = len(contexts), max(contexts)
    q_BKGH = torch.randn(rows, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).to(dtype)
    beyond = torch.arange(longest) >= torch.tensor(contexts)[:, None]
    mask_B11C = torch.zeros(rows, longest, dtype=dtype).masked_fill_(beyond, float("-inf"))[:, None, None]

    def step() -> None:
        for layer in range(LAYERS):
            k_BKCH, v_BKCH = keys_values(layer)
            scores = torch.matmul(q_BKGH, k_BKCH.transpose(2, 3)).mul_(SCALE).add_(mask_B11C)
            torch.matmul(scores.softmax(-1), v_BKCH)

    return step


def padded_slots(contexts: list[int], dtype: torch.dtype) -> Callable[[], None]:
    """No pages: one slab for each row, as long as the longest."""
    size = (LAYERS, 2, len(contexts), KV_HEADS, max(contexts), HEAD_DIM)
    slabs = torch.full(size, 0.5, dtype=dtype)
    return dense_step(contexts, dtype, lambda layer: (slabs[layer, 0], slabs[layer, 1]))


def gathered_pages(contexts: list[int], dtype: torch.dtype, page_size: int = 16) -> Callable[[], None]:
    """Pages copied into a reused workspace, layer by layer."""
    longest = -(-max(contexts) // page_size)
    pages = torch.full((LAYERS, 2, longest * len(contexts) * KV_HEADS, page_size * HEAD_DIM), 0.5, dtype=dtype)
    index = torch.arange(pages.shape[2]).view(len(contexts), longest, KV_HEADS).transpose(1, 2).reshape(-1)
    workspaces = [torch.empty_like(pages[0, 0]) for _ in range(2)]
    size = (len(contexts), KV_HEADS, longest * page_size, HEAD_DIM)

    def keys_values(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        for half, workspace in enumerate(workspaces):
            torch.index_select(pages[layer, half], 0, index, out=workspace)
        k_BKCH, v_BKCH = (workspace.view(size)[:, :, : max(contexts)] for workspace in workspaces)
        return k_BKCH, v_BKCH

    return dense_step(contexts, dtype, keys_values)


def read_bandwidth() -> float:
    """Bytes per second of summing a tensor far larger than the caches."""
    data, times = torch.ones(64 * 2**20), []
    for _ in range(7):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return data.nbytes / sorted(times)[len(times) // 2]


def main() -> None:
    """One line for each case and element type."""
    bandwidth = read_bandwidth()
    print(f"{torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s; ms for all layers (x floor)")
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for name, given in CASES:
                contexts = contexts_of(name, given)
                floor = sum(contexts) * 2 * LAYERS * KV_HEADS * HEAD_DIM * dtype.itemsize / bandwidth
                ways = {
                    "paged 16": paged(contexts, dtype, 16),
                    "paged 32": paged(contexts, dtype, 32),
                    "paged 64": paged(contexts, dtype, 64),
                    "paged 64 scattered": paged(contexts, dtype, 64, scattered=True),
                    "padded slots": padded_slots(contexts, dtype),
                    "gathered 16": gathered_pages(contexts, dtype),
                }
                times: dict[str, list[float]] = {way: [] for way in ways}
                for step in ways.values():
                    step()
                for _ in range(7):
                    for way, step in ways.items():
                        begin = time.perf_counter()
                        step()
                        times[way].append(time.perf_counter() - begin)
                medians = {way: sorted(t)[len(t) // 2] for way, t in times.items()}
                cells = ", ".join(f"{way} {t * 1e3:.1f} ({t / floor:.1f})" for way, t in medians.items())
                print(f"{str(dtype)[6:]} {name}: floor {floor * 1e3:.1f}; {cells}", flush=True)


if __name__ == "__main__":
    main()
