"""Reads exports of Nsight Systems (`nsys export --type sqlite`, `nsys profile --export sqlite`).

Owns the meaning of its tables. Every table but the strings may be missing: it exists only if it has rows.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.observe.trace.errors import TraceError
from stretto.observe.trace.model import DeviceKind, HostKind, SyncKind, Trace, TraceBuilder
from stretto.observe.trace.names import call_name
from stretto.observe.trace.nsight_chains import CallChains

_COPY_KINDS = {1: DeviceKind.COPY_TO_DEVICE, 2: DeviceKind.COPY_TO_HOST}
_COPY_NAMES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
_PUSH_POP, _START_END = 59, 60  # eventType of NVTX ranges
_CORRELATION_BITS = 40
_SYNC_KINDS = {int(kind): kind for kind in SyncKind}
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}


def read_nsight(path: Path) -> Trace:
    """Read an export. Raises TraceError for other databases, damage, and exports without CUDA or NVTX data."""
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise TraceError(f"{path} cannot be opened: {error}") from None
    try:
        return _Export(path, database).read()
    except sqlite3.Error as error:
        raise TraceError(f"{path} is damaged or cut short: {error}") from None
    finally:
        database.close()


class _Export:
    """One export: its tables, and the builder that they fill."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path, self._database = path, database
        self._builder = TraceBuilder(str(path), "Nsight Systems")
        tables = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables = {name for (name,) in tables}

    def read(self) -> Trace:
        if "StringIds" not in self._tables:
            raise TraceError(f"{self._path} is a database, but no export of Nsight Systems (it has no StringIds)")
        self._strings: dict[int, str] = dict(self._database.execute("SELECT id, value FROM StringIds"))
        self._chains = CallChains(self._rows, self._strings)
        self._read_names()
        self._read_calls("CUPTI_ACTIVITY_KIND_RUNTIME", HostKind.CALL)
        self._read_calls("OSRT_API", HostKind.SYSTEM_WAIT)
        self._read_annotations()
        self._read_kernels()
        self._read_copies()
        self._read_syncs()
        if not len(self._builder):
            raise TraceError(f"{self._path} holds no CUDA or NVTX events; profile with: nsys profile -t cuda,nvtx,osrt")
        return self._builder.finish()

    def _rows(self, table: str, columns: dict[str, str]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table; columns that this version of the export lacks get the value given for them."""
        if table not in self._tables:
            return iter(())
        have = {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        wanted = ", ".join(f'"{name}"' if name in have else f"{missing} AS {name}" for name, missing in columns.items())
        return iter(self._database.execute(f'SELECT {wanted} FROM "{table}"'))

    def _read_names(self) -> None:
        for identifier, name in self._rows("TARGET_INFO_GPU", {"id": "0", "name": "''"}):
            self._builder.device_names[str(identifier)] = str(name or "")
        for thread, name in self._rows("ThreadNames", {"globalTid": "NULL", "nameId": "NULL"}):
            if thread is not None and name in self._strings:
                self._builder.name_thread(_process(thread), _thread(thread), self._strings[name])

    def _read_calls(self, table: str, kind: HostKind) -> None:
        columns = {"start": "NULL", "end": "NULL", "globalTid": "0", "nameId": "NULL", "correlationId": "-1"}
        for start, end, thread, name, correlation, chain in self._rows(table, columns | {"callchainId": "NULL"}):
            if start is None:
                continue
            end, owner = start if end is None else end, self._thread_id(thread)
            for frame in self._chains.frames(chain):
                self._builder.add_host(start, end, self._builder.name_id(frame), owner, HostKind.PYTHON)
            self._builder.add_host(
                start,
                end,
                self._builder.name_id(call_name(self._strings.get(name, "?"))),
                owner,
                kind,
                _correlation(thread, correlation) if kind is HostKind.CALL else -1,
            )

    def _read_annotations(self) -> None:
        columns = {
            "start": "NULL",
            "end": "NULL",
            "eventType": "59",
            "text": "NULL",
            "textId": "NULL",
            "globalTid": "0",
        }
        for start, end, event, text, text_id, thread in self._rows("NVTX_EVENTS", columns):
            name = text if text is not None else self._strings.get(text_id)
            if name and start is not None and end is not None and event in (_PUSH_POP, _START_END):
                self._builder.add_host(
                    start, end, self._builder.name_id(name), self._thread_id(thread), HostKind.ANNOTATION
                )

    def _read_kernels(self) -> None:
        names = {"shortName": "NULL", "demangledName": "NULL"}
        for start, end, device, stream, correlation, process, short, long in self._rows(
            "CUPTI_ACTIVITY_KIND_KERNEL", _ACTIVITY | names
        ):
            name = self._strings.get(short) or self._strings.get(long) or "kernel"
            self._add(name, start, end, device, stream, correlation, process, DeviceKind.KERNEL)
        # With --cuda-graph-trace=graph a whole graph is one activity.
        for start, end, device, stream, correlation, process, graph in self._rows(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _ACTIVITY | {"graphId": "0"}
        ):
            self._add(f"CUDA graph {graph}", start, end, device, stream, correlation, process, DeviceKind.KERNEL)

    def _read_copies(self) -> None:
        memory = _MEMORY | {
            int(i): str(label) for i, label in self._rows("ENUM_CUDA_MEM_KIND", {"id": "0", "label": "''"})
        }
        kinds = {"bytes": "-1", "copyKind": "0", "srcKind": "NULL", "dstKind": "NULL"}
        for start, end, device, stream, correlation, process, size, copy, source, target in self._rows(
            "CUPTI_ACTIVITY_KIND_MEMCPY", _ACTIVITY | kinds
        ):
            ends = [memory.get(end_kind, "?") for end_kind in (source, target) if end_kind is not None]
            name = _COPY_NAMES.get(copy, "Memcpy") + (f" ({' -> '.join(ends)})" if ends else "")
            kind = _COPY_KINDS.get(copy, DeviceKind.COPY_ON_DEVICE)
            pageable = kind.is_copy and "Pageable" in ends
            self._add(name, start, end, device, stream, correlation, process, kind, size, pageable)
        for start, end, device, stream, correlation, process, size in self._rows(
            "CUPTI_ACTIVITY_KIND_MEMSET", _ACTIVITY | {"bytes": "-1"}
        ):
            self._add("Memset (Device)", start, end, device, stream, correlation, process, DeviceKind.SET, size)

    def _read_syncs(self) -> None:
        """What waits are for. Their calls are among the runtime calls, with the times."""
        recorded: dict[tuple[Any, ...], list[tuple[int, int]]] = {}  # event -> (correlation, stream), by correlation
        columns = {"deviceId": "0", "contextId": "0", "streamId": "-1", "correlationId": "-1", "globalPid": "0"}
        events = columns | {"eventId": "-1", "eventSyncId": "NULL"}
        for _, context, stream, correlation, process, event, sync in self._rows(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", events
        ):
            # An event may be recorded again and again; newer exports number the recordings.
            for key in ((process, context, event), *([(process, "sync", sync)] if sync else [])):
                recorded.setdefault(key, []).append((_correlation(process, correlation), stream))
        for found in recorded.values():
            found.sort()
        for device, context, stream, correlation, process, event, sync, kind in self._rows(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", events | {"syncType": "0"}
        ):
            if kind not in _SYNC_KINDS:
                continue
            number = _correlation(process, correlation)
            record, source = -1, stream
            if kind in (SyncKind.EVENT, SyncKind.STREAM_WAIT):
                known = recorded.get((process, "sync", sync)) or recorded.get((process, context, event), [])
                before = bisect_left(known, (number, -1))
                record, source = known[before - 1] if before else (-1, -1)
            waiter = stream if kind == SyncKind.STREAM_WAIT else None
            self._builder.add_sync(_SYNC_KINDS[kind], number, str(device), stream=source, waiter=waiter, record=record)

    def _add(
        self,
        name: str,
        start: int,
        end: int,
        device: int,
        stream: int,
        correlation: int,
        process: int,
        kind: DeviceKind,
        size: int = -1,
        pageable: bool = False,
    ) -> None:
        self._builder.add_device(
            start,
            end,
            self._builder.name_id(name),
            self._builder.lane_id(str(device), str(stream)),
            kind,
            _correlation(process, correlation),
            -1 if size is None else size,
            pageable,
        )

    def _thread_id(self, thread: int) -> int:
        return self._builder.thread_id(_process(thread), _thread(thread))


_ACTIVITY = {
    "start": "NULL",
    "end": "NULL",
    "deviceId": "0",
    "streamId": "0",
    "correlationId": "-1",
    "globalPid": "0",
}


def _process(identifier: int) -> str:
    """The process in a global thread or process id: bits 24 to 47."""
    return str((identifier >> 24) & 0xFFFFFF)


def _thread(identifier: int) -> str:
    """The thread in a global thread id: the low 24 bits."""
    return str(identifier & 0xFFFFFF)


def _correlation(identifier: int, correlation: int | None) -> int:
    """A correlation that is unique over the processes of an export: they count on their own."""
    if correlation is None or correlation < 0:
        return -1
    return (((identifier >> 24) & 0x3FFFFF) << _CORRELATION_BITS) | correlation
