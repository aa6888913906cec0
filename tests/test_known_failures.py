"""How engines of this kind fail in public, family by family: none of it may happen here.

Each test is the smallest trigger of a reported failure, run at every depth on the checking device. Families with a
test file of their own are not repeated: lengths (test_engine.py), the prefix cache (test_scheduler_cache.py),
admission (test_scheduler_limits.py), races on staging and results (test_hazards.py), interleavings
(test_life_cycle_model.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from stretto.device.checking import CheckingDevice
from stretto.errors import InvalidRequest
from stretto.request import FinishReason, RequestState, SamplingParams
from tests.helpers.simulation import Simulation, Stream, small_config

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])
SLOW_DEVICE = {"device_delay": (1e-3, 2e-3), "host_delay": (0.0, 1e-6)}


def endless(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def simulation_at(depth: int, seed: int = 0, **options: object) -> Simulation:
    return Simulation(small_config(overlap_depth=depth, **options), CheckingDevice(seed, **SLOW_DEVICE))  # type: ignore[arg-type]


def stop_at(simulation: Simulation, prompt: list[int], position: int) -> SamplingParams:
    """Parameters with which the request ends by a stop token at output token `position` or before."""
    probe = simulation.add(prompt, endless(position + 1))
    simulation.run()
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[probe.tokens[position]])


@DEPTHS
def test_a_slot_is_not_reused_while_a_step_still_writes_its_row(depth: int) -> None:
    """A stops; the next request takes its row with a longer prompt, while A's last step is still to write a token."""
    simulation = simulation_at(depth, max_num_seqs=1, max_num_batched_tokens=24, enable_prefix_caching=False)
    params = stop_at(simulation, [3, 4], 2)
    first = simulation.add([3, 4], params)
    second = simulation.add([7, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], endless(4))
    simulation.run()
    simulation.assert_as_expected(first)
    simulation.assert_as_expected(second)


@DEPTHS
@pytest.mark.parametrize("turns", range(5))
def test_an_abort_meets_the_end_that_is_not_processed_yet(depth: int, turns: int) -> None:
    """One end, one release, whichever comes first."""
    simulation = simulation_at(depth)
    params = stop_at(simulation, [3, 4], 2)
    stream = simulation.add([3, 4], params)
    for _ in range(turns):
        if simulation.runtime.has_work:
            simulation.turn()
    simulation.runtime.end(stream.request)
    simulation.runtime.end(stream.request)
    simulation.run()
    simulation.assert_as_expected(stream, aborted=True)


@DEPTHS
def test_an_abort_between_launch_and_processing_of_the_last_chunk(depth: int) -> None:
    simulation = simulation_at(depth, max_num_batched_tokens=4)
    stream = simulation.add(list(range(1, 11)), endless(5))
    for _ in range(3):
        simulation.turn()
    simulation.runtime.end(stream.request)
    other = simulation.add(list(range(1, 11)), endless(5))
    simulation.run()
    assert stream.terminal == [FinishReason.ABORT]
    simulation.assert_as_expected(other)


@DEPTHS
def test_an_abort_in_the_queue_leaves_nothing_behind(depth: int) -> None:
    simulation = simulation_at(depth, max_num_seqs=1)
    streams = [simulation.add([5, 6, i], endless(6)) for i in range(1, 6)]
    simulation.turn()
    for stream in streams[1:4]:
        simulation.runtime.end(stream.request)
    simulation.run()
    assert [stream.terminal for stream in streams[1:4]] == [[FinishReason.ABORT]] * 3
    simulation.assert_as_expected(streams[4])


@DEPTHS
def test_three_hundred_aborted_requests_leave_the_baseline(depth: int) -> None:
    """Known: a slot or page leaks with each abort, and the engine stalls after a few hundred."""
    simulation = simulation_at(depth)
    random = np.random.default_rng(depth)
    for i in range(300):
        stream = simulation.add([1 + i % 10, 2, 3, 4, 5, 6], endless(9))
        for _ in range(int(random.integers(0, 4))):
            if simulation.runtime.has_work:
                simulation.turn()
        simulation.runtime.end(stream.request)
    simulation.run()
    last = simulation.add([1, 2, 3], endless(9))
    simulation.run()
    simulation.assert_as_expected(last)


@DEPTHS
def test_terminal_states_are_sticky(depth: int) -> None:
    simulation = simulation_at(depth)
    stream = simulation.add([1, 2], endless(3))
    simulation.run()
    for reason in FinishReason:
        simulation.runtime.end(stream.request, reason)
    simulation.run()
    assert stream.request.state is RequestState.FINISHED
    assert stream.terminal == [FinishReason.LENGTH]


@DEPTHS
def test_a_stop_at_max_tokens_is_a_stop(depth: int) -> None:
    """Known: the length test runs first, and the reason is "length" although the sequence ended."""
    simulation = simulation_at(depth)
    probe = simulation.add([3, 4], endless(5))
    simulation.run()
    position = max(i for i, token in enumerate(probe.tokens) if token not in probe.tokens[:i])
    params = SamplingParams(
        temperature=0, max_tokens=position + 1, ignore_eos=True, stop_token_ids=[probe.tokens[position]]
    )
    stream = simulation.add([3, 4], params)
    simulation.run()
    assert stream.terminal == [FinishReason.STOP]
    assert stream.tokens == probe.tokens[: position + 1]


@DEPTHS
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_more_chunked_prompts_than_any_ring_has_places(depth: int, policy: str) -> None:
    """Known: a token ring wraps, and a request goes on with another's token."""
    simulation = simulation_at(depth, max_num_batched_tokens=4, batch_policy=policy)
    streams = [simulation.add([(i * 3 + j) % 10 + 1 for j in range(15)], endless(7)) for i in range(10)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


@DEPTHS
def test_preemption_in_flight_neither_loses_nor_repeats_a_token(depth: int) -> None:
    simulation = simulation_at(depth, num_pages=7, max_num_seqs=6)
    streams = [simulation.add([2, 7, 1, i], endless(14)) for i in range(1, 7)]
    simulation.run()
    assert simulation.runtime.stats().preemptions > 0
    for stream in streams:
        simulation.assert_as_expected(stream)


@DEPTHS
def test_a_nearly_full_pool_never_stands_still(depth: int) -> None:
    """Known: nothing is free yet, so everything is preempted, for ever."""
    simulation = simulation_at(depth, num_pages=7, max_num_seqs=4)
    for i in range(40):
        simulation.add([1 + i % 10] * (1 + i % 9), endless(1 + i % 13))
    simulation.run(max_turns=3_000)


@DEPTHS
def test_the_reserved_slot_and_page_stay_as_they_were(depth: int) -> None:
    """Known: padding writes to a live slot or page. Nothing is ever given slot 0 or page 0."""
    simulation = simulation_at(depth, num_pages=9)
    tables, cache = simulation.runtime.engine.tables, simulation.attention.cache
    page_size = simulation.config.page_size
    before = tables.token_ids_RL[0].clone(), cache[:page_size].clone()
    streams: list[Stream] = [simulation.add([1, 2, 3, i], endless(9)) for i in range(1, 9)]
    while simulation.runtime.has_work:
        simulation.turn()
        for stream in streams:
            assert 0 not in stream.request.pages
    assert (tables.token_ids_RL[0] == before[0]).all()
    assert (cache[:page_size] == before[1]).all()


@DEPTHS
def test_schedules_are_the_same_every_time(depth: int) -> None:
    """Known: a batch built from a set has another order on every rank."""

    def schedule() -> list[list[int]]:
        simulation = simulation_at(depth, num_pages=9)
        plans: list[list[int]] = []
        launch = simulation.runtime.engine.launch
        simulation.runtime.engine.launch = lambda plan: plans.append(plan.slots_B.tolist()) or launch(plan)  # type: ignore[method-assign, func-returns-value]
        for i in range(9):
            simulation.add([1 + i % 10] * (1 + i % 6), endless(1 + i % 7))
        simulation.run()
        return plans

    assert schedule() == schedule()


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True])
def test_max_tokens_must_be_a_positive_whole_number(max_tokens: object) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is"):
        SamplingParams(max_tokens=max_tokens)  # type: ignore[arg-type]


@DEPTHS
def test_max_tokens_beyond_the_context_is_cut_to_it(depth: int) -> None:
    simulation = simulation_at(depth, max_model_len=10, num_pages=9)
    stream = simulation.add([1, 2, 3], endless(1_000_000))
    simulation.run()
    assert len(stream.tokens) == 7
    assert stream.terminal == [FinishReason.LENGTH]


@DEPTHS
def test_logits_that_are_no_numbers_fail_their_row_alone(depth: int) -> None:
    simulation = simulation_at(depth)
    model = simulation.runtime.engine.model
    logits = model.logits

    def broken(hidden: object) -> object:
        values = logits(hidden)  # type: ignore[arg-type]
        return values.masked_fill((values.argmax(1) == 4)[:, None], float("nan"))

    model.logits = broken  # type: ignore[method-assign, assignment]
    streams = [simulation.add([3, i], endless(9)) for i in range(1, 9)]
    simulation.run()
    reasons = [stream.terminal[0] for stream in streams]
    assert FinishReason.ERROR in reasons
    for stream in streams:
        assert all(0 <= token < 11 for token in stream.tokens)
        assert 4 not in stream.tokens
        assert stream.request.token_ids.tolist() == [*stream.prompt, *stream.tokens]
    if FinishReason.LENGTH in reasons:
        simulation.assert_as_expected(streams[reasons.index(FinishReason.LENGTH)])


@DEPTHS
def test_a_failed_request_leaves_nothing_in_the_prefix_cache(depth: int) -> None:
    """Its KV may be no numbers either, and whoever shares it would fail with it."""
    simulation = simulation_at(depth)
    model = simulation.runtime.engine.model
    logits = model.logits
    model.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
    failed = simulation.add([1, 2, 3, 4, 5, 6, 7, 8, 9], endless(3))
    simulation.run()
    assert failed.terminal == [FinishReason.ERROR]
    assert simulation.runtime.stats().num_cached_pages == 0
    model.logits = logits  # type: ignore[method-assign]
    again = simulation.add([1, 2, 3, 4, 5, 6, 7, 8, 9], endless(3))
    simulation.run()
    simulation.assert_as_expected(again)
    assert again.request.num_cached == 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.STOP])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_neither_does_one_that_ends_before_its_failure_is_seen(depth: int, reason: FinishReason) -> None:
    device = CheckingDevice(depth, device_delay=(1e-3, 2e-3), host_delay=(0, 1e-6))
    simulation = Simulation(small_config(overlap_depth=depth), device)
    model = simulation.runtime.engine.model
    logits = model.logits
    model.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    ended = simulation.add(prompt, endless(5))
    simulation.turn()
    simulation.runtime.scheduler.end(ended.request, reason)
    simulation.run()
    assert ended.terminal == [reason]
    assert simulation.runtime.stats().num_cached_pages == 0
    model.logits = logits  # type: ignore[method-assign]
    again = simulation.add(prompt, endless(3))
    simulation.run()
    simulation.assert_as_expected(again)
