"""How a GPU's memory is divided: weights, workspace and graphs first, the KV cache gets the rest.

Owns the arithmetic. Every part is known before anything is allocated, so what cannot fit is refused with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.engine.graphs import NUM_KINDS, choice_ladder, ladder, token_ladder
from stretto.engine.scoring import SLICE
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
    """Activations and sampling (or prompt scoring) of the largest step, request tables, libraries."""
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
    *,
    total: int,
    free: int,
    utilization: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    page_size: int,
    element_bytes: int,
    graphs: bool,
    attention_bytes: int = 0,
) -> MemoryPlan:
    """The division for a model whose weights are loaded already; `total` and `free` are the GPU's, in bytes.

    `attention_bytes`: what the attention backend allocates beside the cache.
    """
    heads = model.num_heads + 2 * model.num_kv_heads
    per_token = 3 * model.hidden_size + (heads + 2 * model.num_heads) * model.head_dim + 3 * model.intermediate_size
    activations = max_num_batched_tokens * per_token * element_bytes
    sampling = max(max_num_seqs, SLICE) * model.vocab_size * _SAMPLING_BYTES
    tables = (2 * max_num_seqs + 1) * 8 * (max_model_len + 1 + -(-max_model_len // page_size))
    captured = 0
    if graphs:
        # One step's room, which all graphs share, and what they leave for what follows them.
        sizes = token_ladder(_weights_per_layer(model), max_num_batched_tokens)
        tokens = max(sizes, default=0)
        room = max(max_num_seqs * (per_token + model.vocab_size), tokens * per_token)
        left = max_num_seqs * (model.vocab_size + 2 * model.hidden_size) + tokens * model.num_heads * model.head_dim
        captured = NUM_KINDS * len(ladder(max_num_seqs)) * _GRAPH_BYTES + (room + left) * element_bytes
        captured += (_PROMPT_KINDS * len(sizes) + _EQUAL_LENGTHS) * _PROMPT_GRAPH_BYTES
        captured += NUM_KINDS * len(choice_ladder(max_num_seqs)) * _CHOICE_BYTES if sizes else 0
    return MemoryPlan(
        total=total,
        allowed=int(utilization * total),
        in_use=total - free,
        workspace=activations + sampling + tables + attention_bytes + _LIBRARIES,
        graphs=captured,
    ).checked()


def _weights_per_layer(model: ModelConfig) -> int:
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return model.hidden_size * (attention + 3 * model.intermediate_size)
