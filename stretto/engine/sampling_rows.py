"""How each row of a step is to be sampled: what the host knows of all of them, and what the device holds for each.

Decides nothing and samples nothing; `sampler` does. Legend: S sampled rows, V vocabulary, E stop ids of a row (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True, slots=True)
class SamplingMix:
    """What the host knows about a step's sampled rows before it launches the step.

    Decides which work is enqueued, never what a row's result is: any mix that is true of the rows gives the same
    tokens, be it exact or not (an `any_...` may be set, and an `all_...` not, without need). Filters count for random
    (not greedy) rows only.
    """

    all_greedy: bool
    any_top_k: bool
    max_top_k: int
    """The largest top-k of the rows that have one; 0 if none has."""
    any_top_p: bool
    any_min_p: bool
    any_min_tokens: bool
    """A row is still before its `min_position`."""
    num_logprobs: int
    """-1: nobody asked. Else the largest number asked for; 0 is the sampled token's only."""
    all_top_k: bool = False
    """Every random row has a top-k, so that the vocabulary beyond `max_top_k` need not be looked at."""
    num_penalised: int = 0
    """Rows with a penalty, at least."""
    penalised_length: int = 0
    """Tokens that the longest of them has so far, at least."""
    max_biases: int = 0
    """The largest number of biased tokens of a row, at least."""

    @classmethod
    def of(
        cls,
        *,
        vocabulary: int,
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float32],
        min_p: npt.NDArray[np.float32],
        position: npt.NDArray[np.int64],
        min_position: npt.NDArray[np.int64],
        num_logprobs: npt.NDArray[np.int64],
    ) -> SamplingMix:
        """The exact mix of unadjusted rows given as host arrays [S], with the values that `SamplingRows` holds."""
        is_random = temperature >= GREEDY_BELOW
        has_top_k = is_random & (top_k > 0) & (top_k < vocabulary)
        return cls(
            all_greedy=not is_random.any(),
            any_top_k=bool(has_top_k.any()),
            max_top_k=int(top_k.max(initial=0, where=has_top_k)),
            any_top_p=bool((is_random & (top_p < 1.0)).any()),
            any_min_p=bool((is_random & (min_p > 0.0)).any()),
            any_min_tokens=bool((position < min_position).any()),
            num_logprobs=int(num_logprobs.max(initial=-1)),
            all_top_k=bool((has_top_k == is_random).all()),
        )

    @property
    def is_plain(self) -> bool:
        """Greedy rows and temperatures, nothing else."""
        return not self.filters and self.only_chooses

    @property
    def filters(self) -> bool:
        """Some random row keeps but a part of the vocabulary."""
        return self.any_top_k or self.any_top_p or self.any_min_p

    @property
    def only_chooses(self) -> bool:
        """Tokens are chosen from the logits as they are, and nothing else is asked of these."""
        return not (self.any_min_tokens or self.adjusts or self.num_logprobs >= 0)

    @property
    def adjusts(self) -> bool:
        """Some row's logits are changed before they are sampled (see `stretto.engine.adjustment`)."""
        return self.num_penalised > 0 or self.max_biases > 0


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Device tensors that say how each sampled row is to be sampled; one entry a row, all on the logits' device."""

    temperature_S: torch.Tensor
    """float32: 0 is greedy."""
    top_k_S: torch.Tensor
    """int64: 0 and less, or V and more, is off."""
    top_p_S: torch.Tensor
    """float32 in (0, 1]: 1 is off."""
    min_p_S: torch.Tensor
    """float32 in [0, 1]: 0 is off."""
    seed_S: torch.Tensor
    """int64, any value."""
    position_S: torch.Tensor
    """int64: index in its sequence of the token being sampled."""
    min_position_S: torch.Tensor
    """int64: stop tokens cannot be sampled while position < min_position; 0 is never."""
    stop_ids_SE: torch.Tensor
    """int64 [S, E]: the row's stop tokens, padded with -1; E may be 0."""

    def slice(self, start: int, stop: int) -> SamplingRows:
        """Views of rows [start, stop)."""
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> SamplingRows:
        """Copies on a device. Blocks the host: for tests and benchmarks."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SamplingRows:
        return SamplingRows(
            temperature_S=change(self.temperature_S),
            top_k_S=change(self.top_k_S),
            top_p_S=change(self.top_p_S),
            min_p_S=change(self.min_p_S),
            seed_S=change(self.seed_S),
            position_S=change(self.position_S),
            min_position_S=change(self.min_position_S),
            stop_ids_SE=change(self.stop_ids_SE),
        )
