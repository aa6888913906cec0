"""What a user is told of an answer while it comes: as much as at its end, and for no more work per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stretto.output import Job, Sample
from stretto.prompts import Prompt
from stretto.request import FinishReason, Request, SamplingParams, TokenLogprobs


class CountingList(list[Any]):
    """Counts the elements that are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self.reads += 1
            yield element


def job_of(prompt: list[int], rows: list[TokenLogprobs]) -> Job:
    params = SamplingParams(temperature=0, logprobs=1)
    request = Request(0, np.array(prompt, np.int32), params, 0, 1000, (), logprobs=rows)
    job = Job("0", Prompt(None, CountingList(prompt)))
    job.samples.append(Sample(0, request, None, watched=True))
    return job


def rows_of(count: int) -> CountingList:
    return CountingList(TokenLogprobs(-0.1 * (i % 7), 1, [i], [-0.1 * (i % 7)]) for i in range(count))


@pytest.mark.parametrize("tokens_at_once", [1, 3, 100])
def test_deltas_say_what_the_whole_says(tokens_at_once: int) -> None:
    job, rows = job_of([5, 6], []), rows_of(100)
    deltas = []
    for start in range(0, 100, tokens_at_once):
        job.samples[0].request.logprobs += rows[start : start + tokens_at_once]  # type: ignore[operator]
        for token in range(start, min(100, start + tokens_at_once)):
            job.samples[0].push(token)
        deltas.append(job.take_delta().outputs[0])
    job.samples[0].finish(FinishReason.LENGTH)
    whole = job.output().outputs[0]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids == list(range(100))
    assert [row for delta in deltas for row in delta.logprobs or ()] == whole.logprobs
    sums = np.cumsum([row.logprob for row in rows])
    ends = [min(100, start + tokens_at_once) for start in range(0, 100, tokens_at_once)]
    assert [delta.cumulative_logprob for delta in deltas] == pytest.approx([sums[end - 1] for end in ends])
    assert whole.cumulative_logprob == pytest.approx(sums[-1])


def test_a_delta_looks_at_what_is_new_alone() -> None:
    rows = rows_of(400)
    job = job_of(list(range(300)), rows)
    for token in range(400):
        job.samples[0].push(token)
        job.take_delta()
    assert rows.reads <= 3 * 400
    assert job.prompt.token_ids.reads <= 300  # type: ignore[union-attr]
