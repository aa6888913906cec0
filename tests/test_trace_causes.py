"""Every gap has the cause that was built into it: each cause alone, and all mixed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from stretto.observe.trace import Cause, DeviceReport, Severity, analyze
from tests.helpers.traces import PROCESS, SAMPLE, Host, overlap_loop, write, write_nsight


def report_of(path: Path, *hosts: Host, step: str | None = None) -> DeviceReport:
    return analyze(write(path / "trace.json", *hosts), step_pattern=step).devices[0]


def share(report: DeviceReport, cause: Cause) -> float:
    """Of the idle time."""
    return report.idle_by_cause.get(cause, 0) / max(1, sum(report.idle_by_cause.values()))


def hidden(report: DeviceReport) -> list[tuple[str, str, str]]:
    return [(f.severity or "", f.kind, f.location) for f in report.findings if f.is_hidden_sync]


def test_a_loop_that_overlaps_has_nothing_to_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, overlap_loop())
    assert report.findings == []
    assert report.busy_ns == report.length_ns
    assert {one.severity for one in report.blocking} == {Severity.PLANNED, Severity.OUTSIDE}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("annotate", [True, False])
def test_the_first_case_is_found_lost_and_located(tmp_path: Path, graph: bool, annotate: bool) -> None:
    report = report_of(tmp_path, overlap_loop(bug="sync@sample", graph=graph, annotate=annotate))
    assert hidden(report) == [("lost", "truth-value", SAMPLE)]
    assert report.findings[0].count == 20
    assert share(report, Cause.SYNC) > 0.9
    assert "aten::is_nonzero" in report.findings[0].stack
    assert "torch.where" in report.findings[0].remedy


@pytest.mark.parametrize("annotate", [True, False])
def test_the_second_case_is_found_shortened_and_located(tmp_path: Path, annotate: bool) -> None:
    report = report_of(tmp_path, overlap_loop(bug="pageable@stage", annotate=annotate))
    assert hidden(report) == [("shortened", "pageable-upload", "engine/staging.py(9): stage")]
    assert report.pageable_copies == 20
    assert report.pageable_bytes == 20 << 20
    assert "pinned" in report.findings[0].remedy


def test_the_second_case_costs_only_what_it_delays(tmp_path: Path) -> None:
    quick = {"forward": 300.0, "schedule": 60.0, "process": 30.0}
    good = report_of(tmp_path, overlap_loop(**quick))
    bad = report_of(tmp_path, overlap_loop(**quick, bug="pageable@stage"))
    assert bad.overlap.window_ns[3] < good.overlap.window_ns[3]
    assert bad.window_ns is not None
    assert bad.window_ns > 0


def test_both_cases_at_once_are_told_apart(tmp_path: Path) -> None:
    host = overlap_loop(10, bug="sync@sample")
    overlap_loop(10, bug="pageable@stage", host=host)
    assert {(severity, kind) for severity, kind, _ in hidden(report_of(tmp_path, host))} == {
        ("lost", "truth-value"),
        ("lost", "device-sync"),  # between the two loops
        ("shortened", "pageable-upload"),
    }


@pytest.mark.parametrize(
    ("operators", "frames", "kind"),
    [
        (("aten::is_nonzero", "aten::item"), (), "truth-value"),
        (("aten::item", "aten::_local_scalar_dense"), (), "item"),
        (("aten::nonzero",), (), "nonzero"),
        (("aten::index", "aten::nonzero"), (), "nonzero"),
        (("aten::masked_select",), (), "nonzero"),
        (("aten::equal",), (), "compare"),
        (("aten::repeat_interleave",), (), "repeat-interleave"),
        (("aten::to", "aten::_to_copy", "aten::copy_"), (), "to-host"),
        (("aten::copy_",), ("<built-in method tolist of Tensor object at 0x7f00aa>",), "tolist"),
        (("aten::copy_",), ("<built-in method cpu of Tensor object at 0x7f00aa>",), "to-host"),
    ],
)
def test_each_way_to_read_the_device_is_named(
    tmp_path: Path, operators: tuple[str, ...], frames: tuple[str, ...], kind: str
) -> None:
    host = Host()
    for _ in range(5):
        host.launch(500)
        with host.within("python_function", "mine.py(3): sample", *frames):
            host.item(*operators)
        host.work(50, "mine.py(9): after")
    assert hidden(report_of(tmp_path, host)) == [("lost", kind, "mine.py(3): sample")]


@pytest.mark.parametrize(
    ("call", "kind"), [("cudaStreamSynchronize", "stream-sync"), ("cudaDeviceSynchronize", "device-sync")]
)
def test_explicit_syncs_that_drain_the_device_are_lost(tmp_path: Path, call: str, kind: str) -> None:
    host = Host()
    for _ in range(5):
        with host.within("python_function", "mine.py(3): loop"):
            host.wait(host.launch(500), call)
            host.work(200, "mine.py(7): other")
    report = report_of(tmp_path, host)
    assert hidden(report) == [("lost", kind, "mine.py(3): loop")]
    assert share(report, Cause.SYNC) > 0.9


def test_a_wait_with_more_work_queued_is_harmless(tmp_path: Path) -> None:
    host = Host()
    previous = 0.0
    for _ in range(10):
        done = host.launch(500)
        host.wait(previous, "cudaEventSynchronize")
        host.work(100, "mine.py(7): process")
        previous = done
    report = report_of(tmp_path, host)
    assert report.findings == []
    assert {one.severity for one in report.blocking[1:-1]} == {Severity.OVERLAPPED}


def test_waiting_for_the_step_just_launched_is_no_overlap(tmp_path: Path) -> None:
    report = report_of(tmp_path, overlap_loop(depth=0))
    assert hidden(report) == []
    assert report.findings[0].cause is Cause.PLANNED_WAIT
    assert share(report, Cause.PLANNED_WAIT) > 0.9
    assert "depth" in report.findings[0].remedy


def test_a_late_host_is_named_by_the_frame_that_took_the_time(tmp_path: Path) -> None:
    report = report_of(tmp_path, overlap_loop(forward=300, process=700, schedule=50))
    assert report.findings[0].cause is Cause.HOST_LATE
    assert report.findings[0].location == PROCESS
    assert hidden(report) == []


def test_without_stacks_the_annotation_tells_where_the_host_was(tmp_path: Path) -> None:
    report = report_of(tmp_path, overlap_loop(forward=300, process=700, stacks=False))
    assert report.findings[0].cause is Cause.HOST_LATE
    assert report.findings[0].location == "stretto.step"
    bare = report_of(tmp_path, overlap_loop(forward=300, process=700, stacks=False, annotate=False))
    assert (bare.findings[0].cause, bare.findings[0].location) == (Cause.HOST_LATE, "")


def test_waiting_for_another_thread_is_not_the_hosts_own_work(tmp_path: Path) -> None:
    host = Host()
    for _ in range(6):
        host.launch(100)
        host.work(800, "mine.py(4): receive", "<built-in method acquire of _thread.lock object at 0x7f1>")
    report = report_of(tmp_path, host)
    assert report.findings[0].cause is Cause.HOST_WAITING
    assert report.findings[0].location == "mine.py(4): receive"


def test_kernels_shorter_than_their_launches_are_launch_bound(tmp_path: Path) -> None:
    host = Host()
    for _ in range(20):
        for i in range(30):
            with host.within("cpu_op", f"aten::op{i}"):
                host.now += 10
                host.launch(3, f"kernel{i}")
    report = report_of(tmp_path, host)
    assert [finding.cause for finding in report.findings] == [Cause.LAUNCH_BOUND]
    assert "CUDA graph" in report.findings[0].remedy
    assert report.queue is not None
    assert report.queue.empty_share > 0.9


def test_a_copy_before_the_kernels_that_need_it_is_exposed(tmp_path: Path) -> None:
    host = Host()
    for _ in range(10):
        host.copy("HtoD (Pinned -> Device)", 400, size=1 << 20)
        host.launch(500)
    report = report_of(tmp_path, host)
    assert report.findings[0].cause is Cause.COPY
    assert report.idle_by_cause[Cause.COPY] == 10 * 400_000
    assert report.compute_ns == 10 * 500_000
    assert hidden(report) == []


def test_a_copy_beside_kernels_is_not(tmp_path: Path) -> None:
    host = Host()
    for _ in range(10):
        host.launch(500)
        host.copy("HtoD (Pinned -> Device)", 400, stream=20, size=1 << 20)
    report = report_of(tmp_path, host)
    assert report.findings == []
    assert report.several_streams_share > 0.7


def test_memory_management_that_stops_the_host_is_named(tmp_path: Path) -> None:
    host = Host()
    for _ in range(8):
        host.launch(200)
        with host.within("python_function", "mine.py(6): grow"):
            host.span("cuda_runtime", "cudaMalloc", host.now, host.now + 900)
            host.now += 900
    report = report_of(tmp_path, host)
    assert hidden(report) == [("shortened", "allocation", "mine.py(6): grow")]
    assert share(report, Cause.ALLOCATION) > 0.9


def test_a_pause_of_queued_work_is_the_devices_own(tmp_path: Path) -> None:
    host = Host()
    for _ in range(10):
        host.launch(100)
        host.streams[7] += 50  # waits for something that the trace does not show
    report = report_of(tmp_path, host)
    assert [finding.cause for finding in report.findings] == [Cause.DEVICE]


def test_work_whose_launch_was_not_recorded_is_said_to_be_so(tmp_path: Path) -> None:
    host = overlap_loop(6, bug="sync@sample")
    host.events = [event for event in host.events if event["cat"] != "cuda_runtime"]
    report = report_of(tmp_path, host)
    assert set(report.idle_by_cause) <= {Cause.UNKNOWN, Cause.DEVICE, Cause.COPY}
    assert report.idle_by_cause[Cause.UNKNOWN] > 0


def test_all_causes_in_one_trace_are_told_apart(tmp_path: Path) -> None:
    host = Host()
    for _ in range(10):
        with host.within("python_function", "mine.py(1): loop"):
            host.launch(400, "a")
            host.item("aten::item")  # drains
            host.work(300, "mine.py(5): think")  # its own gap: shorter than the wait
            host.launch(300, "b")
            host.work(900, "mine.py(8): slow")  # late: the wait before it accounts for 404 us only
            host.copy("HtoD (Pinned -> Device)", 250, size=1 << 20)
            host.launch(100, "c")
    report = report_of(tmp_path, host)
    assert {Cause.SYNC, Cause.HOST_LATE, Cause.COPY} <= set(report.idle_by_cause)
    assert ("lost", "item", "mine.py(1): loop") in hidden(report)
    assert report.idle_by_cause[Cause.COPY] == 10 * (250_000 + 1_000)  # the upload, and the copy of the item
    late = next(finding for finding in report.findings if finding.cause is Cause.HOST_LATE)
    assert late.location == "mine.py(8): slow"


def test_an_export_of_nsight_systems_gives_the_same_causes(tmp_path: Path) -> None:
    host = overlap_loop(bug="sync@sample", stacks=False)
    chrome = report_of(tmp_path, host)
    nsight = analyze(write_nsight(tmp_path / "t.sqlite", host)).devices[0]
    assert nsight.idle_by_cause == chrome.idle_by_cause
    assert hidden(nsight) == [("lost", "to-host", "stretto.step")]
    assert nsight.steps.method == chrome.steps.method


SYNC_CHAIN = [
    ("cudaStreamSynchronize", "/usr/lib/libcudart.so.12"),
    ("0x7f0012", "[unknown]"),
    ("at::native::_local_scalar_dense_cuda(at::Tensor const&)", "/venv/torch/lib/libtorch_cuda.so"),
    ("torch::autograd::THPVariable_bool_scalar(_object*, _object*)", "/venv/torch/lib/libtorch_python.so"),
    ("_PyEval_EvalFrameDefault", "/usr/bin/python3.11"),
]


@pytest.mark.parametrize(
    ("callers", "location"),
    [
        ([("sample", "/srv/engine/sampler.py"), ("run", "/srv/engine/loop.py")], "/srv/engine/sampler.py(?): sample"),
        (
            [("Engine::sample(Batch&)", "/srv/bin/my_server"), ("main", "/srv/bin/my_server")],
            "Engine::sample(Batch&) [my_server]",
        ),
        ([], "stretto.step"),
    ],
)
def test_a_call_chain_of_an_export_names_who_called(
    tmp_path: Path, callers: list[tuple[str, str]], location: str
) -> None:
    host = overlap_loop(bug="sync@sample", stacks=False)
    chains = {"cudaStreamSynchronize": SYNC_CHAIN + callers}
    report = analyze(write_nsight(tmp_path / "t.sqlite", host, chains=chains)).devices[0]
    assert hidden(report) == [("lost", "truth-value", location)]
    assert report.findings[0].stack[:2] == (
        "cudaStreamSynchronize",
        "at::native::_local_scalar_dense_cuda(at::Tensor const&) [libtorch_cuda.so]",
    )


def test_gaps_and_work_together_are_the_whole_time(tmp_path: Path) -> None:
    for bug in ("", "sync@sample", "pageable@stage"):
        report = report_of(tmp_path, overlap_loop(bug=bug, forward=400))
        lost = sum(report.idle_by_cause.values())
        assert abs(report.compute_ns + lost - report.length_ns) <= 0.001 * report.length_ns
        ends = [(gap.start, gap.end) for gap in report.gaps if gap.cause is not Cause.COPY]
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
