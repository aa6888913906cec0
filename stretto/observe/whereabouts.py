"""Where in its code a thread of this process is: for whoever has to say what a loop that does not come back is at."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parents[1]
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
        is_own = file.startswith(str(_PACKAGE))
        if is_own or (not calls and not file.startswith("<")):  # imports pass through files of no name
            calls.append(_told(frame, _PACKAGE.parent if is_own else Path(file).parents[1]))
        num_own += is_own
        frame = frame.f_back
    return " in ".join(calls)


def _told(frame: FrameType, root: Path) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).relative_to(root)}:{frame.f_lineno})"
