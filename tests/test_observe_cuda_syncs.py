"""Listening to CUDA's sync debug mode, where the mode is acted: warnings, nesting, and putting everything back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stretto.observe.cuda_syncs import CudaSyncs

WORDS = "called a synchronizing CUDA operation"


class Mode:
    """The debug mode of the process, and a call that synchronises."""

    def __init__(self) -> None:
        self.mode = 0
        self.waits = 0

    def set(self, mode: int) -> None:
        self.mode = mode

    def sync(self) -> None:
        """What torch does in `.item()`: it warns each time, and Python decides what becomes of it."""
        if self.mode == 1:
            warnings.warn(WORDS, UserWarning, stacklevel=2)

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mode]:
    acted = Mode()
    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", acted.set, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: acted.mode, raising=False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: acted.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", acted.set)
    monkeypatch.setattr(torch.cuda, "synchronize", acted.synchronize)
    shown = warnings.showwarning
    yield acted
    assert warnings.showwarning == shown  # everything is put back


class Listener:
    def __init__(self) -> None:
        self.heard = 0
        self.around = 0
        self.syncs = CudaSyncs(self._hear, self._wait)

    def _hear(self) -> None:
        self.heard += 1

    def _wait(self, run: Callable[[], None]) -> None:
        self.around += 1
        run()

    def watch(self, work: Callable[[], None]) -> None:
        self.syncs.install()
        self.syncs.begin()
        work()
        self.syncs.end()


def test_each_sync_is_heard_while_it_listens_and_no_warning_is_left(mode: Mode) -> None:
    listener = Listener()
    with warnings.catch_warnings(record=True) as left:
        for _ in range(3):
            listener.watch(lambda: (mode.sync(), mode.sync()))  # type: ignore[arg-type]
        mode.sync()
        listener.syncs.uninstall()
    assert listener.heard == 6
    assert left == []


def test_other_warnings_go_where_they_went(mode: Mode) -> None:
    listener = Listener()
    with warnings.catch_warnings(record=True) as left:
        listener.watch(lambda: warnings.warn("something else", UserWarning, stacklevel=2))
        listener.syncs.uninstall()
    assert [str(one.message) for one in left] == ["something else"]
    assert listener.heard == 0


def test_who_leaves_catch_warnings_does_not_make_it_deaf(mode: Mode) -> None:
    listener = Listener()
    with warnings.catch_warnings():
        listener.watch(mode.sync)
    listener.watch(mode.sync)  # what was installed inside is gone
    with warnings.catch_warnings():
        listener.watch(mode.sync)
    listener.watch(mode.sync)
    listener.syncs.uninstall()
    assert listener.heard == 4


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_two_listen_at_once(mode: Mode, first_to_leave: int) -> None:
    outer, inner = Listener(), Listener()
    before = warnings.showwarning

    def both() -> None:
        for _ in range(3):
            inner.watch(mode.sync)
        mode.sync()  # the inner one gave the mode back as it was

    with warnings.catch_warnings(record=True) as left:
        outer.watch(both)
        outer.watch(mode.sync)
        leaving = [outer, inner]
        leaving.pop(first_to_leave).syncs.uninstall()
        leaving.pop().syncs.uninstall()
    assert (outer.heard, inner.heard) == (5, 3)
    assert left == []
    assert mode.mode == 0
    warnings.showwarning = before


def test_one_that_does_not_listen_lets_nothing_out_that_another_has_heard(mode: Mode) -> None:
    idle, listener = Listener(), Listener()
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as left:
        idle.syncs.install()  # and never leaves
        listener.watch(mode.sync)
        listener.syncs.uninstall()
    assert (idle.heard, listener.heard) == (0, 1)
    assert left == []
    idle.syncs.uninstall()
    warnings.showwarning = before


def test_a_mode_that_the_program_set_is_given_back(mode: Mode) -> None:
    listener = Listener()
    mode.set(2)
    listener.watch(lambda: None)
    listener.syncs.uninstall()
    assert mode.mode == 2


def test_synchronising_the_device_is_heard_of_and_happens(mode: Mode) -> None:
    listener = Listener()
    listener.watch(torch.cuda.synchronize)
    listener.syncs.install()
    torch.cuda.synchronize()
    listener.syncs.uninstall()
    torch.cuda.synchronize()
    assert (listener.around, mode.waits) == (1, 3)
