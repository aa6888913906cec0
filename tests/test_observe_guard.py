"""SyncGuard as its users see it: what it counts, what it names, what it lets through; and faults by their spelling."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from stretto import LLM, InvalidRequest, SamplingParams
from stretto.config import EngineConfig
from stretto.device.cpu import CpuDevice
from stretto.engine.staging import RingEntry
from stretto.observe import HiddenSync, SyncGuard
from stretto.observe.engine import ObservedEngine
from stretto.observe.faults import Faults
from stretto.observe.trace.kinds import BLOCKING_WORDS, Severity
from stretto.runtime import Runtime
from stretto.scheduler.batch import StepPlan
from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.llm_fixture import dummy_llm
from tests.helpers.simulation import Simulation, small_config

X = torch.arange(6)


def _line() -> int:
    return sys._getframe(1).f_lineno


def test_counting_goes_on_and_names_each_line_once() -> None:
    with SyncGuard("count") as guard:
        for _ in range(3):
            first = _line() + 1
            assert X[1].item() == 1
        assert bool((X >= 0).all())
    assert {(one.kind, one.count, one.file) for one in guard.findings()} == {
        ("item", 3, __file__),
        ("truth-value", 1, __file__),
    }
    item = next(one for one in guard.findings() if one.kind == "item")
    assert item.line == first
    assert item.function == "test_counting_goes_on_and_names_each_line_once"
    assert item.timed == 3
    assert 0 < item.blocked_s < 1
    assert item.severity is Severity.LOST
    assert item.remedy == BLOCKING_WORDS["item"].remedy
    assert guard.num_syncs == 4
    assert f"{__file__}:{first}" in str(item)


def test_a_report_that_comes_after_its_call_is_not_counted_twice() -> None:
    """Torch keeps CUDA's warnings until the outermost call from Python returns; such a call is acted here."""
    acted: dict[str, Callable[[torch.Tensor, Callable[[], None]], None]] = {}
    source = "def outer(x, report):\n    x.nonzero()\n    report()\n"
    exec(compile(source, str(Path(torch.__file__).with_name("acted.py")), "exec"), acted)
    with SyncGuard("count") as guard:
        acted["outer"](X, guard._heard)
        guard._heard()  # of a sync that nobody saw
    assert sorted((one.kind, one.count) for one in guard.findings()) == [("nonzero", 1), ("sync", 1)]


def test_an_upload_from_pageable_memory_only_shortens() -> None:
    with SyncGuard("count") as guard:
        torch.tensor([1, 2, 3])
    assert [(one.kind, one.severity) for one in guard.findings()] == [("pageable-upload", Severity.SHORTENED)]


def test_lost_comes_before_shortened() -> None:
    with SyncGuard("count") as guard:
        for _ in range(50):
            torch.tensor([1, 2, 3])
        X.tolist()
    assert [one.kind for one in guard.findings()] == ["tolist", "pageable-upload"]


def test_a_call_inside_a_call_is_counted_once() -> None:
    with SyncGuard("count") as guard:
        X.unique()  # sorts, and asks for its size, inside
    assert [one.count for one in guard.findings()] == [1]


def test_allow_lets_through_by_name_only_in_its_scope() -> None:
    with SyncGuard("raise") as guard:
        with guard.allow("read the result of the warm-up"):
            assert X[2].item() == 2
            assert X.tolist()[5] == 5
        with pytest.raises(HiddenSync):
            X[2].item()
    assert guard.allowed == {"read the result of the warm-up": 2}
    assert guard.num_syncs == 1


def test_looking_at_calls_imports_nothing() -> None:
    """Torch would import its compiler with the first operator under a mode: seconds, in the middle of a step."""
    program = """
        import sys, torch
        from stretto.observe import SyncGuard

        x = torch.arange(6)
        before = set(sys.modules)
        with SyncGuard("count") as guard:
            (x + 1).tolist()
        assert guard.num_syncs == 1
        print(sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_allow_wants_a_reason() -> None:
    guard = SyncGuard("raise")
    with pytest.raises(InvalidRequest, match="reason"), guard.allow(" "):
        pass


def test_the_error_says_where_and_how_to_fix_it() -> None:
    here = _line() + 1
    look = lambda: bool((X > 2).any())  # noqa: E731
    with SyncGuard("raise"), pytest.raises(HiddenSync) as caught:
        look()
    assert f"{__file__}:{here}" in str(caught.value)
    assert BLOCKING_WORDS["truth-value"].remedy in str(caught.value)
    assert caught.value.finding.line == here


def test_off_sees_nothing() -> None:
    with SyncGuard("off") as guard:
        X.tolist()
    assert guard.findings() == []


def test_only_threads_that_entered_are_watched() -> None:
    failures: list[BaseException] = []

    def look() -> None:
        try:
            X.tolist()
        except BaseException as error:
            failures.append(error)

    with SyncGuard("raise"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert failures == []


def test_one_guard_may_be_entered_again_and_nested() -> None:
    guard = SyncGuard("count")
    with guard:
        with guard:
            X.tolist()
        X.tolist()
    X.tolist()
    with guard:
        X.tolist()
    assert guard.num_syncs == 3
    guard.clear()
    assert guard.findings() == []


def test_unknown_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="off, count, raise"):
        SyncGuard("loud")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sync_guard is 'loud'"):
        LLM(str(write_dummy_model(tmp_path)), load_format="dummy", sync_guard="loud")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("sync@sample", Faults(sync_at_sample=True)),
        ("pageable@stage", Faults(pageable_at_stage=True)),
        ("slow-host=2ms", Faults(slow_host_s=0.002)),
        ("slow-host=250us,slow-device=0.5s", Faults(slow_host_s=0.00025, slow_device_s=0.5)),
        (["slow-device=5ms", "sync@sample"], Faults(slow_device_s=0.005, sync_at_sample=True)),
        ((), Faults()),
    ],
)
def test_faults_are_spelt_as_documented(text: str | list[str], faults: Faults) -> None:
    assert Faults.parse(text) == faults
    assert bool(faults) == (faults != Faults())


@pytest.mark.parametrize(
    "text",
    ["sync", "sync@forward", "slow-host", "slow-host=2", "slow-host=-1ms", "slow-device=2m", "slow-host=61s", ""],
)
def test_other_faults_are_refused_before_anything_is_loaded(text: str) -> None:
    for make in (EngineConfig, LLM):
        with pytest.raises(InvalidRequest, match="sync@sample, pageable@stage, slow-host=2ms, slow-device=5ms"):
            make("no-such-model", inject=text)


def test_faults_are_checked_without_torch() -> None:
    code = """
import sys
from stretto.config import EngineConfig
try:
    EngineConfig("m", inject="sync@forward")
except ValueError as error:
    print("torch" in sys.modules, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False inject is 'sync@forward'; allowed: sync@sample")


PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [7]}]


def _answers(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_an_engine_counts_and_changes_no_result(tmp_path: Path) -> None:
    with dummy_llm(tmp_path, overlap_depth=1) as plain:
        expected = _answers(plain)
        assert plain.hidden_syncs() == []
    with dummy_llm(tmp_path, overlap_depth=1, sync_guard="count") as watched:
        assert _answers(watched) == expected
        assert watched.hidden_syncs() == []
        assert watched.stats().hidden_syncs == 0


@pytest.mark.parametrize(
    ("inject", "kind", "severity"),
    [
        ("sync@sample", "truth-value", Severity.LOST),
        ("pageable@stage", "pageable-upload", Severity.SHORTENED),
    ],
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_injected_sync_is_found_and_classified_and_changes_no_result(
    tmp_path: Path, inject: str, kind: str, severity: Severity, depth: int
) -> None:
    with dummy_llm(tmp_path, overlap_depth=depth) as plain:
        expected = _answers(plain)
    with dummy_llm(tmp_path, overlap_depth=depth, sync_guard="count", inject=inject) as llm:
        assert _answers(llm) == expected
        (finding,) = llm.hidden_syncs()
        assert (finding.kind, finding.severity) == (kind, severity)
        assert finding.file.endswith("inject.py")
        assert finding.count == llm.stats().steps == llm.stats().hidden_syncs
        assert finding.blocked_s > 0


def test_an_injected_sync_waits_for_the_device(tmp_path: Path) -> None:
    with dummy_llm(tmp_path, overlap_depth=1, sync_guard="count", inject="sync@sample,slow-device=5ms") as llm:
        _answers(llm)
        (finding,) = llm.hidden_syncs()
        assert finding.blocked_s > 0.004 * finding.count  # the device sleeps 5 ms in every step


def test_raise_ends_the_run_at_the_injected_line(tmp_path: Path) -> None:
    with (
        dummy_llm(tmp_path, overlap_depth=1, sync_guard="raise", inject="sync@sample") as llm,
        pytest.raises(HiddenSync),
    ):
        _answers(llm)


def test_a_slow_device_and_a_slow_host_are_slow_where_they_say(tmp_path: Path) -> None:
    with dummy_llm(tmp_path, overlap_depth=0, inject="slow-device=3ms,slow-host=4ms") as llm:
        _answers(llm)
        stats = llm.stats()
        assert stats.busy_s >= 0.003 * stats.steps
        assert stats.launch_s >= 0.004 * stats.steps


class EngineThatWaitsForItsStream(ObservedEngine):
    """Waits for everything launched, as a program does that wants to be sure."""

    def _return_results(self, plan: StepPlan, entry: RingEntry) -> None:
        self.stream.synchronize()
        super()._return_results(plan, entry)


@pytest.mark.parametrize("depth", [0, 1])
def test_waiting_for_a_stream_in_a_launch_is_found(depth: int) -> None:
    guard = SyncGuard("count", cpu_as_device=True)
    make = partial(Runtime, engine_type=partial(EngineThatWaitsForItsStream, guard=guard, faults=Faults()))
    simulation = Simulation(small_config(overlap_depth=depth), CpuDevice(1), make)
    stream = simulation.add([1, 2, 3])
    simulation.run()
    simulation.assert_as_expected(stream)
    (finding,) = guard.findings()
    assert (finding.kind, finding.file) == ("stream-sync", __file__)
    assert finding.count == simulation.runtime.stats().steps
    simulation.runtime.engine.stream.synchronize()  # not in a launch: nobody minds
    assert guard.num_syncs == finding.count
    simulation.runtime.close()
