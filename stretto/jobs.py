"""Runs prompts on one Runtime and turns its steps into their outputs. Owns every sample from submission to its end.

One thread at a time. It decides nothing about what runs next; that is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stretto.engine.random import derive_seed
from stretto.errors import InvalidRequest
from stretto.output import Job, Sample
from stretto.prompts import Prompt
from stretto.request import FinishReason, SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepOutput


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt to run, checked; its parameters, a copy that nobody else has; its priority (smaller runs earlier)."""

    prompt: Prompt
    params: SamplingParams
    priority: int


class JobRunner:
    """The live samples of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._live: dict[int, Sample] = {}
        """Samples that have not ended, by the uid of their request."""
        self._watched: dict[int, Sample] = {}
        """Those among them whose tokens are looked at as they come."""
        self._num_jobs = 0

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
    ) -> list[Work]:
        """Each prompt with its parameters and its priority, all checked; nothing is queued yet.

        Raises InvalidRequest if the numbers differ, or if the engine cannot run one (then it says which).
        """
        count = len(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams | Sequence) or isinstance(params, str):
            given = type(params).__name__
            raise InvalidRequest(f"sampling_params is a {given}; allowed: SamplingParams, one or a list of them")
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each) != count:
            raise InvalidRequest(f"{count} prompts but {len(each)} sampling_params; give one for all or one for each")
        ranks = _ranks(priority, count)
        works = []
        for index, (prompt, entry, rank) in enumerate(zip(prompts, each, ranks, strict=True)):
            if not isinstance(entry, SamplingParams):
                raise InvalidRequest(f"sampling_params {index} is a {type(entry).__name__}; allowed: SamplingParams")
            try:
                copy = replace(entry)  # checked again: a field may have been set since it was made
                works.append(Work(replace(prompt, token_ids=self._runtime.check(prompt.token_ids, copy)), copy, rank))
            except InvalidRequest as error:
                if count == 1:
                    raise
                raise InvalidRequest(f"prompt {index}: {error}") from error
        return works

    def submit(self, works: Sequence[Work], *, watched: bool) -> list[Job]:
        """Queue all of these. `watched`: their tokens are streamed."""
        jobs: list[Job] = []
        try:
            for work in works:
                jobs.append(Job(str(self._num_jobs), work.prompt))
                self._num_jobs += 1
                self._add_samples(jobs[-1], work, watched)
        except BaseException:
            self.abort(jobs)
            raise
        return jobs

    def _add_samples(self, job: Job, work: Work, watched: bool) -> None:
        tokenizer = self._runtime.tokenizer if work.params.detokenize else None
        for index in range(work.params.n):
            params = work.params.of_sample(index)
            seed = None if params.seed is None else derive_seed(params.seed, index)
            request = self._runtime.add(work.prompt.token_ids, params, seed=seed, priority=work.priority)
            sample = Sample(index, request, tokenizer, watched=watched)
            job.samples.append(sample)
            self._live[request.uid] = sample
            if sample.watched:
                self._watched[request.uid] = sample

    def turn(self) -> list[Sample]:
        """One turn of the loop; returns the samples that ended with it."""
        ended: list[Sample] = []
        for output in self._runtime.step():
            if self._watched:
                ended += self._take_tokens(output)
            for request in output.finished:
                sample = self._live.get(request.uid)
                if sample is None:
                    continue  # ended by a stop string or an abort before
                stopped = request.finish_reason is FinishReason.STOP and request.stop_token is not None
                if not sample.watched:
                    sample.push_all(self._runtime.output_ids(request).tolist(), ends_with_stop_token=stopped)
                self._end(sample, request.finish_reason or FinishReason.ABORT)
                ended.append(sample)
        return ended

    def _take_tokens(self, output: StepOutput) -> list[Sample]:  # hot path
        """Give the watched samples their tokens; returns those that a stop string ended before their request did."""
        stopping = {request.uid for request in output.finished if request.finish_reason is FinishReason.STOP}
        stopped: list[Sample] = []
        for uid, token_id in zip(output.uids.tolist(), output.tokens.tolist(), strict=True):
            sample = self._watched.get(uid)
            if sample is None or not sample.push(token_id, is_stop_token=uid in stopping):
                continue
            self._runtime.end(sample.request, FinishReason.STOP, sample.num_tokens)
            self._end(sample, FinishReason.STOP)
            stopped.append(sample)
        return stopped

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        """The sample's one end."""
        sample.finish(reason)
        del self._live[sample.request.uid]
        self._watched.pop(sample.request.uid, None)

    def abort(self, jobs: Iterable[Job]) -> None:
        """End what still runs of these jobs and wait (a step or two) until their pages are free again."""
        samples = [sample for job in jobs for sample in job.samples]
        for sample in samples:
            self._runtime.end(sample.request, FinishReason.ABORT)
            if sample.request.uid in self._live:
                self._end(sample, FinishReason.ABORT)
        while self._runtime.has_work and any(self._holds(sample) for sample in samples):
            self.turn()

    def _holds(self, sample: Sample) -> bool:
        """Whether the engine still knows the sample's request or keeps its pages."""
        return sample.request.uid in self._runtime.requests or sample.request.slot != 0

    def settle(self) -> None:
        """When nothing else runs: process the steps in flight, so that all pages are free. Blocks for a step or two."""
        while not self._live and self._runtime.has_work:
            self.turn()


def _ranks(priority: Sequence[int] | None, count: int) -> list[int]:
    """One priority for each of `count` prompts. What has no place in an order would break every queue."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence):
        raise InvalidRequest(f"priority is a {type(priority).__name__}; allowed: a list, one whole number a prompt")
    if len(priority) != count:
        raise InvalidRequest(f"{count} prompts but {len(priority)} priorities; give one for each")
    for index, rank in enumerate(priority):
        if not isinstance(rank, int) or isinstance(rank, bool) or not -(2**63) <= rank < 2**63:
            raise InvalidRequest(f"priority {index} is {rank!r}; allowed: a 64-bit signed whole number")
    return list(priority)
