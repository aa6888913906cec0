"""Starting ranks on this host: the neighbours of the leader, or all ranks of a further host.

Owns the processes of a further host until the leader ends; those of the leader's host are the watch's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from stretto.config import EngineConfig
from stretto.distributed.children import (
    RANK_MODULE,
    Child,
    RankSettings,
    end_children,
    threads_of_rank,
)
from stretto.distributed.patience import GRACE_SECONDS, TICK_SECONDS
from stretto.distributed.place import Place
from stretto.errors import EngineBroken

logger = logging.getLogger("stretto.ranks")


def start_ranks(config: EngineConfig, places: Sequence[Place], module: str = RANK_MODULE) -> list[Child]:
    """A process for each place. They end with the calling thread, at the latest. Raises OSError; then none is left.

    `module` is what runs as a rank.
    """
    level = logging.getLevelName(logging.getLogger("stretto").getEffectiveLevel())
    children: list[Child] = []
    try:
        for place in places:
            environment = dict(os.environ)
            environment.setdefault("OMP_NUM_THREADS", str(threads_of_rank(config, place)))
            children.append(Child(RankSettings(config, place, os.getpid(), level), environment, module))
    except BaseException:
        end_children(children, 0.0)
        raise
    return children


def host_ranks(config: EngineConfig, first: Place) -> None:
    """Run all ranks of a further host until the leader stops. Blocks; returns after an orderly end.

    Raises EngineBroken, with the message that the ranks ended with.
    """
    children = start_ranks(config, [first, *first.neighbours()])
    try:
        running = list(children)
        while running:
            for child in list(running):
                trouble = child.trouble()
                if child.process.poll() == 0:
                    running.remove(child)
                elif trouble is not None:
                    raise EngineBroken(_cause(child, trouble, children))
            time.sleep(TICK_SECONDS / 4)
    finally:
        end_children(children, 0.0)


def _cause(child: Child, trouble: str, children: Sequence[Child]) -> str:
    """Why the ranks of this host end: what one of them was told or found, else what became of `child`."""
    if child.process.poll() is None:
        child.kill()  # it is stopped, and says nothing; the leader sees its connection end, and ends the others
        return f"rank {child.place.rank} (pid {child.pid}) {trouble}"
    until = time.monotonic() + GRACE_SECONDS + 2.0
    for other in (child, *children):
        has_ended = other.process.poll() is not None or (other is not child and other.wait(until))
        if has_ended and other.process.returncode and (words := other.last_words()):
            return words
    return f"rank {child.place.rank} (pid {child.pid}) {trouble}"
