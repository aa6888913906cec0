"""Bounds of the scheduler are used to the last token and the last page, and are given back by whoever ends early."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.device.checking import CheckingDevice
from stretto.errors import Overloaded
from stretto.request import FinishReason, RequestState, SamplingParams
from stretto.simulate.schedule import ScriptedRun
from stretto.simulate.script import parse_script
from tests.helpers.simulation import Simulation, small_config

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_who_is_admitted_leaves_a_page_to_each_running_request() -> None:
    """Else the request is preempted as soon as an older one needs its next page."""
    run = ScriptedRun(
        parse_script(
            """
            config page_size=4 num_pages=7 max_model_len=24 max_num_batched_tokens=8 enable_prefix_caching=0
            at 0 arrive A prompt=4 max_tokens=8
            at 1 arrive B prompt=16 max_tokens=4
            """
        )
    )
    told = [line for turn in run.run() for line in turn.processed]
    assert run.scheduler.lifecycle.num_preemptions == 0
    assert sum("ends (length)" in line for line in told) == 2


@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_a_step_is_filled_to_its_last_token(policy: str) -> None:
    turns = ScriptedRun(
        parse_script(
            f"""
            config max_num_batched_tokens=8 batch_policy={policy} enable_prefix_caching=0
            at 0 arrive A prompt=3 max_tokens=9
            at 0 arrive B prompt=5 max_tokens=9
            at 1 arrive C prompt=20 max_tokens=2
            """
        )
    ).run()
    assert turns[0].rows == ("A:prefill 0+3", "B:prefill 0+5")
    if policy == "mixed":
        assert turns[1].rows == ("A:decode 3", "B:decode 5", "C:prefill 0+6")
        assert turns[2].rows == ("A:decode 4", "B:decode 6", "C:prefill 6+6")
    else:
        assert [turn.rows for turn in turns[1:4]] == [("C:prefill 0+8",), ("C:prefill 8+8",), ("C:prefill 16+4",)]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT])
@pytest.mark.parametrize("limit", ["max_queued_tokens", "max_queued_requests"])
def test_who_ends_in_the_queue_makes_room_in_it(limit: str, reason: FinishReason) -> None:
    simulation = Simulation(small_config(max_num_seqs=1, **{limit: 10 if limit == "max_queued_tokens" else 2}))
    streams = [simulation.add([1, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
    simulation.turn()
    for _ in range(3):
        waiting = [simulation.add([3] * 5, SHORT) for _ in range(2)]
        with pytest.raises(Overloaded, match=limit):
            simulation.add([3] * 5, SHORT)
        simulation.turn()
        for stream in waiting:
            simulation.runtime.scheduler.end(stream.request, reason)
        simulation.turn()
        streams += waiting
    streams.append(simulation.add([3] * 10, SHORT))
    simulation.run()
    assert [stream.terminal for stream in streams] == [[FinishReason.LENGTH], *[[reason]] * 6, [FinishReason.LENGTH]]


def run_with_timeout(depth: int, timeout_s: float | None) -> tuple[RequestState, FinishReason | None, float]:
    """A request behind another one: its state in the turn before it ended, why it ended, and when (virtual s)."""
    config = small_config(overlap_depth=depth, max_num_seqs=1, max_num_batched_tokens=4)
    simulation = Simulation(config, CheckingDevice(3))
    simulation.add([1, 2, 3], SHORT)
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    hasty = simulation.runtime.add([5] * 16, wanted, timeout_s=timeout_s)
    state = hasty.state
    while hasty.finish_reason is None:
        state = hasty.state
        simulation.runtime.step()
    ended_at = simulation.device.now()
    while simulation.runtime.has_work:
        simulation.runtime.step()
    return state, hasty.finish_reason, ended_at


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_timeout_ends_a_request_in_every_state(depth: int) -> None:
    _, reason, whole_s = run_with_timeout(depth, None)
    assert reason is FinishReason.LENGTH
    runs = [run_with_timeout(depth, share * whole_s) for share in np.linspace(0.02, 0.9, 30)]
    assert {reason for _, reason, _ in runs} == {FinishReason.TIMEOUT}
    assert {state for state, _, _ in runs} >= {RequestState.WAITING, RequestState.PREFILL, RequestState.DECODE}
