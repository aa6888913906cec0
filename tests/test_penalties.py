"""Requests with penalties and logit_bias through the whole engine: the streams of a host that recounts everything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stretto.device.checking import CheckingDevice
from stretto.device.hazards import Hazard, HazardError
from stretto.engine.engine import Engine
from stretto.engine.staging import PlanLayout
from stretto.errors import InvalidRequest
from stretto.request import MAX_LOGIT_BIAS, SamplingParams
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from stretto.scheduler.scheduler import Scheduler
from tests.helpers.simulation import VOCAB, Simulation, expected_output, small_config

KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.2},
    {"frequency_penalty": -0.9},
    {"repetition_penalty": 1.6},
    {"logit_bias": {3: 2.5, "0": -100}},
    {"presence_penalty": -0.4, "frequency_penalty": 0.6, "repetition_penalty": 0.7, "logit_bias": {5: 1.0, 6: -1.0}},
    {},
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 2, 2], [4], [7, 7, 7, 7, 7], [1, 2, 3, 4, 9, 9]]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 12, "ignore_eos": True, **options})


def test_each_kind_changes_the_stream() -> None:
    """So that the tests below cannot pass by doing nothing."""
    for prompt in (PROMPTS[0], PROMPTS[3]):
        plain = expected_output(prompt, greedy(), 24)
        assert all(expected_output(prompt, greedy(**kind), 24) != plain for kind in KINDS[:-1])


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [4, 7, 24])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_streams_are_the_host_s_at_any_depth_and_chunk_size(depth: int, chunk: int, policy: str) -> None:
    for seed in range(4):
        simulation = Simulation(
            small_config(overlap_depth=depth, max_num_batched_tokens=chunk, batch_policy=policy), CheckingDevice(seed)
        )
        streams = [
            simulation.add(PROMPTS[(i + seed) % 5], greedy(**kind, ignore_eos=i % 2 == 0))
            for i, kind in enumerate(KINDS * 2)
        ]
        simulation.run()
        for stream in streams:
            simulation.assert_as_expected(stream)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_cached_prefix_counts_like_a_computed_one(depth: int, kind: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth), CheckingDevice(kind))
    for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[4]):
        stream = simulation.add(prompt, greedy(**KINDS[kind]))
        simulation.run()
        simulation.assert_as_expected(stream)
        assert stream.request.num_cached == (0 if stream.request.uid == 0 else 4 if prompt is PROMPTS[4] else 8)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_request_still_knows_prompt_from_output(depth: int, caching: bool) -> None:
    preemptions = 0
    for seed in range(6):
        config = small_config(overlap_depth=depth, num_pages=8, enable_prefix_caching=caching)
        simulation = Simulation(config, CheckingDevice(seed))
        streams = [simulation.add(PROMPTS[i % 5], greedy(**KINDS[(i + seed) % 6])) for i in range(6)]
        simulation.run()
        preemptions += simulation.runtime.stats().preemptions
        for stream in streams:
            simulation.assert_as_expected(stream)
    assert preemptions > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_slots_go_from_one_kind_to_another(depth: int) -> None:
    """Two slots for many requests that end at different times: what a slot's last holder wanted is forgotten."""
    rng = np.random.default_rng(depth)
    simulation = Simulation(small_config(overlap_depth=depth, max_num_seqs=2), CheckingDevice(depth))
    for _ in range(24):
        params = greedy(**KINDS[rng.integers(6)], max_tokens=int(rng.integers(1, 8)), ignore_eos=False)
        simulation.add(PROMPTS[rng.integers(5)], params)
    simulation.run()
    for stream in simulation.streams.values():
        simulation.assert_as_expected(stream)


def test_nothing_goes_up_for_requests_that_want_nothing() -> None:
    plans = _watched_plans([greedy(), greedy(top_k=3), greedy(logit_bias={})])
    assert not any(plan.adjusted or plan.mix.adjusts for plan in plans)


def test_what_goes_up_does_not_grow_with_the_context() -> None:
    plans = _watched_plans([greedy(**KINDS[4]), greedy(**KINDS[2])])
    assert [len(plan.adjusted) for plan in plans] == [2] + [0] * (len(plans) - 1)
    steady = [plan for plan in plans if not len(plan.page_id_U) and not len(plan.prefill_tokens)]
    assert len({PlanLayout.of(plan, 4).num_words for plan in steady}) == 1
    assert [plan.mix.penalised_length for plan in plans] == list(range(9, 9 + len(plans)))


def test_cached_tokens_of_one_step_fit_into_a_plan() -> None:
    """Many penalised requests with long cached prefixes at once: those without room wait for the next step."""
    prompt = [1 + i % 10 for i in range(21)]
    config = small_config(max_num_seqs=4, num_pages=40)
    simulation = Simulation(config)
    plans = _watch(simulation.runtime.engine)
    simulation.add(prompt, greedy(max_tokens=1))
    simulation.run()
    plans.clear()
    streams = [simulation.add(prompt, greedy(max_tokens=2, repetition_penalty=1.5 + i)) for i in range(4)]
    unpenalised = simulation.add(prompt, greedy(max_tokens=2))
    simulation.run()
    for stream in [*streams, unpenalised]:
        simulation.assert_as_expected(stream)
        assert stream.request.num_cached == 20
    cached = [sum(len(adjustment.cached_tokens) for adjustment in plan.adjusted) for plan in plans]
    assert sum(cached) == 80
    assert max(cached) <= config.max_model_len
    assert all(PlanLayout.of(plan, 4).num_words <= PlanLayout.capacity(config) for plan in plans)


class SchedulerThatSendsNoCachedTokens(Scheduler):
    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is None:
            return None
        none = np.empty(0, np.int32)
        return replace(plan, adjusted=tuple(replace(part, cached_tokens=none) for part in plan.adjusted))


def test_a_checking_device_sees_a_penalty_that_reads_tokens_which_never_came() -> None:
    simulation = Simulation(
        small_config(),
        make_runtime=lambda *parts: Runtime(*parts, scheduler_type=SchedulerThatSendsNoCachedTokens),
    )
    for _ in range(2):
        simulation.add(PROMPTS[0], greedy(presence_penalty=1))
    with pytest.raises(HazardError) as caught:
        simulation.run()
    assert caught.value.hazard is Hazard.token_feedback


def _watch(engine: Engine) -> list[StepPlan]:
    """The plans that the engine launches from now on."""
    plans: list[StepPlan] = []
    launch = engine.launch
    engine.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign]
    return plans


def _watched_plans(params: list[SamplingParams]) -> list[StepPlan]:
    simulation = Simulation(small_config(max_num_batched_tokens=24, enable_prefix_caching=False, eos_ids=()))
    plans = _watch(simulation.runtime.engine)
    for one in params:
        simulation.add([1, 2, 3, 4, 5, 6, 7, 8, 9][: 9 if len(params) == 2 else 3], one)
    simulation.run()
    return plans


# -- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.01, 2.01, math.nan, math.inf, "1", None, True])
def test_additive_penalties_are_numbers_from_minus_2_to_2(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name} is .*; allowed: a number from -2.0 to 2.0"):
        SamplingParams(**{name: value})
    for allowed in (-2, 0, 0.5, 2.0):
        SamplingParams(**{name: allowed})


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, math.inf, "1", None, True])
def test_the_repetition_penalty_is_above_0(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="repetition_penalty is"):
        SamplingParams(repetition_penalty=value)
    for allowed in (1e-300, 1, 1.5, 1e300):
        SamplingParams(repetition_penalty=allowed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([5], "logit_bias is"),
        ("5", "logit_bias is"),
        ({"AI": -100}, "logit_bias has the key 'AI'"),
        ({"-1": 1}, "logit_bias has the key '-1'"),
        ({" 1": 1}, "logit_bias has the key ' 1'"),
        ({"²": 1}, "logit_bias has the key"),
        ({"1" * 5000: 1}, "logit_bias has the key"),
        ({-1: 1}, "logit_bias has the key -1"),
        ({1.0: 1}, "logit_bias has the key 1.0"),
        ({True: 1}, "logit_bias has the key True"),
        ({None: 1}, "logit_bias has the key None"),
        ({5: 101}, "logit_bias has 101 for token 5; allowed: numbers from -100 to 100"),
        ({5: math.nan}, "logit_bias has nan for token 5"),
        ({5: -math.inf}, "logit_bias has -inf for token 5"),
        ({5: "3"}, "logit_bias has '3' for token 5"),
        ({5: True}, "logit_bias has True for token 5"),
        ({5: 1, "5": 2}, "logit_bias has token 5 twice"),
        (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1), f"logit_bias has {MAX_LOGIT_BIAS + 1} entries"),
    ],
)
def test_a_bad_logit_bias_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias=value)
    assert str(caught.value).startswith(message)


def test_biases_may_be_given_as_json_gives_them() -> None:
    given = {"7": 1, 8: -100, "09": 0.5}
    assert SamplingParams(logit_bias=given).logit_bias == {7: 1.0, 8: -100.0, 9: 0.5}  # type: ignore[arg-type]
    assert given == {"7": 1, 8: -100, "09": 0.5}
    assert SamplingParams(logit_bias={}).logit_bias == {}


def test_a_bias_outside_the_vocabulary_is_refused_before_anything_is_queued() -> None:
    simulation = Simulation(small_config())
    for key in (VOCAB, 999_999, 2**40):
        with pytest.raises(InvalidRequest, match=f"logit_bias has token {key}, which is not in the vocabulary"):
            simulation.runtime.add([1], SamplingParams(logit_bias={key: 1.0}))
    assert not simulation.runtime.has_work


def test_the_most_biases_fit_into_a_plan() -> None:
    """Of every row at once, beside the longest prompts."""
    config = small_config(vocab_size=400, max_num_batched_tokens=64)
    simulation = Simulation(config)
    biases = dict.fromkeys(range(MAX_LOGIT_BIAS - 1), 0.0) | {399: 100.0}
    streams = [simulation.add([1] * 20, greedy(logit_bias=biases, repetition_penalty=1.1)) for _ in range(4)]
    simulation.run()
    assert all(set(stream.tokens) == {399} for stream in streams)
