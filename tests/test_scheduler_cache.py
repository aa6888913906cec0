"""The prefix cache in the whole engine: what is shared, when, and that it changes no token."""

from __future__ import annotations

import pytest

from stretto.cache.base import CacheKey
from stretto.device.checking import CheckingDevice
from stretto.request import SamplingParams
from tests.helpers.simulation import Simulation, small_config

LONG = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_equal_prompts_that_arrive_together_share_their_prefill(depth: int) -> None:
    simulation = Simulation(small_config(overlap_depth=depth, max_num_batched_tokens=64), CheckingDevice(depth))
    streams = [simulation.add(STEM, LONG) for _ in range(4)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)
    assert [stream.request.num_cached for stream in streams] == [0, 8, 8, 8]
    assert simulation.runtime.stats().prompt_tokens == 12 + 3 * 4


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("num_pages", "more"), [(0, 1), (1, 0), (1, 1), (2, 0), (3, 0)])
def test_a_fully_cached_prompt_leaves_one_token_to_compute(page_size: int, num_pages: int, more: int) -> None:
    length = num_pages * page_size + more
    config = small_config(
        page_size=page_size, num_pages=1 + 8 + 512 // page_size, max_model_len=256, max_num_batched_tokens=64
    )
    simulation = Simulation(config)
    for _ in range(3):
        stream = simulation.add((STEM * 17)[:length], LONG)
        simulation.run()
        simulation.assert_as_expected(stream)
    assert stream.request.num_cached == (length - 1) // page_size * page_size


def test_finished_sequences_are_reused_without_their_last_token() -> None:
    simulation = Simulation(small_config(page_size=1, num_pages=97))
    first = simulation.add(STEM, LONG)
    simulation.run()
    again = simulation.add([*STEM, *first.tokens, 7], LONG)
    simulation.run()
    simulation.assert_as_expected(again)
    assert again.request.num_cached == len(STEM) + len(first.tokens) - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_past_the_end_never_gets_into_the_cache(depth: int) -> None:
    """Known: a zombie step's KV in the tree makes the cached length one too long."""
    simulation = Simulation(small_config(page_size=1, num_pages=97, overlap_depth=depth))
    probe = simulation.add(STEM, LONG)
    simulation.run()
    stop = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[probe.tokens[2]], ignore_eos=True)
    stopped = simulation.add([*STEM[::-1]], stop)
    simulation.run()
    again = simulation.add([*stopped.prompt, *stopped.tokens, 7], LONG)
    simulation.run()
    simulation.assert_as_expected(again)
    assert again.request.num_cached <= len(stopped.prompt) + len(stopped.tokens) - 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_abort_in_the_middle_of_a_prompt_leaves_a_sound_prefix(depth: int) -> None:
    """Known: an aborted prompt's chunks in the tree, their pages freed all the same."""
    for turns in range(6):
        simulation = Simulation(small_config(overlap_depth=depth, max_num_batched_tokens=4), CheckingDevice(turns))
        aborted = simulation.add(STEM, LONG)
        for _ in range(turns):
            simulation.turn()
        simulation.runtime.end(aborted.request)
        other = simulation.add(STEM[::-1], LONG)
        again = simulation.add(STEM, LONG)
        simulation.run()
        simulation.assert_as_expected(other)
        simulation.assert_as_expected(again)


def test_entries_with_different_keys_never_share() -> None:
    simulation = Simulation(small_config(max_num_batched_tokens=64))
    keys = [CacheKey(), CacheKey(salt="x"), CacheKey(adapter="x"), CacheKey(salt="x")]
    requests = [simulation.runtime.add(STEM, LONG, cache_key=key) for key in keys]
    while simulation.runtime.has_work:
        simulation.runtime.step()
    assert [request.num_cached for request in requests] == [0, 0, 0, 8]


def test_without_the_cache_nothing_is_shared() -> None:
    simulation = Simulation(small_config(enable_prefix_caching=False))
    streams = [simulation.add(STEM, LONG) for _ in range(3)]
    simulation.run()
    assert [stream.request.num_cached for stream in streams] == [0, 0, 0]
    assert simulation.runtime.stats().num_cached_pages == 0


def test_a_full_cache_makes_room_for_new_requests() -> None:
    simulation = Simulation(small_config(num_pages=7))
    for start in range(8):
        stream = simulation.add([1 + (start + i) % 10 for i in range(10)], LONG)
        simulation.run()
        simulation.assert_as_expected(stream)
    assert simulation.runtime.stats().preemptions == 0


def test_a_preempted_request_resumes_from_what_is_still_cached() -> None:
    simulation = Simulation(small_config(num_pages=9, max_num_seqs=6), CheckingDevice(1))
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    streams = [simulation.add([2, 7, 1, i], params) for i in range(1, 7)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)
        assert stream.request.num_cached == 0
    assert simulation.runtime.stats().preemptions > 0
