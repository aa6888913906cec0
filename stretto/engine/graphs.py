"""CUDA graphs of decode steps: one for each size of a ladder and each kind of step, captured once and replayed.

Owns the graphs and the memory pool that they share; what is captured is the caller's. A captured step reads everything
from buffers at fixed addresses, and leaves its results there. Steps of one stream never run at once, so all graphs
share one pool: what one allocates while it runs is the next one's memory.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from functools import partial

import torch

WHOLE, FILTERED, FORWARD = 0, 1, 2
"""Kinds of decode steps: with sampling of rows without filters; with that of any filters; up to the logits, for steps
in which something is done between them and the choice, or reported of them (minimum lengths, penalties, biases,
log-probabilities)."""
NUM_KINDS = 3


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to capture up to `most`: close where a padded row costs a noticeable part of a step."""
    # From 2 to 7 rows matrix libraries take slower paths than for 8.
    sizes = [1, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return (*(size for size in sizes if size < most), most)


class CudaRecorder:
    """Records work on the current stream as CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of `work`, which must have been run before: nothing may be compiled or set up in it. Blocks."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, those that watch other ranks) may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph


class DecodeGraphs:
    """Graphs of `work(size, kind)` for every size of a ladder and every kind."""

    def __init__(self, sizes: tuple[int, ...], num_kinds: int, work: Callable[[int, int], None]) -> None:
        self.sizes = sizes
        self._num_kinds = num_kinds
        self._work = work
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.capture_s = 0.0
        """Seconds that `capture` took."""
        self.pool_bytes = 0
        """Device memory that the graphs hold."""

    def capture(self, record: CudaRecorder) -> None:
        """Capture them all in the current stream. Blocks; the largest first, so that the others fit into its memory.

        Each is run once beforehand: that compiles kernels and lets libraries set themselves up outside the graph.
        """
        device = torch.cuda.current_device()
        for size in reversed(self.sizes):
            for kind in range(self._num_kinds):
                self._work(size, kind)
        torch.cuda.synchronize(device)
        began, free_before = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        for size in reversed(self.sizes):
            for kind in range(self._num_kinds):
                self._graphs[size, kind] = record(partial(self._work, size, kind))
        torch.cuda.synchronize(device)
        self.capture_s = time.perf_counter() - began
        self.pool_bytes = free_before - torch.cuda.mem_get_info(device)[0]

    def release(self) -> None:
        """Give the graphs back; none of them may be running. NCCL cannot end before the last one that calls it."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    # hot path
    def replay(self, rows: int, kind: int) -> None:
        """Launch the graph of the smallest size that holds `rows`. Never blocks."""
        self._graphs[self.sizes[bisect.bisect_left(self.sizes, rows)], kind].replay()
