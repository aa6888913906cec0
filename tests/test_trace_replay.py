"""The replay gives the recorded time unchanged, and without a cause the time of a loop that never had it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.observe.trace import Cause, DeviceReport, analyze
from tests.helpers.traces import Host, overlap_loop, write


def report_of(path: Path, host: Host) -> DeviceReport:
    return analyze(write(path / "trace.json", host)).devices[0]


@pytest.mark.parametrize("bug", ["", "sync@sample", "pageable@stage"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("forward", [200.0, 1000.0])
def test_unchanged_it_gives_the_recorded_length(tmp_path: Path, bug: str, depth: int, forward: float) -> None:
    report = report_of(tmp_path, overlap_loop(bug=bug, depth=depth, forward=forward))
    assert report.replay_error is not None
    assert report.replay_error < 0.01


def test_without_the_hidden_sync_it_gives_the_loop_that_overlaps(tmp_path: Path) -> None:
    good = report_of(tmp_path, overlap_loop(30))
    bad = report_of(tmp_path, overlap_loop(30, bug="sync@sample"))
    gain = bad.findings[0].gain_ns
    # What is left is the small kernel and the copy that the bug launches besides.
    assert bad.length_ns - gain == pytest.approx(good.length_ns, rel=0.015)
    assert gain > 0.9 * (bad.length_ns - good.length_ns) > 0


def test_without_the_planned_wait_the_serial_loop_becomes_the_overlap_loop(tmp_path: Path) -> None:
    good = report_of(tmp_path, overlap_loop(30))
    serial = report_of(tmp_path, overlap_loop(30, depth=0))
    assert serial.findings[0].cause is Cause.PLANNED_WAIT
    assert serial.length_ns - serial.findings[0].gain_ns == pytest.approx(good.length_ns, rel=0.01)


def test_without_the_upload_the_loop_is_as_if_it_were_pinned(tmp_path: Path) -> None:
    quick = {"forward": 250.0, "schedule": 100.0, "process": 30.0}
    good = report_of(tmp_path, overlap_loop(30, **quick))
    bad = report_of(tmp_path, overlap_loop(30, bug="pageable@stage", **quick))
    upload = next(finding for finding in bad.findings if finding.kind == "pageable-upload")
    assert bad.length_ns - upload.gain_ns == pytest.approx(good.length_ns, rel=0.05)


def test_without_the_late_host_the_device_is_always_busy(tmp_path: Path) -> None:
    report = report_of(tmp_path, overlap_loop(30, forward=300, process=700))
    late = [finding for finding in report.findings if finding.cause is Cause.HOST_LATE]
    gained = sum(finding.gain_ns for finding in late)
    assert report.length_ns - gained == pytest.approx(report.busy_ns, rel=0.02)


def test_without_launch_overhead_only_the_kernels_are_left(tmp_path: Path) -> None:
    host = Host()
    for _ in range(30):
        for i in range(20):
            host.now += 10
            host.launch(3, f"kernel{i}")
    report = report_of(tmp_path, host)
    assert report.length_ns - report.findings[0].gain_ns < 1.5 * report.busy_ns


def test_a_cause_that_hides_behind_another_gains_nothing(tmp_path: Path) -> None:
    # Half of the wait is for a copy that the kernels of another stream outlast.
    host = Host()
    for _ in range(20):
        host.launch(1000, "long", stream=7)
        host.item("aten::item", stream=8)
        host.work(200, "mine.py(4): other")
        host.wait(host.streams[7] - 150, "cudaEventSynchronize")
    report = report_of(tmp_path, host)
    assert report.busy_ns / report.length_ns > 0.98
    assert all(finding.gain_ns < 0.02 * report.length_ns for finding in report.findings)
