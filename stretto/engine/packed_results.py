"""Where a step's results lie in one buffer, so that they leave the device in one copy, tokens first.

Owns the layout, the same on the device and in pinned memory; what the entries mean is said at
`stretto.engine.sampler.SampledOut`. Legend: S sampled rows, L reported log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch


class HostResults(NamedTuple):
    """The host's views of the results."""

    tokens_S: npt.NDArray[np.int64]
    logprob_S: npt.NDArray[np.float32]
    rank_S: npt.NDArray[np.int64]
    top_ids_SL: npt.NDArray[np.int64]
    top_logprobs_SL: npt.NDArray[np.float32]


class DeviceResults(NamedTuple):
    """The same on the device. The last two have the rows of one record, so they are not contiguous."""

    tokens_S: torch.Tensor
    logprob_S: torch.Tensor
    rank_S: torch.Tensor
    top_ids_SL: torch.Tensor
    top_logprobs_SL: torch.Tensor


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Of up to `max_rows` rows with up to `max_logprobs` reported tokens each, in 64-bit words.

    All tokens, all ranks, all log-probabilities; then a record for each row, its best ids and their log-probabilities.
    What a step of few rows needs is a prefix.
    """

    max_rows: int
    max_logprobs: int

    @property
    def num_words(self) -> int:
        """Length of the buffer."""
        return self._head + self.max_rows * self._record

    # hot path
    def words_of(self, count: int, num_logprobs: int) -> int:
        """Length of the prefix that holds the results of `count` rows; `num_logprobs` as in `SamplingMix`."""
        if num_logprobs < 0:
            return count
        return self._head + (count * self._record if num_logprobs else 0)

    def on_device(self, words: torch.Tensor) -> DeviceResults:
        """Views of an int64 buffer."""
        rows, tops, head = self.max_rows, self.max_logprobs, self._head
        record_SW = words[head:].view(rows, self._record)
        return DeviceResults(
            words[:rows],
            words[2 * rows : head].view(torch.float32)[:rows],
            words[rows : 2 * rows],
            record_SW[:, :tops],
            record_SW[:, tops:].view(torch.float32)[:, :tops],
        )

    def on_host(self, words: npt.NDArray[np.generic]) -> HostResults:
        """Views of an int64 buffer."""
        longs = cast(npt.NDArray[np.int64], words)
        rows, tops, head = self.max_rows, self.max_logprobs, self._head
        record_SW = longs[head:].reshape(rows, self._record)
        return HostResults(
            longs[:rows],
            longs[2 * rows : head].view(np.float32)[:rows],
            longs[rows : 2 * rows],
            record_SW[:, :tops],
            record_SW[:, tops:].view(np.float32)[:, :tops],
        )

    @property
    def _head(self) -> int:
        return 2 * self.max_rows + (self.max_rows + 1) // 2

    @property
    def _record(self) -> int:
        return self.max_logprobs + (self.max_logprobs + 1) // 2
