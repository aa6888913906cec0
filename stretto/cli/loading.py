"""Shows what happens while a model is fetched and loaded. Standard error only."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class LoadProgress:
    """Told `(what, fraction)`: a line for each new `what`, and a bar on a terminal, a line each quarter elsewhere."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._task: Any = None
        self._what = ""
        self._quarter = 0

    def __call__(self, what: str, fraction: float) -> None:
        """`fraction` of `what` is done, 0 to 1."""
        if self._bars is not None:
            self._show(what, fraction)
        else:
            self._print(what, fraction)

    def _show(self, what: str, fraction: float) -> None:
        if what != self._what:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._bars.console.print(f"stretto: {what}", style="dim", markup=False, highlight=False)
            self._task, self._what = self._bars.add_task(what, total=1.0), what
        self._bars.update(self._task, completed=fraction)

    def _print(self, what: str, fraction: float) -> None:
        quarter = int(fraction * 4)
        if what != self._what:
            self._what, self._quarter = what, 0
            print(f"stretto: {what}", file=sys.stderr, flush=True)
        elif quarter > self._quarter and fraction < 1:
            self._quarter = quarter
            print(f"stretto: {what}: {25 * quarter} %", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn

            columns = (SpinnerColumn(), BarColumn(), TaskProgressColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
