"""A failure of work on a device, kept until the host asks, and how to name work in messages."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial

from stretto.device.base import DeviceFault


class Fault:
    """The first failure of a device's work; makes a fresh exception for every place that has to hear of it."""

    def __init__(self, device: str, stream: str, work: Callable[..., None], cause: BaseException) -> None:
        self.cause = cause
        _forget_locals(cause)
        self.text = (
            f"work {work_name(work)!r} on stream {stream!r} of the {device} device failed: "
            f"{''.join(traceback.format_exception_only(cause)).strip()}; the device takes no more work"
        )

    def error(self) -> DeviceFault:
        """A new error with the work's own exception as its cause (the same object raised twice grows its traceback)."""
        error = DeviceFault(self.text)
        error.__cause__ = self.cause
        return error


def _forget_locals(error: BaseException) -> None:
    """The error lives as long as its device: its lines may stay, what their variables hold (tensors, ports) not."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def work_name(work: Callable[..., None]) -> str:
    """What to call a piece of work in messages: its function's qualified name."""
    while isinstance(work, partial):
        work = work.func
    return getattr(work, "__qualname__", None) or type(work).__qualname__
