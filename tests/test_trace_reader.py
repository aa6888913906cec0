"""Trace files are read whatever wrote them; what is no whole trace is refused with a reason."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.observe.trace import TraceError, analyze, read_trace
from stretto.observe.trace.json_split import Truncated, pieces, split_head
from stretto.observe.trace.model import HostKind
from tests.helpers.traces import Host, document, overlap_loop, write, write_nsight

_VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def reader(data: bytes, size: int) -> Any:
    """A `read` that returns `size` bytes at a time."""
    at = 0

    def read(_: int) -> bytes:
        nonlocal at
        part, at = data[at : at + size], at + size
        return part

    return read


def split(data: bytes, size: int) -> list[Any]:
    read = reader(data, size)
    head, first = split_head(read)
    return [event for piece in pieces(first, read, bare=not head) for event in json.loads(piece)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=6), _VALUES, max_size=4), max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_any_list_of_events_is_cut_between_events_wherever_the_reads_end(
    events: list[Any], size: int, bare: bool, indent: int | None
) -> None:
    data = json.dumps(events if bare else {"a": {"b": "]"}, "traceEvents": events, "z": [1]}, indent=indent).encode()
    assert split(data, size) == events


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_list_of_events_that_is_cut_short_is_noticed(data: st.DataObject) -> None:
    text = json.dumps({"traceEvents": [{"name": 'a"]}\\', "args": {"x": [1, 2]}}, {"name": "b"}]}).encode()
    begin = text.index(b"[") + 1
    cut = data.draw(st.integers(begin, len(text) - 3))
    with pytest.raises(Truncated):
        split(text[:cut], 7)


def test_an_unclosed_bare_list_is_whole_as_the_format_allows() -> None:
    assert split(b'[{"a": 1},\n{"b": 2},\n', 5) == [{"a": 1}, {"b": 2}]


def test_compressed_and_plain_files_read_alike_under_any_name(tmp_path: Path) -> None:
    host = overlap_loop(3)
    plain = read_trace(write(tmp_path / "trace.txt", host))
    packed = tmp_path / "trace.json"
    packed.write_bytes(gzip.compress((tmp_path / "trace.txt").read_bytes()))
    other = read_trace(packed)
    assert plain.names == other.names
    assert plain.host.start.tolist() == other.host.start.tolist()
    assert plain.device_names == {"0": "NVIDIA H200"}


def test_times_are_kept_to_the_nanosecond_and_counted_from_the_first_event(tmp_path: Path) -> None:
    host = Host(now=5_125_965_254_485.687)
    host.work(1.25, "a.py(1): f")
    host.launch(2.5)
    trace = read_trace(write(tmp_path / "t.json", host))
    assert trace.host.start[0] == 0
    assert abs(int(trace.host.end[0]) - 1250) <= 1
    assert abs(int(trace.device.end[0] - trace.device.start[0]) - 2500) <= 1


def test_begin_and_end_events_are_paired(tmp_path: Path) -> None:
    event = {"cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        event | {"ph": "B", "name": "outer", "ts": 1},
        event | {"ph": "B", "name": "inner", "ts": 2},
        event | {"ph": "E", "ts": 3},
        event | {"ph": "E", "ts": 5},
        event | {"ph": "B", "name": "open", "ts": 6},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    trace = read_trace(path)
    spans = zip(trace.host.name.tolist(), (trace.host.end - trace.host.start).tolist(), strict=True)
    assert {trace.names[name]: length for name, length in spans} == {"outer": 4000, "inner": 1000}
    assert "1 events without" in trace.warnings[0]


def test_times_as_text_old_categories_and_odd_arguments_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::add", "ts": "10", "dur": "5", "pid": 1, "tid": "2", "args": {}},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "ts": 11, "dur": 1, "pid": 1, "tid": "2"}
        | {"args": {"correlation": "7"}},
        {"ph": "X", "cat": "Kernel", "name": "add", "ts": 14, "dur": 2, "pid": 0, "tid": "stream 7"}
        | {"args": {"correlation": 7, "stream": "7", "device": 0}},
        {"ph": "X", "cat": "cpu_op", "name": "broken", "ts": None, "dur": 1, "pid": 1, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "list", "ts": 1e30, "dur": 1, "pid": 1, "tid": 1, "args": []},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert [int(trace.host.kind[i]) for i in range(2)] == [HostKind.OPERATOR, HostKind.CALL]
    assert trace.lanes[0].stream == "7"
    assert trace.host.correlation.tolist() == [-1, 7]
    assert len(trace.device) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02\x03", "neither a PyTorch profiler trace"),
        (b"hello", "neither a PyTorch profiler trace"),
        (b"{}", 'no "traceEvents"'),
        (b'{"traceEvents": {"a": 1}}', "is not a list"),
        (b'{"traceEvents": []}', "holds no events"),
        (b"[1, 2, 3]", "its list holds int"),
        (b'{"traceEvents": [{"ph": "X", "name": }]}', "is damaged after event 0"),
        (b'{"traceEvents": [{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 1}]}', "none of a profiler"),
        (b'{"schemaVersion": 1, "deviceProp', "is cut short"),
        (b'{"traceEvents": [{"ph": "X"', "is cut short"),
        (gzip.compress(b'{"traceEvents": []}' * 50, mtime=0)[:40], "is cut short"),
        (b"\x1f\x8b\x08\x00" + b"x" * 60, "is damaged"),
    ],
)
def test_files_that_are_no_whole_trace_are_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert reason in str(error.value)
    assert str(path) in str(error.value)


def test_paths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "none.json")
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"anything")
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        read_trace(report)


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    host = Host()
    host.work(5, "a.py(1): f")
    with pytest.raises(TraceError, match="holds no work"):
        analyze(write(tmp_path / "t.json", host))


def test_an_export_of_nsight_systems_reads_as_the_same_trace(tmp_path: Path) -> None:
    host = overlap_loop(4, bug="pageable@stage", stacks=False)
    chrome = read_trace(write(tmp_path / "t.json", host))
    nsight = read_trace(write_nsight(tmp_path / "t.sqlite", host))
    assert nsight.device.start.tolist() == chrome.device.start.tolist()
    assert nsight.device.pageable.tolist() == chrome.device.pageable.tolist()
    assert nsight.device.kind.tolist() == chrome.device.kind.tolist()
    assert nsight.device_names == chrome.device_names
    calls = [nsight.names[i] for i in nsight.host.name.tolist() if nsight.names[i].startswith("cuda")]
    assert "cudaGraphLaunch" in calls


def test_databases_that_are_no_export_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE t (x)")
    database.commit()
    database.close()
    with pytest.raises(TraceError, match="no export of Nsight Systems"):
        read_trace(other)
    whole = write_nsight(tmp_path / "t.sqlite", overlap_loop(40))
    whole.write_bytes(whole.read_bytes()[:20_000])
    with pytest.raises(TraceError, match="is damaged or cut short"):
        read_trace(whole)
    empty = write_nsight(tmp_path / "empty.sqlite")
    with pytest.raises(TraceError, match="holds no CUDA or NVTX events"):
        read_trace(empty)


def test_the_document_of_the_helper_is_what_a_profiler_writes() -> None:
    keys = document(overlap_loop(1)).keys()
    assert {"schemaVersion", "deviceProperties", "traceEvents", "traceName"} <= keys
