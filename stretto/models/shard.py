"""How a model is split over the ranks of a tensor group: which heads, feed-forward columns and token ids a rank holds.

Owns the division and its limits (Shoeybi et al., "Megatron-LM", 2019, section 3). Reads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.errors import InvalidRequest
from stretto.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's share. Ranges are indices in the whole model."""

    rank: int
    size: int
    config: ModelConfig
    """The model that the rank computes: its own numbers of heads and its own feed-forward width, all else whole."""
    heads: range
    """Query heads; they read no other kv heads than the rank's."""
    kv_heads: range
    """With fewer kv heads than ranks, neighbours hold the same one."""
    ffn: range
    vocabulary: range
    """Token ids whose embedding and logits the rank computes; may be empty at the end."""
    vocabulary_rows: int
    """Rows of each rank's part of the table, the same everywhere: those past `vocabulary` are padding."""


def shard_of(config: ModelConfig, rank: int, size: int) -> ModelShard:
    """The share of `rank` among `size` ranks. Raises as `check_size`."""
    check_size(config, size)
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    heads, ffn = config.num_heads // size, config.intermediate_size // size
    kv_heads = max(1, config.num_kv_heads // size)
    first_kv_head = rank * config.num_kv_heads // size
    rows = -(-config.vocab_size // size)
    return ModelShard(
        rank=rank,
        size=size,
        config=replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=ffn),
        heads=range(rank * heads, (rank + 1) * heads),
        kv_heads=range(first_kv_head, first_kv_head + kv_heads),
        ffn=range(rank * ffn, (rank + 1) * ffn),
        vocabulary=range(min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size)),
        vocabulary_rows=rows,
    )


def check_size(config: ModelConfig, size: int) -> None:
    """Raises InvalidRequest if the model cannot be split over `size` ranks; says what is allowed."""
    if not _divides(config, size):
        allowed = [str(candidate) for candidate in range(1, config.num_heads + 1) if _divides(config, candidate)]
        raise InvalidRequest(
            f"tensor_parallel_size is {size}, but the model has {config.num_heads} query heads, {config.num_kv_heads} "
            f"kv heads and a feed-forward width of {config.intermediate_size}: it must divide the first and the last, "
            f"and be a divisor or a multiple of the kv heads; allowed: {', '.join(allowed)}"
        )


def _divides(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    return (
        size >= 1
        and config.num_heads % size == 0
        and config.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    )
