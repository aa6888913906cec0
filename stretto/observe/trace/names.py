"""The words that profilers and Stretto use, and what they mean: runtime calls, operators, annotations, Python frames.

Owns no state; every function answers about one name.

Annotations of Stretto that the analysis understands (recorded with `torch.profiler.record_function` or NVTX):

    stretto.step N       one turn of the loop: what schedules and launches step N
    stretto.receive      taking messages                stretto.schedule   choosing the batch, staging the plan
    stretto.launch       enqueueing the step            stretto.process    using the results of an earlier step
    stretto.wait         the planned wait for a step's copy-done event
    stretto.sync KIND    the host waits for the device outside the planned wait; KIND is one of the kinds in
                         `kinds.py`, e.g. `item` or `pageable-upload`. ` at FILE:LINE FUNCTION` may follow: the place
    stretto.synced at FILE:LINE FUNCTION   a moment: there the host has just waited for the device
    stretto.work STREAM N   on the CPU device's thread: work of step N (N may be left out) on a stream
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

STEP, WAIT, LAUNCH = "stretto.step", "stretto.wait", "stretto.launch"
SYNC, SYNCED, WORK = "stretto.sync ", "stretto.synced ", "stretto.work "
PHASES = ("stretto.receive", "stretto.schedule", "stretto.launch", "stretto.process")

_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"\d+")
_FRAME = re.compile(r"^(?P<file>.*)\((?P<line>\d+|\?)\): (?P<function>.+)$")
_PLACE = re.compile(r" at (?P<file>.+):(?P<line>\d+) (?P<function>.+)$")
_NATIVE = re.compile(r"^(?P<symbol>.+) \[(?P<module>[^\[\]]+)\]$")
_OTHERS_LIBRARY = re.compile(
    r"^(libtorch|libc10|libpython|python|libcu|libnv|libnccl|_C\.|libshm|libgomp|libaoti|libtriton)"
)
_SYNCHRONIZE = re.compile(r"^(cuda|hip|cu|musa|acl|aclrt|xpu)(Stream|Device|Event|Ctx|Context|Thread)Synchronize")
_BLOCKING_COPY = re.compile(r"^(cuda|hip|cu)Mem(cpy|set)(?!.*Async)")
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
_ALLOCATION = re.compile(
    r"^(cuda|hip|cu)(Malloc|MallocHost|MallocManaged|HostAlloc|Free|FreeHost|HostRegister|HostUnregister|HostMalloc"
    r"|HostFree|MemAlloc\w*|MemFree\w*|MemHostAlloc|MemHostRegister|ModuleLoad\w*|LibraryLoad\w*|GraphInstantiate\w*)$"
)
_GRAPH = re.compile(r"^(cuda|hip|cu)GraphLaunch")
_INSTRUMENT = re.compile(
    r"(^|/)stretto/observe/(annotations|cuda_syncs|host_reads|sync_findings|sync_guard|watched_stream)\.py$"
)
_BUILTIN_WAIT = re.compile(
    r"<built-in (method|function) (acquire of _thread\.(lock|RLock)|get of _queue\.SimpleQueue|sleep|poll|select"
    r"|recv\w*|accept|read|wait\w*|join\w*)\b"
)
_SYSTEM_WAIT = re.compile(
    r"^(poll|ppoll|epoll_wait|epoll_pwait|select|pselect|sem_wait|sem_timedwait|sem_clockwait|pthread_cond_\w*wait|futex"
    r"|nanosleep|clock_nanosleep|usleep|sleep|recv\w*|read|accept4?|waitpid|pthread_join|pthread_mutex_lock)$"
)


def tidy(name: str) -> str:
    """A name without what differs from call to call: addresses of objects, versions of driver entry points."""
    return _ADDRESS.sub("", name) if " at 0x" in name else name


@lru_cache(maxsize=4096)
def call_name(name: str) -> str:
    """The runtime call without its version suffix."""
    return _VERSION.sub("", name)


def is_synchronize(name: str) -> bool:
    """A call whose purpose is to wait for the device."""
    return bool(_SYNCHRONIZE.match(call_name(name)))


def waits_for(name: str) -> str:
    """What a synchronising call waits for: "stream", "device" or "event"."""
    match = _SYNCHRONIZE.match(call_name(name))
    what = match.group(2).lower() if match else "stream"
    return what if what in ("stream", "event") else "device"


def is_blocking_copy(name: str) -> bool:
    """A copy that returns when it is done."""
    return bool(_BLOCKING_COPY.match(call_name(name)))


def is_copy(name: str) -> bool:
    """Any copy call."""
    return bool(_COPY.match(call_name(name)))


def is_allocation(name: str) -> bool:
    """Memory or module management, which may wait for the device."""
    return bool(_ALLOCATION.match(call_name(name)))


def is_graph_launch(name: str) -> bool:
    """The launch of a whole graph."""
    return bool(_GRAPH.match(call_name(name)))


def is_wait(name: str) -> bool:
    """A Python or system call in which a thread waits for something that is not the device."""
    return bool(_BUILTIN_WAIT.match(name) or _SYSTEM_WAIT.match(name))


def frame(name: str) -> tuple[str, int, str] | None:
    """(file, line, function) of a Python frame, line 0 if it is not known; None for other names."""
    match = _FRAME.match(name)
    return (match["file"], int(match["line"].replace("?", "0")), match["function"]) if match else None


def sync_kind(name: str) -> str:
    """The KIND of a `stretto.sync` annotation."""
    return (name.removeprefix(SYNC).split() or ["sync"])[0]


def place(name: str) -> tuple[str, int, str] | None:
    """(file, line, function) at the end of an annotation of a sync; None for other names."""
    match = _PLACE.search(name) if name.startswith((SYNC, SYNCED)) else None
    return (match["file"], int(match["line"]), match["function"]) if match else None


@lru_cache(maxsize=65536)
def is_user_frame(name: str) -> bool:
    """A frame of somebody's own code: not torch's, not the standard library's."""
    parts = frame(name)
    if parts is None:
        native = _NATIVE.match(name)  # of a call chain of Nsight Systems
        return native is not None and not _OTHERS_LIBRARY.match(native["module"])
    file = parts[0].replace("\\", "/")
    if file.startswith(("<", "torch/", "nn.Module")) or "/torch/" in file:
        return False
    if parts[2] in ("__torch_function__", "__torch_dispatch__") or _INSTRUMENT.search(file):
        return False  # it stands between a program's line and torch: whatever the line is, it is not here
    top = file.split("/")[0]
    if "/lib/python3" in file and "-packages/" not in file:
        return False
    return (top[:-3] if top.endswith(".py") else top) not in sys.stdlib_module_names


def family(name: str) -> str:
    """A name with its numbers taken out: `ProfilerStep#12` and `ProfilerStep#13` are one family."""
    return _NUMBER.sub("#", name)


def number(name: str) -> int | None:
    """The last number in a name."""
    found = _NUMBER.findall(name)
    return int(found[-1]) if found else None
