"""Who may come in, who comes first, and how long anybody may take."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.device.checking import CheckingDevice
from stretto.errors import InvalidRequest, Overloaded
from stretto.request import PRIORITY_STEP, FinishReason, SamplingParams
from stretto.scheduler.turns import LocalTurns
from tests.helpers.simulation import Simulation, small_config

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_a_full_queue_refuses_with_numbers_and_harms_nobody() -> None:
    simulation = Simulation(small_config(max_num_seqs=1, max_queued_requests=2))
    streams = [simulation.add([1, 2], SHORT) for _ in range(3)]
    with pytest.raises(Overloaded, match="2 requests wait already; max_queued_requests is 2"):
        simulation.runtime.add([1], SHORT)
    while simulation.runtime.scheduler.num_waiting != 1:
        simulation.turn()
    streams.append(simulation.add([3], SHORT))
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


def test_queued_tokens_are_limited() -> None:
    simulation = Simulation(small_config(max_num_seqs=1, max_queued_tokens=10))
    simulation.add([1] * 6, SHORT)
    with pytest.raises(
        Overloaded, match="6 prompt tokens wait already and the request brings 5; max_queued_tokens is 10"
    ):
        simulation.runtime.add([1] * 5, SHORT)
    simulation.add([1] * 4, SHORT)
    simulation.run()


def test_who_finds_a_free_slot_does_not_queue() -> None:
    simulation = Simulation(small_config(max_num_seqs=4, max_queued_requests=1, max_queued_tokens=3))
    streams = [simulation.add([1, 2, i], SHORT) for i in range(3)]
    simulation.turn()
    streams.append(simulation.add([5, 6, 7, 8], SHORT))
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


def test_requests_that_have_ended_are_not_kept_until_their_deadline() -> None:
    simulation = Simulation(small_config())
    turns = simulation.runtime.loop.turns
    assert isinstance(turns, LocalTurns)
    for _ in range(100):
        for _ in range(4):
            simulation.runtime.add([1, 2], SHORT, timeout_s=3600.0)
        while simulation.runtime.has_work:
            simulation.runtime.step()
    assert turns.num_watched <= 100


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_timeout_ends_a_request_wherever_it_is(depth: int) -> None:
    for limit in np.linspace(1e-4, 2e-2, 12):
        simulation = Simulation(small_config(overlap_depth=depth, max_num_seqs=2), CheckingDevice(3))
        patient = [simulation.add([1, 2, i], SHORT) for i in range(1, 4)]
        hasty = simulation.runtime.add([5, 6], SHORT, timeout_s=float(limit))
        reasons: list[FinishReason | None] = []
        while simulation.runtime.has_work:
            for output in simulation.runtime.step():
                reasons += [request.finish_reason for request in output.finished if request is hasty]
                for uid, token in zip(output.uids.tolist(), output.tokens.tolist(), strict=True):
                    if uid in simulation.streams:
                        simulation.streams[uid].tokens.append(token)
        assert reasons in ([FinishReason.TIMEOUT], [FinishReason.LENGTH])
        assert reasons == [FinishReason.TIMEOUT] or limit > 1e-3
        for stream in patient:
            assert len(stream.tokens) == 4


@pytest.mark.parametrize("count", [2**31, 2**40, 10**30])
@pytest.mark.parametrize("name", ["min_tokens", "max_tokens", "top_k"])
def test_a_count_beyond_every_context_is_as_good_as_the_largest(name: str, count: int) -> None:
    """Known: a large `min_tokens` ended the engine, and with it everybody's requests."""
    limits: dict[str, int | None] = {"max_tokens": None, name: count}
    simulation = Simulation(small_config())
    stream = simulation.add([1, 2], SamplingParams(**limits), seed=5)  # type: ignore[arg-type]
    simulation.run()
    assert len(stream.tokens) == simulation.config.max_model_len - 2 or name != "min_tokens"


def test_what_can_never_fit_is_refused_at_entry() -> None:
    simulation = Simulation(small_config(max_model_len=24))
    with pytest.raises(InvalidRequest, match="24 tokens; at most 23 fit into the context length of 24"):
        simulation.runtime.add([1] * 24, SHORT)
    with pytest.raises(InvalidRequest, match=r"holds 20 tokens .5 pages of 4., fewer than max_model_len .24."):
        small_config(num_pages=6)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 11], "token id 11 is not in the vocabulary: allowed are 0 to 10"),
        ([-1], "token id -1 is not in the vocabulary"),
        ([[1]], "flat list of whole numbers"),
        ([1.5], "flat list of whole numbers"),
        ([True, 2], "flat list of whole numbers"),
        ([2**80], "flat list of whole numbers"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Simulation(small_config()).runtime.add(prompt, SHORT)


def _order_of_first_tokens(simulation: Simulation) -> list[int]:
    seen: list[int] = []
    while simulation.runtime.has_work:
        for output in simulation.turn():
            seen += [uid for uid in output.uids.tolist() if uid not in seen]
    return seen


def test_first_come_first_served() -> None:
    simulation = Simulation(small_config(max_num_seqs=1))
    for i in range(5):
        simulation.add([1 + i], SHORT)
    assert _order_of_first_tokens(simulation) == [0, 1, 2, 3, 4]


def test_a_smaller_priority_goes_before() -> None:
    simulation = Simulation(small_config(max_num_seqs=1))
    for i, priority in enumerate([0, 1, -1, 0]):
        simulation.add([1 + i], SHORT, priority=priority)
    assert _order_of_first_tokens(simulation) == [2, 0, 3, 1]


def test_priority_lets_only_so_many_later_arrivals_pass() -> None:
    simulation = Simulation(small_config(max_num_seqs=1))
    late = simulation.add([1], SHORT, priority=1).request
    simulation.runtime._num_arrived = PRIORITY_STEP + 1
    assert simulation.add([2], SHORT).request.order > late.order


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_finishing_requests_never_leave_the_batch_half_empty(depth: int, policy: str) -> None:
    """Known: requests whose last step is launched count against admission, so batches run half empty."""
    config = small_config(overlap_depth=depth, max_num_seqs=2, batch_policy=policy, max_num_batched_tokens=4)
    simulation = Simulation(config, CheckingDevice(depth, device_delay=(1e-3, 1e-3), host_delay=(0.0, 1e-6)))
    for i in range(12):
        simulation.add([1 + i % 9], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    simulation.run()
    assert simulation.runtime.stats().steps == 6
