"""profile(): records a program that uses Stretto with torch.profiler and writes a trace that can be analysed.

Owns what is recorded: all threads, Python stacks, CUDA if there is any, and there what each wait is for; steps and
phases name themselves (`annotations.py`), and requests become spans of their own here.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from stretto.errors import InvalidRequest
from stretto.observe.annotations import REQUEST

_SUFFIXES = (".json", ".json.gz")
_MARK = re.compile(rf"{re.escape(REQUEST)} (\d+) (arrives|ends): (.*)")


@contextmanager
def profile(path: str | Path, *, stacks: bool = True) -> Iterator[None]:
    """Record everything in the block and write a chrome trace to `path` (.json or .json.gz) at its end.

    The trace has the steps and phases of every engine that runs in the block, its requests, all operators and kernels,
    and with `stacks` the Python frames, by which `stretto trace analyze` names lines. Recording costs time: some
    microseconds for each operator and frame. Also written if the block raises. Raises InvalidRequest (suffix).
    """
    target = Path(path)
    if not target.name.endswith(_SUFFIXES):
        raise InvalidRequest(f"the trace is to be written to {target}; allowed suffixes: {', '.join(_SUFFIXES)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recorder = torch.profiler.profile(
        activities=activities,
        with_stack=stacks,
        # An engine's work may run in a thread of its own; what a wait was for, only the driver knows.
        experimental_config=torch._C._profiler._ExperimentalConfig(
            profile_all_threads=True, enable_cuda_sync_events=torch.cuda.is_available()
        ),
    )
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
        with tempfile.TemporaryDirectory() as directory:
            raw = Path(directory) / "trace.json"
            recorder.export_chrome_trace(str(raw))
            document = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        document["traceEvents"] += request_spans(document["traceEvents"])
        text = json.dumps(document).encode()
        target.write_bytes(gzip.compress(text, 5) if target.name.endswith(".gz") else text)


def request_spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans from the arrival of each request to its end, as asynchronous events, from the marks among `events`."""
    begun: dict[str, dict[str, Any]] = {}
    spans = []
    for event in sorted(
        (event for event in events if str(event.get("name", "")).startswith(REQUEST)), key=lambda event: event["ts"]
    ):
        found = _MARK.fullmatch(event["name"])
        if found is None:
            continue
        if found[2] == "arrives":
            begun[found[1]] = event
        elif found[1] in begun:
            arrival = begun.pop(found[1])
            common = {"cat": REQUEST, "id": int(found[1]), "pid": event["pid"], "tid": event["tid"]}
            name = f"request {found[1]}: {_MARK.fullmatch(arrival['name'])[3]}"  # type: ignore[index]
            spans.append({"ph": "b", "name": name, "ts": arrival["ts"], **common})
            spans.append({"ph": "e", "name": name, "ts": event["ts"], "args": {"finish_reason": found[3]}, **common})
    return spans
