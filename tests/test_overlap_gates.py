"""Gates: whatever the mix of features, no step waits without a plan, and the device never waits for the host.

In virtual time, a step costs the device ten times what a turn costs the host, so at overlap depth 1 or more no bubble
is excusable. Every injected fault must fail its gate and be named.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stretto.device.base import DeviceFault
from stretto.device.checking import CheckingDevice
from stretto.observe import HiddenSync, SyncGuard
from stretto.observe.engine import ObservedEngine
from stretto.observe.faults import Faults
from stretto.observe.trace.kinds import Severity
from stretto.observe.verdict import Verdict, judge
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.llm_fixture import assert_idle, dummy_llm
from tests.helpers.simulation import Simulation, small_config

STEP_S, TURN_S, CALL_S = 10e-3, 1e-3, 1e-6
Mix = Callable[[Simulation], None]


def _all(*params: SamplingParams, prompt: int = 5) -> Mix:
    def add(simulation: Simulation) -> None:
        for number, each in enumerate(params * 3):
            simulation.add([1 + (number + i) % 10 for i in range(prompt)], each, seed=number)

    return add


def _greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 9, "ignore_eos": True, **options})  # type: ignore[arg-type]


def _of_all_lengths(simulation: Simulation) -> None:
    random = np.random.default_rng(1)
    for _ in range(10):
        prompt = random.integers(1, 11, random.integers(1, 10)).tolist()
        simulation.add(prompt, _greedy(max_tokens=int(random.integers(1, 12)), ignore_eos=bool(random.integers(2))))


def _cache_hits(simulation: Simulation) -> None:
    for number in range(6):
        simulation.add([1, 2, 3, 4, 5, 6, 7, 8, 1 + number], _greedy())
        for _ in range(4):
            _turn(simulation)


def _aborts(simulation: Simulation) -> None:
    _of_all_lengths(simulation)
    for _ in range(6):
        _turn(simulation)
    for stream in list(simulation.streams.values())[::2]:
        simulation.runtime.end(stream.request)


MIXES: dict[str, Mix] = {
    "greedy": _all(_greedy()),
    "end of sequence": _all(_greedy(ignore_eos=False, max_tokens=15)),
    "temperature": _all(_greedy(temperature=1.0)),
    "top-k": _all(_greedy(temperature=0.8, top_k=3)),
    "top-p": _all(_greedy(temperature=0.8, top_p=0.7)),
    "min-p": _all(_greedy(temperature=0.8, min_p=0.1)),
    "min tokens": _all(_greedy(min_tokens=4, stop_token_ids=[3, 4], ignore_eos=False)),
    "stop tokens": _all(_greedy(stop_token_ids=[3, 4, 5])),
    "log-probabilities": _all(_greedy(logprobs=3)),
    "presence penalty": _all(_greedy(presence_penalty=1.5)),
    "frequency penalty": _all(_greedy(frequency_penalty=0.5)),
    "repetition penalty": _all(_greedy(repetition_penalty=1.3)),
    "logit bias": _all(_greedy(logit_bias={3: 5.0, 4: -100.0})),
    "chunked prompts": _all(_greedy(max_tokens=4), prompt=19),
    "mixed sampling": _all(
        _greedy(), _greedy(temperature=1.0, top_k=4, top_p=0.9, min_p=0.02), _greedy(logprobs=2), _greedy(min_tokens=2)
    ),
    "all lengths": _of_all_lengths,
    "cache hits": _cache_hits,
    "aborts": _aborts,
}


def _turn(simulation: Simulation) -> None:
    """One turn of a host that also needs time of its own."""
    assert isinstance(simulation.device, CheckingDevice)
    simulation.device.host_work(TURN_S)
    simulation.turn()


def _cost(stream: str, work: Callable[..., None], args: tuple[object, ...]) -> float:
    return STEP_S if getattr(work, "__name__", "") == "_step" else 0.0


def _run(
    mix: Mix, *, depth: int, mode: str = "raise", inject: str = "", **config: object
) -> tuple[Simulation, Verdict, SyncGuard]:
    guard = SyncGuard(mode, every=1, cpu_as_device=True)  # type: ignore[arg-type]
    faults = Faults.parse(inject) if inject else Faults()
    simulation = Simulation(
        small_config(overlap_depth=depth, **config),
        CheckingDevice(3, host_delay=(CALL_S, CALL_S), cost=_cost),
        partial(Runtime, engine_type=partial(ObservedEngine, guard=guard, faults=faults)),
    )
    mix(simulation)
    for _ in range(2_000):
        if not simulation.runtime.has_work:
            break
        _turn(simulation)
    simulation.assert_at_rest()
    return simulation, judge(simulation.runtime.timeline.totals(), guard), guard


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_device_never_waits_and_nothing_syncs(name: str, depth: int) -> None:
    simulation, verdict, _ = _run(MIXES[name], depth=depth)
    assert verdict.holds, verdict
    totals = simulation.runtime.timeline.totals()
    assert totals.steps > 5
    assert totals.bubble_s == 0
    assert totals.occupancy > 0.95


@pytest.mark.parametrize("name", MIXES)
def test_without_overlap_nothing_syncs_but_the_device_waits(name: str) -> None:
    simulation, verdict, guard = _run(MIXES[name], depth=0)
    assert guard.findings() == []
    assert simulation.runtime.timeline.totals().bubble_s > 0
    assert "the device waited for the host" in str(verdict)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_chunks_sync_nothing(depth: int) -> None:
    """With too few pages, a request may have to wait until the step that frees them is over: no fault of the host."""
    long = _all(_greedy(max_tokens=14), prompt=8)
    simulation, _, guard = _run(long, depth=depth, num_pages=9)
    assert simulation.runtime.stats().preemptions > 0
    assert guard.findings() == []


def test_a_sync_in_sampling_is_raised_at_its_line() -> None:
    with pytest.raises(HiddenSync) as caught:
        _run(MIXES["greedy"], depth=1, inject="sync@sample")
    finding = caught.value.finding
    assert (finding.kind, finding.severity) == ("truth-value", Severity.LOST)
    assert _line(finding.file, finding.line) == "if (tokens_S >= 0).all():"


@pytest.mark.parametrize("name", MIXES)
def test_a_sync_in_sampling_fails_the_gate_and_is_named(name: str) -> None:
    simulation, verdict, guard = _run(MIXES[name], depth=1, mode="count", inject="sync@sample")
    assert simulation.runtime.timeline.totals().bubble_s > 0
    assert [finding.kind for finding in guard.findings()] == ["truth-value"]
    assert guard.findings()[0].count == simulation.runtime.timeline.totals().steps
    assert "inject.py" in verdict.reasons[0]
    assert "overlap lost" in verdict.reasons[0]


def test_a_pageable_upload_fails_the_gate_and_only_shortens() -> None:
    with pytest.raises(HiddenSync):
        _run(MIXES["greedy"], depth=1, inject="pageable@stage")
    simulation, verdict, guard = _run(MIXES["greedy"], depth=1, mode="count", inject="pageable@stage")
    finding = guard.findings()[0]
    assert (finding.kind, finding.severity) == ("pageable-upload", Severity.SHORTENED)
    assert _line(finding.file, finding.line) == "torch.tensor(numbers, device=device)"
    assert simulation.runtime.timeline.totals().bubble_s == 0
    assert not verdict.holds


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slow_host_fails_the_gate_and_its_phase_is_named(depth: int) -> None:
    simulation, verdict, guard = _run(MIXES["greedy"], depth=depth, inject="slow-host=15ms")
    assert guard.findings() == []
    assert simulation.runtime.timeline.totals().bubble_share > 0.1
    assert "of which launch 15." in str(verdict)


def test_a_slow_host_within_the_step_is_hidden() -> None:
    _, verdict, _ = _run(MIXES["greedy"], depth=1, inject="slow-host=8ms")
    assert verdict.holds, verdict


def test_a_sync_in_the_works_own_code_is_found_too() -> None:
    class PeekingEngine(ObservedEngine):
        def feed_back(self, slot_S, position_S, tokens_S) -> None:  # type: ignore[no-untyped-def]
            if (tokens_S >= 0).all():
                super().feed_back(slot_S, position_S, tokens_S)

    guard = SyncGuard("raise", cpu_as_device=True)
    make = partial(Runtime, engine_type=partial(PeekingEngine, guard=guard, faults=Faults()))
    simulation = Simulation(small_config(), CheckingDevice(0), make)
    simulation.add([1, 2, 3])
    with pytest.raises(DeviceFault) as caught:
        simulation.run()
    assert isinstance(caught.value.__cause__, HiddenSync)
    assert caught.value.__cause__.finding.file == __file__


def _line(file: str, number: int) -> str:
    with open(file, encoding="utf-8") as source:
        return source.readlines()[number - 1].split("  #")[0].strip()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_real_decoder_syncs_nothing_in_any_mix(tmp_path: Path, depth: int) -> None:
    """Chunks, cache hits, a client that leaves, and all of sampling at once: `raise` would end the run."""
    each = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=8),
        SamplingParams(top_k=5, max_tokens=8),
        SamplingParams(top_p=0.8, max_tokens=8),
        SamplingParams(min_p=0.1, max_tokens=8),
        SamplingParams(min_tokens=5, stop_token_ids=[3, 4], max_tokens=8),
        SamplingParams(logprobs=3, max_tokens=8),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=8),
        SamplingParams(logit_bias={3: 4.0}, max_tokens=8),
    ]
    options = {"max_num_batched_tokens": 32, "page_size": 16, "num_pages": 80, "sync_guard": "raise"}
    with dummy_llm(tmp_path, overlap_depth=depth, **options) as llm:
        prompts = [{"prompt_token_ids": [5] * 70 + [7 + number]} for number in range(len(each))]
        for _ in range(2):
            stream = llm.stream({"prompt_token_ids": [9] * 40}, each[0])
            next(stream)
            llm.generate(prompts, each, use_tqdm=False)
            stream.close()
        stats = llm.stats()
        assert stats.cached_tokens > 0
        assert stats.hidden_syncs == 0
        assert_idle(llm)
