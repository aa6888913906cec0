"""The process of a rank above 0. Started by the leader or by the first process of a further host, never by hand."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec

from stretto.config import EngineConfig
from stretto.distributed.children import STOPPED, RankSettings, Stopped
from stretto.distributed.follower import Follower, FollowingRuntime
from stretto.distributed.lend import EndOfProcess
from stretto.distributed.link import LONGEST_LINE
from stretto.distributed.patience import TICK_SECONDS
from stretto.errors import StrettoError
from stretto.interrupts import leave_signals_to_parent
from stretto.ipc.control import die_with_parent


def main(build: Callable[[EngineConfig, Follower], FollowingRuntime]) -> NoReturn:
    """`python -m stretto.distributed.rank_process FD`: a rank whose engine `build` makes. Ends the process."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    settings = _read_settings(parent)
    die_with_parent(settings.parent_pid)
    leave_signals_to_parent()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end = EndOfProcess(settings.place.rank, parent)
    follower = None
    try:
        follower = Follower(settings.engine, settings.place, parent, end, settings.parent_pid)
        follower.run(lambda member: build(settings.engine, member))
    except BaseException as error:
        if not isinstance(error, StrettoError):
            traceback.print_exc()
        reason = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
        if follower is not None:
            verdict = follower.watchdog.broken(reason)
            end(verdict, told=verdict != reason)
        end(reason, told=False)
    end("", told=True)
    raise AssertionError("the process goes on after its end")


def _build(config: EngineConfig, member: Follower) -> FollowingRuntime:
    # Only now: loading torch takes long, and versions and options are compared meanwhile.
    from stretto.runtime import Runtime

    return Runtime.assemble(config, None, member)


def _read_settings(line: socket.socket) -> RankSettings:
    data, parent = b"", Stopped(os.getppid())
    line.settimeout(TICK_SECONDS)
    while not data.endswith(b"\n"):
        try:
            more = line.recv(1 << 16)
        except TimeoutError:
            if parent.look():
                sys.stderr.write(f"stretto: a rank ends: the process that started it {STOPPED}\n")
                os._exit(1)
            continue
        if not more or len(data) > LONGEST_LINE:
            os._exit(1)  # who started this process is gone
        data += more
    line.settimeout(None)
    return msgspec.json.decode(data, type=RankSettings)


if __name__ == "__main__":
    main(_build)
