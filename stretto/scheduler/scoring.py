"""Which prompt positions a step scores: those of its chunks whose requests ask for the prompt's log-probabilities.

Host only, from what requests ask for and from what of it is known. A position that is known is never scored again, and
one that is not must be computed: so a cached prefix may cover the known ones alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.request import Request, TokenArray
from stretto.scheduler.batch import ScoredChunk
from stretto.scheduler.prefill import Chunk
from stretto.scheduler.slots import SlotTable


def may_be_cached(request: Request) -> TokenArray:
    """The tokens of `request` to look for in the prefix cache, one more than may be found."""
    wanted = request.prompt_logprobs
    if wanted is None or wanted.complete:
        return request.token_ids
    return request.token_ids[: wanted.num_known + 1]


def scored_chunks(chunks: Sequence[Chunk], slots: SlotTable, num_decode: int) -> tuple[ScoredChunk, ...]:
    """What a step of `num_decode` decode rows and these chunks scores; lengths are those before the step. hot path"""
    scored = []
    row = at = num_decode
    for chunk in chunks:
        wanted = chunk.request.prompt_logprobs
        if wanted is not None and not wanted.complete:
            slot = chunk.request.slot
            start = int(slots.length[slot])
            # Positions before this chunk are known, or launched steps score them.
            first = max(start, wanted.num_known)
            stop = min(start + chunk.num_tokens, wanted.num_wanted)
            if first < stop:
                tokens = slots.tokens[slot, first + 1 : stop + 1].copy()
                scored.append(ScoredChunk(row, at + first - start, first, tokens, wanted.num_tops))
        row += 1
        at += chunk.num_tokens
    return tuple(scored)
