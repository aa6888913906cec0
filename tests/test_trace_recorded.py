"""Traces of real programs, recorded by torch.profiler: the annotated loop on two threads, and a training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.observe.trace import Cause, analyze

TRACES = Path(__file__).parent / "data" / "traces"


def test_the_good_loop_has_no_hidden_sync_and_a_wide_window() -> None:
    report = analyze(TRACES / "cpu_loop_good.json.gz").devices[0]
    assert len(report.steps) == 8
    assert not [finding for finding in report.findings if finding.is_hidden_sync]
    assert report.window_ns is not None
    assert report.window_ns > 0.9 * report.step_ns


def test_the_hidden_sync_is_found_in_the_function_that_holds_it() -> None:
    report = analyze(TRACES / "cpu_loop_sync.json.gz").devices[0]
    first = report.findings[0]
    assert (first.severity, first.kind, first.location) == ("lost", "truth-value", "loop.py(36): sample")
    assert report.findings[0].gain_ns > 0
    assert report.window_ns is not None
    assert report.window_ns < 0.01 * report.step_ns


def test_the_training_loop_waits_for_its_batches() -> None:
    report = analyze(TRACES / "cpu_training.json.gz").devices[0]
    assert report.steps.method == "annotations ProfilerStep"
    assert report.findings[0].cause is Cause.HOST_LATE
    assert report.findings[0].location == "train.py(12): load_batch"


def test_a_trace_recorded_now_is_understood(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    a = torch.randn(200, 200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as recorder:
        for number in range(4):
            with torch.profiler.record_function(f"stretto.step {number}"):
                for _ in range(5):
                    torch.mm(a, a)
    path = tmp_path / "trace.json"
    recorder.export_chrome_trace(str(path))
    analysis = analyze(path)
    report = analysis.devices[0]
    assert len(report.steps) == 4
    names = [analysis.trace.names[i] for i in analysis.trace.device.name[report.rows].tolist()]
    assert names.count("aten::mm") == 20
    operator = analysis.trace.host.name.tolist().index(analysis.trace.names.index("aten::mm"))
    assert "test_a_trace_recorded_now_is_understood" in " ".join(analysis.stacks.frames(operator))
