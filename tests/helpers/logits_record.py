"""The logits that requests were sampled from, as a fused runner made them: by the request's seed and the position."""

from __future__ import annotations

from typing import Any

import torch

from stretto.runtime import Runtime

Recorded = dict[tuple[int, int], torch.Tensor]


def record_logits(runtime: Runtime) -> Recorded:
    """What is filled while `runtime` runs: rows of logits on the host by (seed, position of the token to be sampled).

    Give each request a seed of its own and ask for log-probabilities, so that no graph samples unseen. A row that is
    computed twice (after an interruption) must be the same to the bit.
    """
    choice: Any = runtime.engine.runner._choice  # type: ignore[attr-defined]
    finish, recorded = choice.finish, Recorded()

    def watch(mix: Any, logits_SV: torch.Tensor, slot_S: torch.Tensor, position_S: torch.Tensor) -> None:
        seeds = runtime.engine.tables.seed_R[slot_S].tolist()
        for seed, position, logits_V in zip(seeds, position_S.tolist(), logits_SV.cpu(), strict=True):
            row = recorded.setdefault((seed, position), logits_V.clone())
            assert torch.equal(row, logits_V), (seed, position)
        finish(mix, logits_SV, slot_S, position_S)

    choice.finish = watch
    return recorded
