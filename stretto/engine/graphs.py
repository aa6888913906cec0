"""CUDA graphs of steps: one for each size of a ladder and each kind of step, captured once and replayed.

Owns the graphs and the memory pool that they share; what is captured is the caller's. A captured step reads everything
from buffers at fixed addresses, and leaves its results there. Steps of one stream never run at once, so all graphs
share one pool: what one allocates while it runs is the next one's memory.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

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


MOST_PADDED = 3072
"""Up to this many tokens a step with prompt chunks is padded to the next size of `token_ladder`."""
_TOKENS = (
    *range(32, 256, 32),
    *range(256, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2048, 256),
    *range(2048, MOST_PADDED + 1, 512),
)
_FLOP_HIDDEN_PER_LAYER = 3e11
"""About what an H200 computes while a slow host launches a layer kernel by kernel (0.45 ms; a fast one takes half)."""


def choice_ladder(most: int) -> tuple[int, ...]:
    """Numbers of sampled rows of steps with prompt chunks to capture up to `most`: what follows the layers takes little
    more time for twice the rows, as long as they are few."""
    sizes = (1, 8, 16, 32, 64, 128, *range(256, most, 128))
    return (*(size for size in sizes if size < most), most)


def token_ladder(weights_per_layer: int, most: int) -> tuple[int, ...]:
    """Numbers of tokens for which to capture steps with prompt chunks, as far as a GPU may compute for shorter than the
    host launches: close to each other up to `MOST_PADDED`, and `most`, as large as the steps of a busy engine are."""
    hidden = int(_FLOP_HIDDEN_PER_LAYER / (2 * weights_per_layer))
    sizes = tuple(size for size in _TOKENS if size <= min(most, hidden))
    return (*sizes, most) if sizes and sizes[-1] < most <= hidden else sizes


class Recorded(Protocol):
    """Work on fixed tensors that can be repeated: a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Enqueue it again."""

    def reset(self) -> None:
        """Give back what it holds; it must not be running."""


class Record(Protocol):
    """Records what a function enqueues on the current stream; it must have been run before."""

    held_bytes: int
    """Device memory that all that was recorded holds."""

    def __call__(self, work: Callable[[], None]) -> Recorded:
        """The work, recorded. Blocks."""


class CudaRecorder:
    """`Record` as CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.held_bytes = 0

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of `work`: nothing may be compiled or set up in it any more. Blocks."""
        graph = torch.cuda.CUDAGraph()
        free_before = torch.cuda.mem_get_info()[0]
        # Other threads (NCCL's, those that watch other ranks) may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        self.held_bytes += free_before - torch.cuda.mem_get_info()[0]
        return graph


class StepGraphs:
    """Graphs of `work(size, kind)` for every size of a ladder and every kind."""

    def __init__(self, sizes: tuple[int, ...], num_kinds: int, work: Callable[[int, int], None]) -> None:
        self.sizes = sizes
        self._num_kinds = num_kinds
        self._work = work
        self._graphs: dict[tuple[int, int], Recorded] = {}
        self.capture_s = 0.0
        """Seconds that `capture` took, but for running each once before."""
        self.pool_bytes = 0
        """Device memory that the graphs hold."""

    @property
    def captured(self) -> bool:
        """Whether there are graphs to replay. hot path"""
        return bool(self._graphs)

    def capture(self, record: Record) -> None:
        """Capture them all in the current stream. Blocks; the largest first, so that the others fit into its memory.

        Each is run once beforehand: that compiles kernels and lets libraries set themselves up outside the graph.
        """
        order = [(size, kind) for size in reversed(self.sizes) for kind in range(self._num_kinds)]
        for size, kind in order:
            self._work(size, kind)
        began, held_before = time.perf_counter(), record.held_bytes
        for size, kind in order:
            self._graphs[size, kind] = record(partial(self._work, size, kind))
        self.capture_s = time.perf_counter() - began
        self.pool_bytes = record.held_bytes - held_before

    def release(self) -> None:
        """Give the graphs back; none of them may be running. NCCL cannot end before the last one that calls it."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    # hot path
    def replay(self, least: int, kind: int) -> None:
        """Launch the graph of the smallest size that is at least so much. Never blocks."""
        self._graphs[self.sizes[bisect.bisect_left(self.sizes, least)], kind].replay()
