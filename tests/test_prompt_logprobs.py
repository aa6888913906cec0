"""Log-probabilities of the prompt: those of the plain model, whatever chunks, overlap and preemptions were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto import LLM
from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.device.checking import CheckingDevice
from stretto.device.hazards import Hazard, HazardError
from stretto.engine.engine import Engine, InFlightStep
from stretto.engine.runner import StepModel
from stretto.engine.scoring import SLICE
from stretto.engine.staging import PlanLayout, RingEntry
from stretto.errors import InvalidRequest
from stretto.prompt_logprobs import PromptLogprobs
from stretto.request import FinishReason, SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from stretto.scheduler.scheduler import Scheduler
from tests.helpers.exact_model import next_logits
from tests.helpers.no_sync import no_host_reads
from tests.helpers.simulation import VOCAB, Simulation, Stream, small_config
from tests.helpers.tiny_models import FAMILIES, reference_logits, save, tiny_config, tiny_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 1], [1, 2, 3, 4, 5, 6, 7, 8, 2, 2], [4], [7, 7, 7, 7, 7], [1, 2, 3, 4, 9, 9]]


def asking(tops: int = 2, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 6, "ignore_eos": True, "prompt_logprobs": tops, **options})


def plain(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 6, "ignore_eos": True, **options})


def assert_scored(known: PromptLogprobs | None, prompt: list[int], logits_PV: torch.Tensor, tolerance: float) -> None:
    """All of the prompt is known, and it is what `logits_PV` (of each position) say."""
    assert known is not None
    assert known.complete
    scored = known.known()
    assert len(scored) == len(prompt) - 1
    for index, token in enumerate(prompt[1:]):
        logprobs_V = logits_PV[index].double().log_softmax(0)
        assert scored.logprob_Q[index] == pytest.approx(float(logprobs_V[token]), abs=tolerance)
        better = int((logprobs_V > logprobs_V[token]).sum())
        assert scored.rank_Q[index] == better + 1
        tops = logprobs_V.topk(known.num_tops)
        assert scored.top_ids_QL[index].tolist() == tops.indices.tolist()
        assert scored.top_logprobs_QL[index] == pytest.approx(tops.values.numpy(), abs=tolerance)


def assert_as_expected(simulation: Simulation, stream: Stream) -> None:
    simulation.assert_as_expected(stream)
    known = stream.request.prompt_logprobs
    if stream.request.params.prompt_logprobs is None:
        assert known is None
        return
    logits = [next_logits(stream.prompt[: i + 1], VOCAB) for i in range(len(stream.prompt))]
    assert_scored(known, stream.prompt, torch.from_numpy(np.stack(logits)), 1e-5)


def watch(engine: Engine) -> list[StepPlan]:
    """The plans that the engine launches from now on."""
    plans: list[StepPlan] = []
    launch = engine.launch
    engine.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign]
    return plans


# -- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 11, 24])
def test_any_chunk_size_and_depth(depth: int, chunk: int) -> None:
    """With neighbours that do not ask, or ask for another number, in both batch policies."""
    seqs = min(4, chunk)
    for seed, policy in enumerate(("mixed", "prefill-first")):
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": seqs, "batch_policy": policy}
        simulation = Simulation(small_config(overlap_depth=depth, **options), CheckingDevice(seed))
        plans = watch(simulation.runtime.engine)
        streams = [simulation.add(prompt, plain() if i == 1 else asking(i % 4)) for i, prompt in enumerate(PROMPTS)]
        simulation.run()
        for stream in streams:
            assert_as_expected(simulation, stream)
        asked = [stream for stream in streams if stream.request.prompt_logprobs is not None]
        assert sum(plan.num_scored for plan in plans) == sum(len(stream.prompt) - 1 for stream in asked)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 2, 8])
def test_a_request_that_asks_finds_nothing_in_the_cache_but_fills_it(depth: int, page_size: int) -> None:
    simulation = Simulation(
        small_config(overlap_depth=depth, page_size=page_size, num_pages=100), CheckingDevice(depth)
    )
    prompt = PROMPTS[0]
    found = (len(prompt) - 1) // page_size * page_size
    for params, cached in ((asking(), 0), (plain(), found), (asking(3), 0), (asking(0), 0), (plain(), found)):
        stream = simulation.add(prompt, params)
        simulation.run()
        assert_as_expected(simulation, stream)
        assert stream.request.num_cached == cached


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_after_a_preemption_nothing_is_scored_twice(depth: int, caching: bool) -> None:
    """Some are preempted while their prompt is computed, some later; both may use what is cached of what is known."""
    preemptions = reused = 0
    for seed in range(3):
        config = small_config(
            overlap_depth=depth, num_pages=9, page_size=4, max_num_batched_tokens=4 + seed,
            enable_prefix_caching=caching,
        )  # fmt: skip
        simulation = Simulation(config, CheckingDevice(seed))
        plans = watch(simulation.runtime.engine)
        streams = [simulation.add(PROMPTS[i % 5], asking(i % 3, max_tokens=12), priority=-(i % 2)) for i in range(6)]
        simulation.run()
        preempted = [stream for stream in streams if stream.request.num_preemptions]
        preemptions += len(preempted)
        for stream in streams:
            assert_as_expected(simulation, stream)
        assert sum(plan.num_scored for plan in plans) == sum(len(stream.prompt) - 1 for stream in streams)
        computed = sum(len(plan.prefill_tokens) for plan in plans)
        known = sum(stream.request.num_preemptions * len(stream.prompt) for stream in preempted)
        reused += computed < known + sum(len(stream.prompt) for stream in streams)
    assert preemptions > 0
    assert bool(reused) == caching


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_preemption_in_the_middle_of_a_prompt_keeps_what_is_known(depth: int) -> None:
    """The first chunks' results are there; the request then goes on where the known part ends."""
    config = small_config(overlap_depth=depth, max_num_batched_tokens=5, max_num_seqs=2)
    simulation = Simulation(config, CheckingDevice(depth))
    stream = simulation.add(PROMPTS[0], asking())
    known = stream.request.prompt_logprobs
    assert known is not None
    while known.num_known == 0:
        simulation.turn()
    assert not known.complete
    scheduler = simulation.runtime.scheduler
    if stream.request in scheduler.lifecycle.prefill.running:
        scheduler.monitor = scheduler.lifecycle.monitor = None  # it asks what the preemption is for
        scheduler.lifecycle.preempt(stream.request, 1)
    simulation.run()
    assert_as_expected(simulation, stream)
    assert depth > 1 or stream.request.num_preemptions == 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_request_that_ends_early_leaves_nothing_behind(depth: int) -> None:
    """Aborted at every turn: what its launched steps bring afterwards is dropped, neighbours are not concerned."""
    for turns in range(6):
        simulation = Simulation(small_config(overlap_depth=depth, max_num_batched_tokens=4), CheckingDevice(turns))
        leaving = simulation.add(PROMPTS[0], asking(3))
        staying = simulation.add(PROMPTS[1], asking(1))
        for _ in range(turns):
            simulation.turn()
        known = leaving.request.prompt_logprobs
        assert known is not None
        simulation.runtime.end(leaving.request, FinishReason.ABORT)
        simulation.turn()
        before = known.num_known
        simulation.run()
        assert known.num_known == before
        assert_as_expected(simulation, staying)


def test_who_does_not_ask_pays_nothing() -> None:
    simulation = Simulation(small_config(), CheckingDevice(0))
    plans = watch(simulation.runtime.engine)
    for prompt in PROMPTS:
        simulation.add(prompt, plain(logprobs=2))
    simulation.run()
    assert not any(plan.scored for plan in plans)
    assert not any(PlanLayout.of(plan, 4).num_scored for plan in plans)


def test_a_plan_has_room_for_a_step_of_scored_tokens() -> None:
    config = small_config(max_num_batched_tokens=64, max_model_len=64, num_pages=65)
    simulation = Simulation(config, CheckingDevice(0))
    plans = watch(simulation.runtime.engine)
    streams = [simulation.add([1 + (i + k) % 10 for k in range(16)], asking(4)) for i in range(4)]
    simulation.run()
    for stream in streams:
        assert_as_expected(simulation, stream)
    assert max(plan.num_scored for plan in plans) == 60
    assert all(PlanLayout.of(plan, 4).num_words <= PlanLayout.capacity(config) for plan in plans)


# -- what would be a fault is seen ----------------------------------------------------------------------------------


class EngineThatCopiesScoresLate(Engine):
    """The copy-done event does not cover the prompt's log-probabilities."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        step = super().launch(plan)
        if plan.scored:
            super()._return_results(plan, step.entry)
        return step

    def _return_results(self, plan: StepPlan, entry: RingEntry) -> None:
        super()._return_results(replace(plan, scored=()), entry)


def test_a_checking_device_sees_scores_that_the_host_reads_too_early() -> None:
    simulation = Simulation(
        small_config(), make_runtime=lambda *parts: Runtime(*parts, engine_type=EngineThatCopiesScoresLate)
    )
    simulation.add(PROMPTS[0], asking())
    with pytest.raises(HazardError) as caught:
        simulation.run()
    assert caught.value.hazard is Hazard.raw_results


class SchedulerThatUsesTheCache(Scheduler):
    """Plans no positions that a cached prefix covers."""

    def schedule(self) -> StepPlan | None:
        for _, _, request in self.lifecycle.prefill._waiting:
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.num_known = request.prompt_logprobs.num_wanted
        return super().schedule()


def test_the_tests_would_see_positions_that_are_never_scored() -> None:
    simulation = Simulation(
        small_config(), make_runtime=lambda *parts: Runtime(*parts, scheduler_type=SchedulerThatUsesTheCache)
    )
    stream = simulation.add(PROMPTS[0], asking())
    simulation.run()
    with pytest.raises(AssertionError):
        assert_as_expected(simulation, stream)


def test_positions_are_known_once_and_in_order() -> None:
    known = PromptLogprobs(5, 1)
    part = known.known().part(0, 0, 1)
    two = type(part)(
        np.zeros(2, np.float32), np.ones(2, np.int32), np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
    )
    known.append(0, two)
    for first in (0, 1, 3):
        with pytest.raises(RuntimeError, match="2 of 4 are known"):
            known.append(first, two)
    known.append(2, two)
    assert known.complete
    assert len(known.known()) == 4


# -- real architectures ---------------------------------------------------------------------------------------------


class GuardedEngine(Engine):
    """Forbids every look at a device tensor's value while a step is launched and while it runs."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        with no_host_reads():
            return super().launch(plan)

    def _step(self, plan: StepPlan, layout: PlanLayout, staged: torch.Tensor) -> None:
        with no_host_reads():
            super()._step(plan, layout, staged)


class MeasuredModel:
    """Notes how many rows of logits exist at once."""

    def __init__(self, model: StepModel) -> None:
        self.forward = model.forward
        self.sizes: list[int] = []
        self._logits = model.logits

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden_SD))
        return self._logits(hidden_SD)


LONG = [(i * 37 + i * i) % 199 for i in range(90)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family))
    path = save(model, tmp_path).path
    prompts = [LONG, [5, 17, 99, 3], LONG[3:60], [1]]
    logits = [reference_logits(model, prompt) for prompt in prompts]
    for depth, chunk, page_size in ((0, 128, 16), (1, 33, 1), (2, 7, 64)):
        options: dict[str, Any] = {
            "overlap_depth": depth,
            "max_num_batched_tokens": chunk,
            "page_size": page_size,
            "max_num_seqs": 4,
        }
        config = EngineConfig(model=str(path), skip_tokenizer_init=True, dtype="float32", **options)
        parts = assemble(config)
        measured = MeasuredModel(parts.model)
        runtime = Runtime(parts.config, parts.device, measured, parts.attention, engine_type=GuardedEngine)
        requests = [runtime.add(prompt, asking(i)) for i, prompt in enumerate(prompts)]
        while runtime.has_work:
            runtime.step()
        runtime.close()
        for request, prompt, logits_PV in zip(requests, prompts, logits, strict=True):
            assert_scored(request.prompt_logprobs, prompt, logits_PV, 1e-4)
        assert max(measured.sizes) == (SLICE if chunk > SLICE else max(chunk, 4))


# -- the Python API -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(dummy_model: Path) -> Any:
    with LLM(str(dummy_model), load_format="dummy", dtype="float32", max_model_len=256, max_logprobs=5) as made:
        yield made


TEXT = "the quick brown fox jumps over the lazy dog"


def test_outputs_have_a_row_for_each_prompt_token(llm: LLM) -> None:
    for tops in (0, 1, 5):
        (output,) = llm.generate(
            [TEXT], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=tops), use_tqdm=False
        )
        rows = output.prompt_logprobs
        assert rows is not None
        assert len(rows) == len(output.prompt_token_ids)
        assert rows[0] is None
        for token_id, row in zip(output.prompt_token_ids[1:], rows[1:], strict=True):
            assert row is not None
            assert next(iter(row)) == token_id
            assert row[token_id].decoded_token == llm.tokenizer.decode([token_id])
            ranks = sorted(entry.rank or 0 for entry in row.values())
            assert ranks == sorted({*range(1, tops + 1), row[token_id].rank or 0})
            by_rank = sorted(row.values(), key=lambda entry: entry.rank or 0)
            assert [e.logprob for e in by_rank] == sorted((e.logprob for e in by_rank), reverse=True)


def test_the_last_rows_of_a_longer_prompt_are_what_was_said_of_the_output(llm: LLM) -> None:
    """The same tokens, once sampled and once given."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2)
    (first,) = llm.generate([TEXT], params, use_tqdm=False)
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    (second,) = llm.generate([ids], params, use_tqdm=False)
    assert second.prompt_logprobs is not None
    assert first.outputs[0].logprobs is not None
    for given, sampled in zip(second.prompt_logprobs[-6:], first.outputs[0].logprobs, strict=True):
        assert given is not None
        assert given.keys() == sampled.keys()
        for token_id, entry in given.items():
            assert entry.logprob == pytest.approx(sampled[token_id].logprob, abs=1e-4)
            assert entry.rank == sampled[token_id].rank


def test_many_samples_have_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=1)
    plans = watch(llm._runtime.engine)
    (output,) = llm.generate([TEXT], params, use_tqdm=False)
    assert len(output.outputs) == 3
    assert output.prompt_logprobs is not None
    assert sum(plan.num_scored for plan in plans) == len(output.prompt_token_ids) - 1


def test_a_stream_tells_them_once(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=8, prompt_logprobs=1)
    (whole,) = llm.generate([TEXT], params, use_tqdm=False)
    deltas = list(llm.stream(TEXT, params))
    told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(deltas) > 1
    assert told == [whole.prompt_logprobs]


def test_nobody_who_does_not_ask_is_told(llm: LLM) -> None:
    (output,) = llm.generate([TEXT], SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is None


def test_one_token_alone_has_no_log_probability(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=3), use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_the_number_is_a_whole_one(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs is .*; allowed: a whole number of at least 0"):
        SamplingParams(prompt_logprobs=value)


def test_the_engine_s_largest_number_is_the_limit(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs is 6; allowed: up to 5 \(the engine's max_logprobs\)"):
        llm.generate([TEXT], SamplingParams(prompt_logprobs=6), use_tqdm=False)
