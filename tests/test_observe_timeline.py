"""The timeline: what it says of steps whose times are known by construction, and of real ones."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stretto import SamplingParams
from stretto.device.checking import CheckingDevice
from stretto.observe.step_times import TimelineTotals
from stretto.observe.timeline import LAUNCH, OTHER, PROCESS, SCHEDULE, WAIT
from stretto.runtime import Runtime
from tests.helpers.llm_fixture import dummy_llm
from tests.helpers.simulation import Simulation, small_config
from tests.helpers.told_timeline import Told


def test_the_phase_is_told_with_its_time_so_far() -> None:
    told = Told()
    seen = []
    for phase in (SCHEDULE, LAUNCH, WAIT, PROCESS, OTHER):
        told.at(3.0 * phase).enter(phase)
        told.clock.time += 0.5
        seen.append(told.timeline.phase())
    assert seen == [(phase, 0.5) for phase in (SCHEDULE, LAUNCH, WAIT, PROCESS, OTHER)]


def overlapped() -> Told:
    """Two steps at depth 1: the second is launched while the first runs, and no bubble is between them."""
    told = Told()
    told.launch(0, receive=1.0, schedule=1.1, begin=1.3, end=1.5)
    told.timeline.end_turn()
    told.launch(1, receive=2.0, schedule=2.1, begin=2.3, end=2.5)
    told.process(wait=2.5, there=11.3, done=11.4, device=(1.3, 11.3))
    told.process(wait=11.5, there=21.3, done=21.4, device=(11.3, 21.3), runnable=False)
    return told


def test_an_overlapped_pair_of_steps_has_no_bubble() -> None:
    totals = overlapped().timeline.totals()
    assert totals.steps == 2
    assert totals.busy_s == pytest.approx(20.0)
    assert totals.bubble_s == 0
    assert totals.runnable_s == pytest.approx(20.3)  # from the turn that took the request in
    assert totals.occupancy == pytest.approx(20.0 / 20.3)


def test_the_overlap_window_ends_at_the_next_launch_or_at_a_wait_with_nothing_queued_behind() -> None:
    steps = overlapped().timeline.recent()
    # Step 0: to the launch of step 1; the wait for step 0 with step 1 queued ends nothing. Step 1: to its own wait.
    assert steps.column("window_s").tolist() == pytest.approx([2.3 - 1.5, 11.5 - 2.5])


def test_the_lead_is_the_time_that_a_launched_step_lay_queued() -> None:
    assert overlapped().timeline.recent().column("lead_s").tolist() == pytest.approx([0.0, 11.3 - 2.5])


def test_a_step_that_is_still_being_launched_may_wait_for_it() -> None:
    """Kernel by kernel, at depth 1: each step begins when the one before ends, and lasts until its last launch."""
    told = Told()
    told.launch(0, receive=1.0, schedule=1.1, begin=1.3, end=3.3)
    told.timeline.end_turn()
    told.launch(1, receive=3.4, schedule=3.4, begin=3.5, end=7.5)
    told.process(wait=7.5, there=7.5, done=7.6, device=(1.3, 4.5))
    told.process(wait=7.6, there=8.5, done=8.6, device=(4.5, 8.5), runnable=False)
    assert told.timeline.recent().column("launching_s").tolist() == pytest.approx([2.0, 3.0])
    totals = told.timeline.totals()
    assert (totals.bubble_share, totals.launching_share) == (0.0, pytest.approx(5.0 / 7.2))
    assert overlapped().timeline.recent().column("launching_s").tolist() == pytest.approx([0.2, 0.0])


def test_sums_of_an_interval_are_those_of_its_steps() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 0.1)
    told.process(0.1, 5.0, 5.5, device=(0.0, 5.0))
    before = told.timeline.totals()
    told.launch(1, 6.0, 6.0, 7.0, 7.1)
    told.process(7.1, 12.0, 12.1, device=(7.0, 12.0))
    interval = told.timeline.totals().since(before)
    assert (interval.steps, interval.busy_s, interval.bubble_s) == (1, pytest.approx(5.0), pytest.approx(2.0))
    assert interval.bubble_share == pytest.approx(2 / 7)
    assert interval.launching_share == pytest.approx(0.1 / 7)


def test_host_time_is_counted_by_phase() -> None:
    totals = overlapped().timeline.totals()
    assert totals.receive_s == pytest.approx(0.2)
    assert totals.schedule_s == pytest.approx(0.4)
    assert totals.launch_s == pytest.approx(0.4)
    assert totals.blocked_s == pytest.approx(8.8 + 9.8)
    assert totals.process_s == pytest.approx(0.2)
    assert totals.host_s == pytest.approx(1.2)


def test_a_late_launch_is_a_bubble_while_something_is_runnable() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 0.1)
    told.process(0.1, 5.0, 5.5, device=(0.0, 5.0))
    told.launch(1, 6.0, 6.0, 7.0, 7.1)
    told.process(7.1, 12.0, 12.1, device=(7.0, 12.0))
    totals = told.timeline.totals()
    assert totals.bubble_s == pytest.approx(2.0)
    assert totals.bubble_share == pytest.approx(2 / 12)
    assert told.timeline.recent().bubble_share == pytest.approx(2 / 12)


def test_a_pause_without_requests_is_neither_bubble_nor_wall_time() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 0.1)
    told.process(0.1, 5.0, 5.1, device=(0.0, 5.0), runnable=False)
    told.launch(1, 100.0, 100.1, 100.2, 100.3)
    told.process(100.3, 105.2, 105.3, device=(100.2, 105.2), runnable=False)
    totals = told.timeline.totals()
    assert totals.bubble_s == 0
    assert totals.runnable_s == pytest.approx(5.0 + 5.2)
    assert totals.receive_s + totals.schedule_s == pytest.approx(0.2)


def test_a_step_that_ends_before_its_launch_does_has_no_window() -> None:
    """As after a hidden sync in the launch."""
    told = Told()
    told.launch(0, 0.0, 0.0, 0.0, 6.0)
    told.process(6.1, 6.1, 6.2, device=(0.0, 5.0))
    assert told.timeline.recent().column("window_s").tolist() == [0.0]
    assert told.timeline.recent().column("launching_s").tolist() == [5.0]
    assert told.timeline.totals().overlap_window_s == 0.0


def test_device_times_lie_between_launch_and_results_on_a_clock_of_their_own() -> None:
    told = Told()
    told.launch(0, 0.0, 0.0, 1.0, 1.1)
    told.process(1.2, 4.0, 4.1, device=(777.0, 779.5))
    told.launch(1, 4.2, 4.2, 4.3, 4.4)
    told.process(4.5, 7.0, 7.1, device=(780.0, 782.0))
    steps = told.timeline.recent()
    assert steps.column("device_begin").tolist() == pytest.approx([1.0, 4.3])
    assert steps.column("device_end").tolist() == pytest.approx([3.5, 6.3])
    assert steps.column("bubble_s").tolist() == pytest.approx([0.0, 0.5])


def test_the_ring_keeps_the_last_steps() -> None:
    told = Told(size=8)
    for index in range(20):
        told.launch(index, index, index, index, index + 0.1)
        told.process(index + 0.1, index + 0.9, index + 0.95, device=(index, index + 0.9))
    assert told.timeline.recent().column("index").tolist() == list(range(12, 20))
    assert told.timeline.recent(3).column("index").tolist() == [17, 18, 19]
    assert len(told.timeline.recent(0)) == 0
    assert told.timeline.totals().steps == 20


def test_before_the_first_step_there_is_nothing_and_no_division_by_zero() -> None:
    timeline = Told().timeline
    assert timeline.totals() == TimelineTotals(0, 0.0, 0.0)
    assert (timeline.totals().bubble_share, timeline.totals().occupancy, timeline.totals().overlap_window_s) == (
        0,
        0,
        0,
    )
    assert len(timeline.recent()) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_recorded_times_of_a_virtual_run_are_in_order(depth: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth), CheckingDevice(5), partial(Runtime))
    for number in range(5):
        simulation.add([1 + number, 2, 3], SamplingParams(temperature=0, max_tokens=8))
    simulation.run()
    steps = simulation.runtime.timeline.recent()
    assert steps.column("index").tolist() == list(range(len(steps)))
    order = ["receive_begin", "schedule_begin", "launch_begin", "launch_end", "block_begin", "block_end", "process_end"]
    for earlier, later in pairwise(order):
        assert (steps.column(earlier) <= steps.column(later)).all()
    assert (np.diff(steps.column("device_end")) > 0).all()
    assert (steps.column("launch_begin") <= steps.column("device_begin") + 1e-9).all()
    assert (steps.column("device_end") <= steps.column("block_end") + 1e-9).all()


def test_an_llm_tells_its_figures(tmp_path: Any) -> None:
    with dummy_llm(tmp_path, overlap_depth=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
        stats = llm.stats()
        assert stats.hidden_syncs is None  # nobody watches
        assert 0 < stats.occupancy <= 1
        assert stats.runnable_s >= stats.busy_s * (1 - 1e-9)
        assert stats.overlap_window_s > 0
        assert min(stats.receive_s, stats.schedule_s, stats.launch_s, stats.blocked_s, stats.process_s) > 0
        steps = llm.recent_steps(5)
        assert len(steps) == 5
        assert (steps.column("device_end") > steps.column("device_begin")).all()
