"""What a forked child of a rank's process must not do: talk on the rank's connections, or take them down.

A fork copies every object and none of the threads. Whatever then runs at the child's exit, or at a collection in it,
still reaches the parent's sockets; so objects that hold some are told of the fork. And what must not be destroyed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable


def tell_forked_children(forget: Callable[[], None]) -> None:
    """Call the bound method `forget` in each child that this process forks, first of all, while its object lives.

    Keeps no reference to the object, but a few bytes for good: the interpreter cannot be told to stop. Programs that
    are started (`subprocess`) are not concerned.
    """
    method = weakref.WeakMethod(forget)

    def tell() -> None:
        if (alive := method()) is not None:
            alive()

    os.register_at_fork(after_in_child=tell)


def keep_for_good(owner: object) -> None:
    """Never let `owner` be destroyed in this process, nor what it holds, not even when the interpreter ends.

    Destructors of torch's groups wait, holding the GIL, for calls that other ranks may never take part in. In a forked
    child those of groups and stores wait for threads that only the parent has, and take its sockets out of the parent's
    epoll set.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def let_go(owner: object) -> None:
    """Take back one `keep_for_good`: it can be destroyed without waiting for anybody."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(owner))
