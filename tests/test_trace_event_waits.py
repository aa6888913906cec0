"""Waits for events: the planned wait of a loop that overlaps costs nothing and is not reported; others are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.observe.trace import Analysis, Cause, DeviceReport, Severity, analyze
from stretto.observe.trace.event_waits import LEAST_SHARE
from tests.helpers.traces import Host, overlap_loop, write, write_nsight

TRACES = Path(__file__).parent / "data" / "traces" / "h200"


def analysis_of(path: Path, host: Host) -> Analysis:
    return analyze(write(path / "trace.json", host))


def waits(report: DeviceReport) -> list[Severity]:
    return [one.severity for one in report.blocking if one.kind == "event-sync"]


def hidden(report: DeviceReport) -> list[str]:
    return [finding.kind for finding in report.findings if finding.is_hidden_sync]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("loop_good", []),
        ("graph_good", []),
        ("loop_sync_at_sample", ["truth-value"]),
        ("graph_sync_at_sample", ["truth-value"]),
        ("loop_pageable_at_stage", ["pageable-upload"]),
    ],
)
def test_of_real_loops_only_the_injected_line_is_reported(name: str, found: list[str]) -> None:
    assert hidden(analyze(TRACES / f"{name}.json.gz").devices[0]) == found


def eager_loop(steps: int = 20, kernels: int = 30, *, call: float = 6.0, syncs: bool = False) -> Host:
    """A loop that overlaps, but whose kernels end before the next is launched: at each wait the device is idle."""
    host = Host()
    last = None
    for _ in range(steps):
        for _ in range(kernels):
            host.now += 10
            host.launch(3.0)
        event = host.record()
        host.work(20.0, "mine.py(3): loop")
        if last is not None:
            with host.within("python_function", "mine.py(3): loop"):
                host.wait_event(last, took=call)
        host.work(30.0, "mine.py(9): process")
        last = event
    if not syncs:
        host.events = [event for event in host.events if event["cat"] != "cuda_sync"]
    return host


@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.parametrize("kernels", [1, 30])
def test_a_wait_for_what_has_happened_is_the_hosts_own_time(tmp_path: Path, kernels: int, syncs: bool) -> None:
    report = analysis_of(tmp_path, eager_loop(kernels=kernels, syncs=syncs)).devices[0]
    assert set(waits(report)[:-1]) == {Severity.OVERLAPPED}  # the last is outside: nothing is launched after it
    assert hidden(report) == []
    assert Cause.SYNC not in report.idle_by_cause


def test_a_wait_for_what_has_happened_does_not_end_the_window(tmp_path: Path) -> None:
    report = analysis_of(tmp_path, eager_loop()).devices[0]
    assert report.window_ns is not None
    assert report.window_ns > 0


def burst_loop(bursts: int, length: int, think: float = 40.0) -> Host:
    """Bursts of steps that overlap; after each the loop waits for the newest step, and thinks before the next burst."""
    host = Host()
    with host.within("python_function", "mine.py(1): loop"):
        for _ in range(bursts):
            done: list[float] = []
            for _ in range(length):
                done.append(host.launch(200.0))
                if len(done) > 1:
                    host.wait(done[-2], "cudaEventSynchronize")
            host.wait(done[-1], "cudaEventSynchronize")
            host.work(think)
    return host


def gained(report: DeviceReport) -> float:
    return sum(finding.gain_ns for finding in report.findings if finding.kind == "event-sync") / report.length_ns


@pytest.mark.parametrize(("length", "lost"), [(1, True), (2, True), (20, True), (80, False)])
def test_a_wait_with_nothing_behind_it_is_lost_if_it_costs_something(tmp_path: Path, length: int, lost: bool) -> None:
    report = analysis_of(tmp_path, burst_loop(4, length)).devices[0]
    assert hidden(report) == (["event-sync"] if lost else [])
    if lost:
        assert gained(report) >= LEAST_SHARE
        assert report.findings[0].severity is Severity.LOST
    else:
        assert set(waits(report)) == {Severity.OVERLAPPED, Severity.OUTSIDE}


@pytest.mark.parametrize("think", [0.0, 400.0])
def test_what_decides_is_what_the_host_does_behind_the_wait(tmp_path: Path, think: float) -> None:
    report = analysis_of(tmp_path, burst_loop(4, 80, think)).devices[0]
    assert hidden(report) == ([] if think == 0 else ["event-sync"])


def test_a_loop_that_waits_for_the_step_just_launched_is_found_without_annotations(tmp_path: Path) -> None:
    report = analysis_of(tmp_path, overlap_loop(depth=0, annotate=False)).devices[0]
    assert hidden(report) == ["event-sync"]
    assert report.findings[0].gain_ns > 0.1 * report.length_ns


def coincidence(syncs: bool) -> Host:
    """While the host waits for an event that happened long ago, the newest work ends: by times, that was awaited."""
    host = Host()
    old = host.record()
    for _ in range(10):
        host.launch(60.0)
        event = host.record()
        with host.within("python_function", "mine.py(3): loop"):
            host.wait_event(old, took=65.0)
        host.work(100.0, "mine.py(9): process")
        old = event
    if not syncs:
        host.events = [event for event in host.events if event["cat"] != "cuda_sync"]
    return host


def chrome(path: Path, host: Host) -> Analysis:
    return analyze(write(path / "trace.json", host))


def nsight(path: Path, host: Host) -> Analysis:
    return analyze(write_nsight(path / "trace.sqlite", host))


def old_nsight(path: Path, host: Host) -> Analysis:
    return analyze(write_nsight(path / "trace.sqlite", host, numbered_events=False))


@pytest.mark.parametrize("read", [chrome, nsight, old_nsight])
def test_a_recording_that_has_the_events_is_believed(tmp_path: Path, read: Callable[[Path, Host], Analysis]) -> None:
    told = read(tmp_path, coincidence(syncs=True)).devices[0]
    assert [one.ready for one in told.blocking] == [True] * 10
    assert hidden(told) == []


def test_without_them_the_times_decide(tmp_path: Path) -> None:
    assert hidden(analysis_of(tmp_path, coincidence(syncs=False)).devices[0]) == ["event-sync"]


@pytest.mark.parametrize("read", [chrome, nsight, old_nsight])
def test_the_awaited_activity_is_that_before_the_event(tmp_path: Path, read: Callable[[Path, Host], Analysis]) -> None:
    host = Host()
    expected = []
    for number in range(6):
        host.launch(100.0, f"step{number}")
        event = host.record()
        host.launch(30.0, "other", stream=8)
        host.launch(50.0, "later")
        host.wait_event(event)
        expected.append(f"step{number}")
    analysis = read(tmp_path, host)
    report = analysis.devices[0]
    names, device = analysis.trace.names, analysis.trace.device
    assert [names[device.name[one.awaited]] for one in report.blocking] == expected


@pytest.mark.parametrize("read", [chrome, nsight, old_nsight])
def test_known_waits_between_streams_are_played_again(tmp_path: Path, read: Callable[[Path, Host], Analysis]) -> None:
    # Without the sync that starts each round the copies would run ahead, but not ahead of what they wait for.
    host = Host()
    for _ in range(20):
        host.launch(300.0, "forward")
        host.stream_wait(20, host.record())
        host.launch(40.0, "sample", stream=20)
        host.stream_wait(7, host.record(20))
        host.wait(max(host.streams.values()), "cudaDeviceSynchronize")
        host.work(100.0, "mine.py(2): process")
    report = read(tmp_path, host).devices[0]
    assert report.replay_error is not None
    assert report.replay_error < 0.01
    assert hidden(report) == ["device-sync"]
    without = report.length_ns - report.findings[0].gain_ns
    assert without == pytest.approx(20 * 340_000, rel=0.05)
