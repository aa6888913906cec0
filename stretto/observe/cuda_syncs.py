"""Hears of CUDA synchronisations without looking at every call: torch's sync debug mode, and `torch.cuda.synchronize`.

Both cost nothing while nobody synchronises. The debug mode reports reads of values, blocking copies and synchronised
streams as Python warnings, which this file takes out of the stream of warnings. It does not report uploads from
pageable memory with non_blocking=True; the modes in `host_reads.py` do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TextIO

import torch

_MESSAGE = "called a synchronizing CUDA operation"
_OFF, _WARN = 0, 1


class CudaSyncs:
    """Listens while installed. The debug mode is the process's, so it is on only between `begin` and `end`.

    Args:
        on_sync: called right after a synchronising call of the debug mode's kind, in the thread that made it.
        around_synchronize: called with `torch.cuda.synchronize` of this process and its arguments; must call it.
    """

    def __init__(self, on_sync: Callable[[], None], around_synchronize: Callable[[Callable[[], None]], None]) -> None:
        self._on_sync = on_sync
        self._around_synchronize = around_synchronize
        self._listens = False
        self._mode_before = _OFF
        self._show_before: Any = None
        self._synchronize_before: Any = None

    def install(self) -> None:
        """Start listening. Idempotent, and needed again and again: whoever leaves `warnings.catch_warnings` puts back
        what was there when they entered it. hot path
        """
        if self._synchronize_before is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first use warns that the mode is a prototype
                mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode(_WARN)
                torch.cuda.set_sync_debug_mode(mode)
            self._synchronize_before, torch.cuda.synchronize = torch.cuda.synchronize, self._synchronize
        if warnings.showwarning != self._show and not self._is_shown():
            warnings.filterwarnings("always", message=_MESSAGE)
            self._show_before, warnings.showwarning = warnings.showwarning, self._show

    def uninstall(self) -> None:
        """Stop listening and put everything back. Idempotent."""
        if warnings.showwarning == self._show:
            warnings.showwarning = self._show_before
        if self._synchronize_before is not None and torch.cuda.synchronize == self._synchronize:
            torch.cuda.synchronize = self._synchronize_before
            self._synchronize_before = None
        self._listens = False

    def _is_shown(self) -> bool:
        """Whether one of several listeners hands warnings on to this one."""
        shown: Any = warnings.showwarning
        while isinstance(listener := getattr(shown, "__self__", None), CudaSyncs):
            if listener is self:
                return True
            shown = listener._show_before
        return False

    def begin(self) -> None:
        """Synchronising calls count from here. hot path"""
        self._listens, self._mode_before = True, torch._C._cuda_get_sync_debug_mode()
        torch._C._cuda_set_sync_debug_mode(_WARN)

    def end(self) -> None:
        """They count no more. hot path"""
        self._listens = False
        torch._C._cuda_set_sync_debug_mode(self._mode_before)

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._pass_on(False, message, category, filename, lineno, file, line)

    def _pass_on(self, heard: bool, message: Warning | str, *rest: Any) -> None:
        """Hand a warning to whoever was there before; what a listener has heard of ends at the last listener."""
        if _MESSAGE in str(message) and self._listens:
            self._on_sync()
            heard = True
        before = self._show_before
        other = getattr(before, "__self__", None)
        if isinstance(other, CudaSyncs):
            other._pass_on(heard, message, *rest)
        elif before is not None and not heard:
            before(message, *rest)

    def _synchronize(self, device: Any = None) -> None:
        self._around_synchronize(lambda: self._synchronize_before(device))
