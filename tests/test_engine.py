"""The whole engine on the checking device: streams of tokens are the serial loop's, whatever overlaps."""

from __future__ import annotations

import pytest

from stretto.request import FinishReason, SamplingParams
from tests.helpers.simulation import Simulation, small_config

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_streams_equal_the_serial_loop(depth: int, policy: str) -> None:
    simulation = Simulation(small_config(overlap_depth=depth, batch_policy=policy), seed=depth)
    streams = [
        simulation.add([1 + i % 9 for i in range(start, start + length)], GREEDY)
        for start, length in ((0, 3), (4, 11), (2, 1), (7, 17), (1, 5), (3, 9))
    ]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_length_limit_never_costs_a_step_too_many(depth: int, max_tokens: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    streams = [simulation.add([3, 1, 4], params), simulation.add([1, 5], params)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)
        assert stream.terminal == [FinishReason.LENGTH]
    assert simulation.runtime.stats().steps == max_tokens


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_context_length_ends_a_request(depth: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth, max_model_len=10, num_pages=4))
    stream = simulation.add([3, 1, 4], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    simulation.run()
    simulation.assert_as_expected(stream)
    assert len(stream.tokens) == 7
    assert simulation.runtime.stats().steps == 7


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("pages", [7, 9, 12])
def test_memory_pressure_changes_no_token(depth: int, pages: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth, num_pages=pages, max_num_seqs=6), seed=pages)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    streams = [simulation.add([2, 7, 1, i], params) for i in range(1, 7)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)
    assert simulation.runtime.stats().preemptions > 0
