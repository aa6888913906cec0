"""Which transport: by name, by topology, or by the address that a leader gave. Owns the names and nothing else."""

from __future__ import annotations

import importlib
import os
from typing import Any

from stretto.distributed.transport.base import FollowerTransport, LeaderTransport, Limits

NAMES = ("shared_memory", "zeromq", "gloo")
_SCHEMES = {"shm": "shared_memory", "zmq+ipc": "zeromq", "zmq+tcp": "zeromq", "gloo": "gloo"}
MOST_RANKS = 1024


def choose(name: str, single_host: bool) -> str:
    """The transport's name: `auto` is shared memory on one host (Linux), else ZeroMQ (docs/control-plane.md).

    Raises ValueError for an unknown name, or for shared memory between hosts.
    """
    if name == "auto":
        return "shared_memory" if single_host and hasattr(os, "memfd_create") else "zeromq"
    if name not in NAMES:
        raise ValueError(f"no control-plane transport is called {name!r}; choose one of: auto, {', '.join(NAMES)}")
    if name == "shared_memory" and not single_host:
        raise ValueError("the shared_memory transport reaches one host only; between hosts choose zeromq or gloo")
    return name


def listen(name: str, size: int, host: str | None = None, limits: Limits | None = None) -> LeaderTransport:
    """Rank 0's end of the transport `name` (as `choose` returns it) for `size` ranks, the leader included.

    `host` is the leader's own address that followers on other hosts can reach: it listens there and nowhere else. None:
    only this host can connect. Does not wait for anyone. Raises ValueError, or ConnectFailed if it cannot listen.
    """
    if name not in NAMES:
        raise ValueError(f"no control-plane transport is called {name!r}; choose one of: {', '.join(NAMES)}")
    if not 2 <= size <= MOST_RANKS:
        raise ValueError(f"a control plane for {size} ranks; it takes 2 to {MOST_RANKS}")
    if name == "shared_memory" and host is not None:
        raise ValueError("the shared_memory transport reaches one host only; it takes no host to listen on")
    leader: LeaderTransport = _module(name).listen(size, host, limits or Limits())
    return leader


def connect(
    address: str, rank: int, size: int, timeout_s: float, limits: Limits | None = None, host: str | None = None
) -> FollowerTransport:
    """The end of rank `rank` of `size`, connected to the leader's `address`. Blocks for at most `timeout_s`.

    `host`: this rank's own address that the other ranks can reach; only Gloo needs it, and only between hosts.
    Raises ValueError for a bad address or rank, ConnectFailed if the leader does not answer or refuses.
    """
    scheme, colon, _ = address.partition(":")
    if scheme not in _SCHEMES or not colon:
        raise ValueError(
            f"not the address of a control plane: {address!r}; it begins with one of: {', '.join(_SCHEMES)}"
        )
    if not 1 <= rank < size <= MOST_RANKS:
        raise ValueError(
            f"rank {rank} of {size}: a follower's rank is between 1 and size - 1, size at most {MOST_RANKS}"
        )
    follower: FollowerTransport = _module(_SCHEMES[scheme]).connect(
        address, rank, size, timeout_s, limits or Limits(), host
    )
    return follower


def _module(name: str) -> Any:
    """Imported when used: Gloo's needs torch, which takes seconds."""
    return importlib.import_module(f"stretto.distributed.transport.{name}")
