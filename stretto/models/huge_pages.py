"""Huge pages under a model's weights on a CPU: fewer address translations, and reads that run on past 4 KB.

Owns which memory is meant: what loading has mapped, however the packers allocated it. Linux only, and only where the
administrator lets programs ask for huge pages; elsewhere nothing happens. Reading all weights once, as each decode
step does, then takes up to a third less time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

Area = tuple[int, int]
"""Addresses [begin, end)."""

HUGE = 2 << 20
_SMALLEST_AREA = 4 << 20
_AT_ONCE = 32 << 20
"""Bytes of one call: short, so that a process that ends need not wait."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SMAPS = Path("/proc/self/smaps")


def anonymous_areas(smaps: str | None = None) -> list[Area]:
    """The process's large private anonymous memory of which at least half is resident (so no thread's stack).

    `smaps`: text in the format of /proc/self/smaps, instead of that file; without either, nothing.
    """
    if smaps is None:
        try:
            smaps = _SMAPS.read_text()
        except OSError:
            return []
    areas: list[Area] = []
    begin = end = 0
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(address, 16) for address in words[0].split("-"))
            name = " ".join(words[5:])
            if words[1] != "rw-p" or not (name in ("", "[heap]") or name.startswith("[anon")):
                begin = end
        elif words[0] == "Rss:" and end - begin >= _SMALLEST_AREA and int(words[1]) * 1024 * 2 >= end - begin:
            areas.append((begin, end))
    return areas


def without(areas: Iterable[Area], taken: Sequence[Area]) -> list[Area]:
    """The parts of `areas` that lie in none of `taken`; both in order of addresses."""
    left: list[Area] = []
    for begin, end in areas:
        for taken_begin, taken_end in taken:
            if taken_end <= begin or taken_begin >= end:
                continue
            if taken_begin > begin:
                left.append((begin, taken_begin))
            begin = min(end, taken_end)
        if begin < end:
            left.append((begin, end))
    return left


def whole_pages(area: Area) -> Area:
    """The huge pages that lie in an area; may be empty."""
    return -(-area[0] // HUGE) * HUGE, area[1] // HUGE * HUGE


def back_with_huge_pages(before: Sequence[Area]) -> threading.Thread | None:
    """Move what was mapped since `before` (from `anonymous_areas`) to huge pages, on a thread of its own.

    Contents and addresses stay, and whoever reads them meanwhile goes on. Returns the thread; None: nothing to do.
    """
    try:
        if "[never]" in _SETTING.read_text():
            return None
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    areas = [whole_pages(area) for area in without(anonymous_areas(), before)]
    areas = [(begin, end) for begin, end in areas if end - begin >= HUGE]
    if not areas:
        return None

    def work() -> None:
        for begin, end in areas:
            # The kernel's own thread does in minutes what the second call, of Linux 6.1 on, does at once.
            madvise(begin, end - begin, _MADV_HUGEPAGE)
            for at in range(begin, end, _AT_ONCE):
                madvise(at, min(_AT_ONCE, end - at), _MADV_COLLAPSE)
        logger.debug("asked for huge pages under %d MB", sum(end - begin for begin, end in areas) >> 20)

    thread = threading.Thread(target=work, name="stretto-huge-pages", daemon=True)
    thread.start()
    return thread
