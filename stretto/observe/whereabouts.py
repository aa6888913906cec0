"""Where in its code a thread of this process is: for whoever has to say what a loop that does not come back is at."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
_MOST_OWN = 3


def whereabouts(thread: int) -> str:
    """The innermost call of the thread of this ident, and the innermost of Stretto's around it, as `f (file:line)`.

    Empty if there is no such thread. Any thread; never blocks.
    """
    frame = sys._current_frames().get(thread)
    calls: list[str] = []
    num_own = 0
    while frame is not None and num_own < _MOST_OWN:
        file = frame.f_code.co_filename
        is_own = file.startswith(_PACKAGE + os.sep)
        if is_own or (not calls and not file.startswith("<frozen ")):  # as imports are
            calls.append(_told(frame, is_own))
        num_own += is_own
        frame = frame.f_back
    return " in ".join(calls)


def _told(frame: FrameType, is_own: bool) -> str:
    file = frame.f_code.co_filename
    if is_own:
        file = os.path.relpath(file, os.path.dirname(_PACKAGE))
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
