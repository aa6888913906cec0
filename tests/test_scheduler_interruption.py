"""Exceptions from outside, at any moment: harmless while the host waits, and never silent anywhere else."""

from __future__ import annotations

import os

import numpy as np
import pytest

from stretto.device.cpu import CpuDevice
from stretto.errors import EngineBroken, InvalidRequest
from stretto.request import SamplingParams
from tests.helpers.simulation import Simulation, small_config

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Interruption(Exception):
    """What a signal handler might raise."""


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_exception_while_waiting_loses_nothing(depth: int) -> None:
    """Known: the step was taken from the queue first, and its pages never came back."""
    simulation = Simulation(small_config(overlap_depth=depth))
    streams = [simulation.add([1, 2, i], PARAMS) for i in range(1, 4)]
    simulation.turn()
    if not simulation.runtime.loop.in_flight:
        simulation.runtime.loop._schedule_and_launch()
    waits = type(simulation.runtime.loop.in_flight[0])
    original = waits.wait

    def interrupted(step: object) -> None:
        raise Interruption

    waits.wait = interrupted  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(Interruption):
            _turn_until_it_waits(simulation)
    finally:
        waits.wait = original  # type: ignore[method-assign]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


def _turn_until_it_waits(simulation: Simulation) -> None:
    for _ in range(50):
        simulation.turn()


def test_after_an_exception_in_a_change_every_turn_says_so() -> None:
    simulation = Simulation(small_config())
    simulation.add([1, 2, 3], PARAMS)
    release = simulation.runtime.scheduler.lifecycle.release_processed

    def interrupted() -> None:
        release()
        raise Interruption

    simulation.turn()
    simulation.runtime.scheduler.lifecycle.release_processed = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interruption):
        simulation.run()
    for _ in range(2):
        with pytest.raises(EngineBroken, match="broke off a step in the middle of a change"):
            simulation.turn()


def test_a_queue_that_can_never_move_is_reported_rather_than_spun_on() -> None:
    simulation = Simulation(small_config())
    pool = simulation.runtime.scheduler.pages.pool
    pool.take(pool.num_free)
    simulation.add([1, 2, 3], PARAMS)
    with pytest.raises(EngineBroken, match="nothing can ever run"):
        simulation.runtime.step()


def test_a_forked_child_is_told_that_the_engine_is_not_its_own() -> None:
    device = CpuDevice(1)
    try:
        simulation = Simulation(small_config(), device)
        simulation.add([1, 2, 3], PARAMS)
        child = os.fork()
        if child == 0:
            try:
                simulation.runtime.step()
            except EngineBroken as error:
                os._exit(0 if "belongs to the process that made it" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        simulation.run()
    finally:
        device.close()


def test_numbers_and_lists_of_numpy_are_numbers_and_lists() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(7),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        stop=(text for text in ("a", "b")),  # type: ignore[arg-type]
    )
    assert (params.n, params.temperature, params.seed) == (2, 0.5, 7)
    assert params.stop_token_ids == [1, 2]
    assert params.stop_strings == ["a", "b"]


@pytest.mark.parametrize(
    "wrong", [{"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": "12"}, {"temperature": 1e300}, {"stop": [""]}]
)
def test_parameters_of_the_wrong_kind_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)  # type: ignore[arg-type]
