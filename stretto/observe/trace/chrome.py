"""Reads traces of the PyTorch profiler: Trace Event Format JSON, any version since the profiler's first.

Owns the meaning of the categories and of the arguments. Streams: memory is that of the columns, not of the text.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, Any

import msgspec

from stretto.observe.trace.errors import TraceError
from stretto.observe.trace.json_split import NotAnEventList, Truncated, pieces, split_head
from stretto.observe.trace.model import DeviceKind, HostKind, SyncKind, Trace, TraceBuilder
from stretto.observe.trace.names import tidy

_HOST_KINDS = {
    "cpu_op": HostKind.OPERATOR,
    "operator": HostKind.OPERATOR,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "cuda_runtime": HostKind.CALL,
    "cuda_driver": HostKind.CALL,
    "hip_runtime": HostKind.CALL,
    "hip_driver": HostKind.CALL,
    "runtime": HostKind.CALL,
    "xpu_runtime": HostKind.CALL,
    "privateuse1_runtime": HostKind.CALL,
    "privateuse1_driver": HostKind.CALL,
}
_DEVICE_CATEGORIES = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel", "privateuse1_kernel"}
)
_SYNC_KINDS = {
    "Event Sync": SyncKind.EVENT,
    "Stream Wait Event": SyncKind.STREAM_WAIT,
    "Stream Sync": SyncKind.STREAM,
    "Context Sync": SyncKind.CONTEXT,
}
"""Of the category `cuda_sync`, which Kineto writes with `enable_cuda_sync_events`."""


class _Arguments(msgspec.Struct, gc=False):
    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    name: Any = None
    wait_on_stream: Any = None
    wait_on_cuda_event_record_corr_id: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: _Arguments | None = None


def read_chrome(path: Path, *, compressed: bool) -> Trace:
    """Read a profiler's JSON. Raises TraceError for damage, truncation, and JSON of other programs."""
    with path.open("rb") as file:
        text: IO[bytes] = gzip.GzipFile(fileobj=file) if compressed else file  # type: ignore[assignment]
        try:
            return _read(path, text)
        except (EOFError, Truncated) as error:
            raise TraceError(f"{path} is cut short ({error}); record it again, or copy it again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path} is damaged: {error}") from None
        except NotAnEventList as error:
            raise TraceError(
                f"{path} is no profiler trace: {error}; give a PyTorch profiler trace (.json or .json.gz) or an Nsight "
                "Systems export (.sqlite)"
            ) from None


def _read(path: Path, text: IO[bytes]) -> Trace:
    head, first = split_head(text.read)
    builder = TraceBuilder(str(path), "PyTorch profiler")
    _read_head(builder, head)
    reader = _EventReader(builder)
    decoder = msgspec.json.Decoder(list[_Event])
    seen = 0
    for piece in pieces(first, text.read, bare=not head):
        try:
            events = decoder.decode(piece)
        except msgspec.ValidationError:
            events = _loosely(piece, path)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path} is damaged after event {seen}: {error}") from None
        seen += len(events)
        reader.take(events)
    reader.close()
    if not seen:
        raise TraceError(f"{path} holds no events; was the profiler stopped before anything ran?")
    if not len(builder):
        raise TraceError(
            f"{path} holds {seen} events, but none of a profiler of PyTorch: no operators, runtime calls or kernels"
        )
    return builder.finish()


def _loosely(piece: bytes, path: Path) -> list[_Event]:
    """The events of a piece in which some have unusual types; those are dropped."""
    events = []
    for raw in msgspec.json.decode(piece):
        try:
            events.append(msgspec.convert(raw, _Event))
        except msgspec.ValidationError:
            if not isinstance(raw, dict):
                raise TraceError(f"{path} is no profiler trace: its list holds {type(raw).__name__}s") from None
    return events


def _read_head(builder: TraceBuilder, head: bytes) -> None:
    """Names of devices and the rank, where the head tells them."""
    try:
        fields = msgspec.json.decode(head) if head else {}
    except msgspec.DecodeError:
        return
    for device in fields.get("deviceProperties") or []:
        if isinstance(device, dict) and "id" in device:
            builder.device_names[str(device["id"])] = str(device.get("name", ""))
    information = fields.get("distributedInfo")
    if isinstance(information, dict) and isinstance(information.get("rank"), int):
        builder.rank = information["rank"]


class _EventReader:
    """Sorts events into a builder; pairs the begin and end events that other tools write."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._open: dict[tuple[Any, Any], list[_Event]] = {}
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._unfinished = 0

    def take(self, events: list[_Event]) -> None:
        for event in events:
            phase = event.ph
            if phase == "X":
                self._complete(event, event.dur)
            elif phase == "B":
                self._open.setdefault((event.pid, event.tid), []).append(event)
            elif phase == "E":
                begun = self._open.get((event.pid, event.tid))
                start, end = (_number(begun[-1].ts), _number(event.ts)) if begun else (None, None)
                if begun and start is not None and end is not None:
                    self._complete(begun.pop(), end - start)
            elif phase == "M":
                self._metadata(event)

    def close(self) -> None:
        """Say what was dropped."""
        self._unfinished += sum(len(events) for events in self._open.values())
        if self._unfinished:
            self._builder.warnings.append(f"{self._unfinished} events without time, duration or end were left out")

    def _complete(self, event: _Event, duration: Any) -> None:
        kind = _HOST_KINDS.get(event.cat)
        if kind is None:
            category = event.cat.lower() if isinstance(event.cat, str) else ""
            kind = _HOST_KINDS.get(category)
            if kind is None and category not in _DEVICE_CATEGORIES:
                if category == "cuda_sync":
                    self._sync(event)
                return
        start = event.ts if type(event.ts) is float else _number(event.ts)
        length = duration if type(duration) is float else _number(duration)
        if start is None or length is None or not isinstance(event.name, str):
            self._unfinished += 1
            return
        start_ns = round(start * 1000)
        end_ns = start_ns + max(0, round(length * 1000))
        name = self._names.get(event.name)
        if name is None:
            name = self._names[event.name] = self._builder.name_id(tidy(event.name))
        arguments = event.args
        correlation = -1
        if arguments is not None and arguments.correlation is not None:
            correlation = _whole(arguments.correlation)
        if kind is None:
            self._activity(event, start_ns, end_ns, name, correlation)
            return
        key = (event.pid, event.tid)
        thread = self._threads.get(key)
        if thread is None:
            thread = self._threads[key] = self._builder.thread_id(str(event.pid), str(event.tid))
        self._builder.add_host(start_ns, end_ns, name, thread, kind, correlation)

    def _activity(self, event: _Event, start: int, end: int, name: int, correlation: int) -> None:
        arguments = event.args or _Arguments()
        device = event.pid if arguments.device is None else arguments.device
        stream = event.tid if arguments.stream is None else arguments.stream
        lane = self._lanes.get((device, stream))
        if lane is None:
            text = str(stream).removeprefix("stream ")
            lane = self._lanes[device, stream] = self._builder.lane_id(str(device), text)
        size = -1 if arguments.bytes is None else _whole(arguments.bytes)
        kind = activity_kind(event.cat.lower(), event.name)
        pageable = kind.is_copy and "pageable" in event.name.lower()
        self._builder.add_device(start, end, name, lane, kind, correlation, size, pageable)

    def _sync(self, event: _Event) -> None:
        """What a wait is for. Its call is there a second time, as a runtime call with the times."""
        kind, arguments = _SYNC_KINDS.get(str(event.name)), event.args
        if kind is None or arguments is None:
            return
        stream = None if arguments.stream is None else _whole(arguments.stream)
        source = None if arguments.wait_on_stream is None else _whole(arguments.wait_on_stream)
        record = arguments.wait_on_cuda_event_record_corr_id
        self._builder.add_sync(
            kind,
            _whole(arguments.correlation),
            str(event.pid if arguments.device is None else arguments.device),
            stream=stream if kind is SyncKind.STREAM else source,
            waiter=stream if kind is SyncKind.STREAM_WAIT else None,
            record=-1 if record is None else _whole(record),
        )

    def _metadata(self, event: _Event) -> None:
        name = event.args.name if event.args is not None else None
        if not isinstance(name, str) or not name:
            return
        if event.name == "thread_name":
            self._builder.name_thread(str(event.pid), str(event.tid), name)
        elif event.name == "process_name":
            self._builder.name_process(str(event.pid), name)


def activity_kind(category: str, name: str) -> DeviceKind:
    """What an activity is, by its category and, for copies, its name."""
    if "memset" in category:
        return DeviceKind.SET
    if "memcpy" not in category:
        return DeviceKind.KERNEL
    text = name.lower().replace(" ", "")
    if "htod" in text or "hosttodevice" in text:
        return DeviceKind.COPY_TO_DEVICE
    if "dtoh" in text or "devicetohost" in text:
        return DeviceKind.COPY_TO_HOST
    return DeviceKind.COPY_ON_DEVICE


def _number(value: Any) -> float | None:
    """A number given as such or as text; None for anything else, NaN and infinities too."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < 1e18 else None


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
