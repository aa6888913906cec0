"""Property tests: whatever arrives, aborts and ends, at any depth, chunk size and timing: the serial loop's streams."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from stretto.device.checking import CheckingDevice
from stretto.request import SamplingParams
from tests.helpers.simulation import VOCAB, Simulation, Stream, small_config

EXAMPLES = int(os.environ.get("STRETTO_EXAMPLES", "2000"))
"""Runs of the state machine; a long soak sets more (`make soak`)."""

DELAYS = [((0.0, 1e-3), (0.0, 1e-3)), ((0.0, 5e-3), (0.0, 1e-4)), ((0.0, 1e-4), (0.0, 5e-3)), ((0.0, 0.0), (0.0, 0.0))]
"""(device, host): as fast as each other, slow device, slow host, no time at all."""

STEMS = [[], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]]
"""Beginnings that prompts share."""

PAGE_SIZES = (1, 2, 4, 16, 64)
LARGE = 16
"""Pages of so many tokens are longer than these."""

prompts = st.builds(
    lambda stem, own: stem + own, st.sampled_from(STEMS), st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=6)
)


def behind_whole_pages(prompt: list[int], page_size: int) -> list[int]:
    """The prompt behind two pages, if its beginning is shared: pages are shared whole, large ones too.

    The first is that of all such prompts, the second of those alone whose beginnings part late.
    """
    if page_size < LARGE or prompt[:4] != STEMS[1][:4]:
        return prompt
    first = [1 + i % (VOCAB - 1) for i in range(page_size)]
    second = [9 if prompt[4:6] == [9, 9] else 5, *first[1:]]
    return [*first, *second, *prompt]


adjustments = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-2.0, -0.5, 0.3, 2.0]),
            "frequency_penalty": st.sampled_from([-2.0, 0.1, 0.7, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.1, 1.7, 5.0]),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-4, 4, width=32), max_size=6),
        },
    ),
)
"""Penalties and biases: half of the requests have none."""

params = st.builds(
    lambda adjustment, **others: SamplingParams(temperature=0.0, **adjustment, **others),
    adjustments,
    max_tokens=st.one_of(st.none(), st.integers(1, 12)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.one_of(st.none(), st.lists(st.integers(1, VOCAB - 1), max_size=2)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, are aborted, and the loop turns, in any order."""

    @initialize(
        depth=st.integers(0, 3),
        chunk=st.integers(4, 24),
        page_size=st.sampled_from(PAGE_SIZES),
        spare_pages=st.integers(0, 20),
        caching=st.booleans(),
        policy=st.sampled_from(["mixed", "prefill-first"]),
        delays=st.sampled_from(DELAYS),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        depth: int,
        chunk: int,
        page_size: int,
        spare_pages: int,
        caching: bool,
        policy: str,
        delays: tuple[tuple[float, float], tuple[float, float]],
        seed: int,
    ) -> None:
        self.page_size = page_size
        longest = 24 + (2 * page_size if page_size >= LARGE else 0)
        config = small_config(
            overlap_depth=depth,
            max_num_batched_tokens=chunk + (longest - 24) // 4,
            max_model_len=longest,
            page_size=page_size,
            num_pages=1 + -(-longest // page_size) + spare_pages,
            enable_prefix_caching=caching,
            batch_policy=policy,
        )
        device = CheckingDevice(seed, device_delay=delays[0], host_delay=delays[1])
        self.simulation = Simulation(config, device)
        self.aborted: set[int] = set()

    @rule(prompt=prompts, params=params, priority=st.integers(-1, 1))
    def arrive(self, prompt: list[int], params: SamplingParams, priority: int) -> None:
        if self.page_size >= LARGE and params.max_tokens is None:
            params = replace(params, max_tokens=12)  # such contexts are long
        self.simulation.add(behind_whole_pages(prompt, self.page_size), params, priority=priority)

    @precondition(lambda self: self.simulation.streams)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        stream: Stream = data.draw(st.sampled_from(list(self.simulation.streams.values())))
        self.aborted.add(stream.request.uid)
        self.simulation.runtime.end(stream.request)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            if self.simulation.runtime.has_work:
                self.simulation.turn()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        for stream in self.simulation.streams.values():
            self.simulation.assert_as_expected(stream, aborted=stream.request.uid in self.aborted)


def test_any_interleaving_gives_the_serial_streams() -> None:
    cached: Counter[int] = Counter()

    class CountsSharing(SchedulerMachine):
        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "simulation"):
                cached[self.page_size] += sum(s.request.num_cached for s in self.simulation.streams.values())

    run_state_machine_as_test(
        CountsSharing,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    if EXAMPLES >= 1000:  # so many draw everything
        assert all(cached[page_size] for page_size in PAGE_SIZES), f"tokens shared by page size: {cached}"


@given(
    load=st.lists(st.tuples(prompts, params), min_size=1, max_size=6),
    depth=st.integers(0, 3),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200, deadline=None)
def test_any_chunk_size_gives_the_serial_streams(
    load: list[tuple[list[int], SamplingParams]], depth: int, chunk: int, seed: int
) -> None:
    config = small_config(overlap_depth=depth, max_num_batched_tokens=chunk, max_num_seqs=min(4, chunk))
    simulation = Simulation(config, CheckingDevice(seed))
    for prompt, wanted in load:
        simulation.add(prompt, wanted)
    simulation.run()
    for stream in simulation.streams.values():
        simulation.assert_as_expected(stream)


sampled_params = st.builds(
    lambda adjustment, **others: SamplingParams(**adjustment, **others),
    adjustments,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.7, 0.2]),
    min_p=st.sampled_from([0.0, 0.3]),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 12),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(
    load=st.lists(st.tuples(prompts, sampled_params, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=5),
    depth=st.integers(1, 3),
    chunk=st.integers(4, 20),
    pages=st.integers(7, 25),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_seeded_samples_are_the_same_alone_and_in_any_batch(
    load: list[tuple[list[int], SamplingParams, int]], depth: int, chunk: int, pages: int, seed: int
) -> None:
    together = Simulation(
        small_config(overlap_depth=depth, max_num_batched_tokens=chunk, num_pages=pages), CheckingDevice(seed)
    )
    streams = [together.add(prompt, wanted, seed=own_seed) for prompt, wanted, own_seed in load]
    together.run()
    for (prompt, wanted, own_seed), stream in zip(load, streams, strict=True):
        alone = Simulation(small_config(overlap_depth=0), CheckingDevice(0))
        reference = alone.add(prompt, wanted, seed=own_seed)
        alone.run()
        assert stream.tokens == reference.tokens
        assert stream.terminal == reference.terminal
        assert stream.request.logprobs == reference.request.logprobs
        assert len(stream.tokens) >= wanted.min_tokens or stream.request.final_len == together.config.max_model_len


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_end_of_sequence_may_land_on_every_step(depth: int) -> None:
    """Stop at each position in turn, with neighbours that go on."""
    for position in range(1, 12):
        simulation = Simulation(small_config(overlap_depth=depth, eos_ids=()))
        probe = simulation.add([5, 2], SamplingParams(temperature=0, max_tokens=12))
        simulation.run()
        stop = probe.tokens[position - 1]
        simulation = Simulation(small_config(overlap_depth=depth, eos_ids=()), CheckingDevice(position))
        stopped = simulation.add([5, 2], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))
        neighbour = simulation.add([4, 4, 1], SamplingParams(temperature=0, max_tokens=15))
        simulation.run()
        assert stopped.tokens == probe.tokens[: probe.tokens.index(stop) + 1]
        assert stopped.request.stop_token == stop
        assert len(neighbour.tokens) == 15
