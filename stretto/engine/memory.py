"""How a GPU's memory is divided: weights, buffers, workspace and graphs first, the KV cache gets the rest.

Owns the arithmetic. Every part is known before anything is allocated, so what cannot fit is refused with the numbers.
What the engine keeps for its life is not computed by formulas: it is made once without memory, and added up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stretto.attention.base import AttentionBackend
from stretto.config import SchedulerConfig
from stretto.engine.adjustment import penalty_bytes
from stretto.engine.graphs import NUM_KINDS, choice_ladder, ladder, token_ladder
from stretto.engine.runner import MakeRunner, RunnerParts, StepModel
from stretto.engine.sampler import SampledOut
from stretto.engine.scoring import SLICE, ScoredOut
from stretto.engine.staging import StagingRing
from stretto.engine.tables import DeviceTables
from stretto.errors import InvalidRequest
from stretto.models.config import ModelConfig

GIB = 2**30
MIB = 2**20
_LIBRARIES = 256 * MIB
"""Workspaces of matrix libraries, compiled kernels, the allocator's rounding."""
_GRAPH_BYTES = 3 * MIB
"""Driver memory of one captured decode step."""
_PROMPT_GRAPH_BYTES = 3 * MIB // 2
"""The same of the layers of a step with prompts."""
_CHOICE_BYTES = MIB // 2
"""The same of the choice of tokens alone."""
_PROMPT_KINDS = 4
"""Graphs of one number of tokens, at most: without decode rows, and for three ways to cut their attention."""
_EQUAL_LENGTHS = 5
"""Graphs of the largest step more, at most: for prompts of one length, as many as triton_paged.py's `CUDNN_COUNTS`."""
_SAMPLING_BYTES = 52
"""Bytes per (row, vocabulary entry) when filters and log-probabilities are all in use: the logits, their float32 copy
and the temporaries of `engine.filters`."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU."""

    total: int
    allowed: int
    """What the engine may use, of `total`."""
    in_use: int
    """Used already: weights, and whatever other processes hold."""
    workspace: int
    """Activations and sampling (or prompt scoring) of the largest step, what is kept between steps, libraries."""
    graphs: int

    @property
    def cache(self) -> int:
        """What is left for keys and values; negative if the rest does not fit."""
        return self.allowed - self.in_use - self.workspace - self.graphs

    def describe(self) -> str:
        """One line with all numbers, in GiB."""
        return (
            f"{self.allowed / GIB:.2f} of {self.total / GIB:.2f} GiB allowed, {self.in_use / GIB:.2f} in use (weights "
            f"included), {self.workspace / GIB:.2f} workspace, {self.graphs / GIB:.2f} graphs, "
            f"{max(0, self.cache) / GIB:.2f} left for the KV cache"
        )

    def checked(self) -> MemoryPlan:
        """The plan itself. Raises InvalidRequest with the numbers if nothing is left for the cache."""
        if self.cache <= 0:
            raise InvalidRequest(
                f"the GPU's memory does not suffice: {self.describe()}; raise gpu_memory_utilization, or lower "
                "max_num_seqs, max_num_batched_tokens or max_model_len"
            )
        return self


def plan_memory(
    model: ModelConfig,
    limits: SchedulerConfig,
    *,
    total: int,
    free: int,
    utilization: float,
    element_bytes: int,
    graphs: bool,
    buffers: int,
) -> MemoryPlan:
    """The division for a model whose weights are loaded already; `total` and `free` are the GPU's, in bytes.

    `limits`: of steps and sequences; its pages do not matter. `buffers`: what `buffer_bytes` found, and whatever else
    is kept.
    """
    rows, max_tokens = limits.max_rows, limits.max_num_batched_tokens
    heads = model.num_heads + 2 * model.num_kv_heads
    per_token = 3 * model.hidden_size + (heads + 2 * model.num_heads) * model.head_dim + 3 * model.intermediate_size
    activations = max_tokens * per_token * element_bytes
    # Added, though not in use at once: the allocator may keep small blocks that do not join into large ones.
    sampling = max(rows, SLICE) * model.vocab_size * _SAMPLING_BYTES + penalty_bytes(rows, limits.max_model_len)
    captured = 0
    if graphs:
        sizes = token_ladder(_weights_per_layer(model), max_tokens)
        # One step's room, which all graphs share; what they leave for what follows them is among the buffers.
        room = max(rows * (per_token + model.vocab_size), max(sizes, default=0) * per_token)
        captured = NUM_KINDS * len(ladder(rows)) * _GRAPH_BYTES + room * element_bytes
        captured += (_PROMPT_KINDS * len(sizes) + _EQUAL_LENGTHS) * _PROMPT_GRAPH_BYTES
        captured += NUM_KINDS * len(choice_ladder(rows)) * _CHOICE_BYTES if sizes else 0
    return MemoryPlan(
        total=total,
        allowed=int(utilization * total),
        in_use=total - free,
        workspace=activations + sampling + buffers + _LIBRARIES,
        graphs=captured,
    ).checked()


def buffer_bytes(
    limits: SchedulerConfig, model: StepModel, make: Callable[[], tuple[AttentionBackend, MakeRunner]]
) -> int:
    """Device memory that an engine keeps between steps, beside weights and cache.

    `make` makes attention backend and runner as for the engine, with a cache of any size. Whatever it and the runner
    make with `torch.zeros` and the like has no memory.
    """
    meta, paper = torch.device("meta"), _OnPaper()
    with paper:
        attention, make_runner = make()
        make_runner(
            RunnerParts(
                limits,
                model,
                attention,
                DeviceTables(limits, meta),
                SampledOut.allocate(limits.max_rows, limits.max_logprobs, meta),
                ScoredOut.allocate(limits.max_num_batched_tokens, limits.max_logprobs, meta),
                lambda slot_S, position_S, tokens_S: None,
                torch.zeros(limits.max_rows, dtype=torch.int64, device=meta),
            )
        )
    # The ring has pinned memory beside that on the device, and would take it.
    return paper.nbytes - attention.cache_bytes + StagingRing.device_bytes(limits, limits.overlap_depth + 1)


class _OnPaper(TorchFunctionMode):
    """While it is on, tensors that are made for a given device have a shape, and no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        """What they would take."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch's hook for every function that is called."""
        given = kwargs or {}
        if func not in _MAKERS or given.get("device") is None:
            return func(*args, **given)
        made = func(*args, **{**given, "device": "meta"})
        self.nbytes += made.nbytes
        return made


_MAKERS = frozenset({torch.zeros, torch.ones, torch.empty, torch.full, torch.arange})


def _weights_per_layer(model: ModelConfig) -> int:
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return model.hidden_size * (attention + 3 * model.intermediate_size)
