"""Opens a trace file of whatever kind: tells kinds apart by content, never by the file's name."""

from __future__ import annotations

from pathlib import Path

from stretto.observe.trace.chrome import read_chrome
from stretto.observe.trace.errors import TraceError
from stretto.observe.trace.model import Trace
from stretto.observe.trace.nsight import read_nsight

_SQLITE = b"SQLite format 3\x00"


def read_trace(path: str | Path) -> Trace:
    """Read a PyTorch profiler trace (JSON, also compressed) or an Nsight Systems SQLite export.

    Raises TraceError for a file that is missing, empty, damaged, cut short or of another kind.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path} is a directory; name the trace files in it")
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise TraceError(f"{path} is empty")
    if head.startswith(b"\x1f\x8b"):
        return read_chrome(path, compressed=True)
    if head.startswith(_SQLITE):
        return read_nsight(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path} is a report of Nsight Systems; export it first: nsys export --type sqlite {path}")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return read_chrome(path, compressed=False)
    raise TraceError(
        f"{path} is neither a PyTorch profiler trace (.json, .json.gz) nor an Nsight Systems export (.sqlite)"
    )
