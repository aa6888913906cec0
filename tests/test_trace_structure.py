"""Steps, launches, streams, processes and clocks are found as they were built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stretto.observe.trace import Analysis, Cause, TraceError, analyze
from tests.helpers.traces import Host, overlap_loop, write


def analysis_of(path: Path, *hosts: Host, step: str | None = None) -> Analysis:
    return analyze(write(path / "trace.json", *hosts), step_pattern=step)


def eager_steps(steps: int = 12, layers: int = 4, *, marks: str = "", extra_every: int = 0) -> Host:
    """Eager decoding without annotations: one kernel in front, some per layer, one behind, one tail copy."""
    host = Host()
    for number in range(steps):
        with host.within("user_annotation", *([f"{marks}{number}"] if marks else [])):
            host.work(40, "loop.py(2): prepare")
            host.launch(20, "embed")
            for _ in range(layers):
                for name in ("norm", "qkv", "attention", "out"):
                    host.launch(15, name)
            host.launch(60, "head")
            host.launch(5, "argmax")
            if extra_every and number % extra_every == 0:
                host.launch(5, "rare")
            host.wait(host.read())
    return host


@pytest.mark.parametrize(
    ("marks", "method"), [("ProfilerStep#", "annotations ProfilerStep"), ("execute_model_", "'execute_model_#'")]
)
def test_steps_are_found_by_annotations(tmp_path: Path, marks: str, method: str) -> None:
    report = analysis_of(tmp_path, eager_steps(marks=marks)).devices[0]
    assert len(report.steps) == 12
    assert method in report.steps.method
    assert report.steps.labels[-1] == "11"


def test_annotations_of_layers_do_not_pass_for_steps(tmp_path: Path) -> None:
    host = Host()
    for number in range(6):
        with host.within("user_annotation", f"forward {number}"):
            for layer in range(8):
                with host.within("user_annotation", f"layer {layer}"):
                    host.launch(50, "gemm")
    assert len(analysis_of(tmp_path, host).devices[0].steps) == 6


def test_steps_are_found_by_graph_launches(tmp_path: Path) -> None:
    report = analysis_of(tmp_path, overlap_loop(15, annotate=False)).devices[0]
    assert (len(report.steps), report.steps.method) == (15, "graph launches")


def test_several_graphs_make_one_step(tmp_path: Path) -> None:
    host = Host()
    for _ in range(8):
        host.launch(30, "first", call="cudaGraphLaunch", kernels=3)
        for _ in range(5):
            host.launch(40, "middle", call="cudaGraphLaunch", kernels=2)
            host.launch(10, "attention")
        host.launch(30, "last", call="cudaGraphLaunch", kernels=3)
    assert len(analysis_of(tmp_path, host).devices[0].steps) == 8


@pytest.mark.parametrize("layers", [1, 4, 30])
def test_steps_are_found_by_the_period_of_the_step_not_of_its_layers(tmp_path: Path, layers: int) -> None:
    report = analysis_of(tmp_path, eager_steps(layers=layers)).devices[0]
    assert (len(report.steps), report.steps.method) == (12, "the period of the kernels")
    # All are alike but the last, after which nothing comes.
    assert np.ptp((report.steps.device_end - report.steps.device_start)[:-1]) == 0


def test_something_that_happens_every_third_step_does_not_pass_for_one(tmp_path: Path) -> None:
    assert len(analysis_of(tmp_path, eager_steps(24, extra_every=3)).devices[0].steps) == 24


def test_a_trace_without_repetition_is_one_step(tmp_path: Path) -> None:
    host = Host()
    for i in range(10):
        host.launch(10.0, f"kernel {i * i}")
    report = analysis_of(tmp_path, host).devices[0]
    assert (len(report.steps), report.steps.method[:10]) == (1, "none found")


def test_the_user_may_name_the_steps(tmp_path: Path) -> None:
    host = eager_steps(marks="turn ")
    report = analysis_of(tmp_path, host, step=r"^turn \d+$").devices[0]
    assert len(report.steps) == 12
    with pytest.raises(TraceError, match="no annotation matches 'walk'; found: turn #"):
        analysis_of(tmp_path, host, step="walk")
    with pytest.raises(TraceError, match="is no regular expression"):
        analysis_of(tmp_path, host, step="(")


def test_the_overlap_window_is_what_the_host_has_before_it_blocks(tmp_path: Path) -> None:
    good = analysis_of(tmp_path, overlap_loop()).devices[0]
    lost = analysis_of(tmp_path, overlap_loop(bug="sync@sample")).devices[0]
    serial = analysis_of(tmp_path, overlap_loop(depth=0)).devices[0]
    assert good.window_ns is not None
    assert good.window_ns > 0.9 * good.step_ns
    assert (lost.window_ns, serial.window_ns) == (0.0, 0.0)
    assert good.overlap.hidden_share is not None
    assert lost.overlap.hidden_share is not None
    assert good.overlap.hidden_share > 0.95
    assert lost.overlap.hidden_share < 0.2


def test_the_launch_queue_is_as_deep_as_the_host_is_ahead(tmp_path: Path) -> None:
    host = Host()
    for _ in range(20):
        host.launch(100)
    queue = analysis_of(tmp_path, host).devices[0].queue
    assert queue is not None
    # Launched every 2 us, run every 100: nearly all are queued at the end.
    assert queue.depth_most == 18
    assert queue.empty_share == 1 / 20


def test_streams_that_work_at_once_are_counted_once_as_busy(tmp_path: Path) -> None:
    host = Host()
    for _ in range(10):
        host.launch(100, "a", stream=7)
        host.launch(100, "b", stream=8)
    report = analysis_of(tmp_path, host).devices[0]
    assert report.several_streams_share == pytest.approx(0.99, abs=0.02)
    assert report.busy_ns == report.length_ns
    assert len({lane.stream for lane in analysis_of(tmp_path, host).trace.lanes}) == 2


def test_processes_that_share_correlations_keep_their_own_launches(tmp_path: Path) -> None:
    first, second = Host(pid=1, tid=1, device=0), Host(pid=2, tid=2, device=1, now=7.0)
    overlap_loop(10, bug="sync@sample", host=first)
    overlap_loop(10, forward=900, host=second)
    analysis = analysis_of(tmp_path, first, second)
    by_device = {report.device: report for report in analysis.devices}
    assert [finding.kind for finding in by_device["0"].findings] == ["truth-value"]
    assert by_device["1"].findings == []
    for index, report in enumerate((by_device["0"], by_device["1"])):
        assert set(analysis.launches.thread[report.rows].tolist()) == {index}
        delay = analysis.trace.device.start[report.rows] - analysis.launches.start[report.rows]
        assert delay.min() == 3000


@pytest.mark.parametrize("error", [-40.0, -400.0, 0.0])
def test_a_device_clock_that_runs_ahead_is_corrected(tmp_path: Path, error: float) -> None:
    analysis = analysis_of(tmp_path, overlap_loop(bug="sync@sample", host=Host(clock_error=error)))
    assert (analysis.launches.start <= analysis.trace.device.start).all()
    assert [finding.kind for finding in analysis.devices[0].findings if finding.is_hidden_sync] == ["truth-value"]
    assert ("ahead of the host's" in " ".join(analysis.trace.warnings)) == (error < 0)


def test_times_rounded_to_microseconds_are_understood(tmp_path: Path) -> None:
    host = overlap_loop(bug="sync@sample")
    for event in host.events:
        begin = int(event["ts"])
        event["dur"] = int(event["ts"] + event["dur"]) - begin
        event["ts"] = begin
    report = analysis_of(tmp_path, host).devices[0]
    assert [finding.location for finding in report.findings] == ["engine/sampler.py(41): sample"]


def test_events_in_any_order_give_the_same_answer(tmp_path: Path) -> None:
    host = overlap_loop(bug="sync@sample")
    expected = analysis_of(tmp_path, host).devices[0]
    np.random.default_rng(1).shuffle(host.events)  # type: ignore[arg-type]
    shuffled = analysis_of(tmp_path, host).devices[0]
    assert shuffled.idle_by_cause == expected.idle_by_cause
    assert [(f.kind, f.location) for f in shuffled.findings] == [(f.kind, f.location) for f in expected.findings]


def test_kernels_that_overlap_by_rounding_are_not_negative_gaps(tmp_path: Path) -> None:
    host = Host()
    for _ in range(30):
        host.launch(10)
    for event in host.events:
        if event["cat"] == "kernel":
            event["dur"] += 0.6
    report = analysis_of(tmp_path, host).devices[0]
    assert all(gap.length > 0 for gap in report.gaps)
    assert report.busy_ns <= report.length_ns


def training_loop(steps: int, *, log: bool) -> Host:
    """Forward on one thread, backward on another, and perhaps a loss that is printed."""
    host = Host()
    for number in range(steps):
        with (
            host.within("user_annotation", f"ProfilerStep#{number}"),
            host.within("python_function", "train.py(9): step"),
        ):
            for i in range(6):
                host.launch(80, f"forward{i}")
            for i in range(6):
                host.launch(160, f"backward{i}")
            if log:
                with host.within("python_function", "train.py(30): log"):
                    host.item("aten::item", "aten::_local_scalar_dense")
            host.work(100, "train.py(22): next_batch")
    return host


def test_a_training_loop_that_prints_its_loss_is_told_so(tmp_path: Path) -> None:
    report = analysis_of(tmp_path, training_loop(8, log=True)).devices[0]
    assert [(f.kind, f.location) for f in report.findings] == [("item", "train.py(30): log")]
    assert analysis_of(tmp_path, training_loop(8, log=False)).devices[0].findings == []


def cpu_loop(steps: int, *, sync: str = "", late: float = 0.0) -> tuple[Host, Host]:
    """The overlap loop on the CPU device, with the annotations of Stretto: a host and a worker."""
    host, worker = Host(pid=1, tid=1), Host(pid=1, tid=2)
    done: list[float] = []
    for number in range(steps):
        with host.step(number):
            with host.within("user_annotation", "stretto.schedule"):
                host.work(100 + late, "engine/scheduler.py(12): schedule")
            with host.within("user_annotation", "stretto.launch"):
                host.now += 10
                worker.now = max(worker.now, host.now)
                with worker.within("user_annotation", f"stretto.work engine {number}"):
                    worker.now += 1000
                done.append(worker.now)
            if sync:
                with host.within("python_function", "engine/sampler.py(41): sample"):
                    host.now += 1
                    with host.within("user_annotation", f"stretto.sync {sync}"):
                        host.now = max(host.now, done[-1]) + 1
            if number:
                with host.within("user_annotation", "stretto.wait"):
                    host.now = max(host.now, done[-2]) + 1
                with host.within("user_annotation", "stretto.process"):
                    host.work(50, "engine/scheduler.py(80): process")
    return host, worker


def test_the_cpu_device_is_analysed_by_strettos_annotations(tmp_path: Path) -> None:
    good = analysis_of(tmp_path, *cpu_loop(12)).devices[0]
    assert good.findings == []
    assert good.window_ns is not None
    assert good.window_ns > 0.9 * good.step_ns
    lost = analysis_of(tmp_path, *cpu_loop(12, sync="truth-value")).devices[0]
    assert [(f.severity, f.kind, f.location) for f in lost.findings] == [
        ("lost", "truth-value", "engine/sampler.py(41): sample")
    ]
    late = analysis_of(tmp_path, *cpu_loop(12, late=2000)).devices[0]
    assert (late.findings[0].cause, late.findings[0].location) == (
        Cause.HOST_LATE,
        "engine/scheduler.py(12): schedule",
    )


def test_a_trace_of_one_thread_without_a_device_shows_where_python_took_the_time(tmp_path: Path) -> None:
    host = Host()
    for number in range(8):
        with (
            host.within("user_annotation", f"ProfilerStep#{number}"),
            host.within("python_function", "train.py(9): step"),
        ):
            for name in ("aten::mm", "aten::relu", "aten::mm"):
                with host.within("cpu_op", name):
                    host.now += 300
            host.work(400, "train.py(22): load_batch")
    report = analysis_of(tmp_path, host).devices[0]
    assert report.device == "cpu"
    assert (report.findings[0].cause, report.findings[0].location) == (Cause.HOST_LATE, "train.py(22): load_batch")
    assert report.idle_by_cause[Cause.HOST_LATE] == 7 * 400_000
