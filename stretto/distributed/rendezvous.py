"""How ranks find each other: the leader listens where all can come, the others connect there.

Owns the leader's address, and the store in which the tensor group's library finds its peers. Says nothing about who
may stay; that is watch.py's.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from stretto.distributed.place import Place
from stretto.errors import EngineBroken, InvalidRequest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
_STORE_SECONDS = 30.0
_NAME_SECONDS = 30.0
"""How long a name may be unknown: it is a slip of the pen, or a name server that starts as well."""


def open_listener(place: Place) -> socket.socket:
    """The leader's listening socket, at the one address that was agreed on. Raises InvalidRequest: why it cannot be."""
    if place.address is None:
        return _listen(LOOPBACK, 0)
    if not place.launched or not _torchrun_has_store():
        return _listen(*place.address)
    listener = _listen(place.address[0], 0)
    host, port = listener.getsockname()[:2]
    _torchrun_store(place.address).set(_torchrun_key(), f"{host} {port}")
    return listener


def connect_to_leader(place: Place, seconds: float, waiting: Callable[[str], None] = lambda why: None) -> socket.socket:
    """A connection to the leader, which may come later than this rank. Blocks for at most `seconds`.

    `waiting` is told between two attempts why the last one failed. Raises EngineBroken; for a name that nobody knows
    sooner.
    """
    assert place.address is not None
    address = place.address
    if place.launched and _torchrun_has_store():
        store = _torchrun_store(address, seconds)
        host, _, port = store.get(_torchrun_key()).decode().rpartition(" ")
        address = (host, int(port))
    began = time.monotonic()
    while True:
        try:
            return socket.create_connection(address, _ATTEMPT_SECONDS)
        except OSError as error:
            why = str(error)
            patience = min(seconds, _NAME_SECONDS) if isinstance(error, socket.gaierror) else seconds
            if time.monotonic() - began > patience:
                raise EngineBroken(
                    f"rank {place.rank} found no leader at {_text(address)} within {patience:g} s ({why}): is rank 0 "
                    "running, and can this host reach it?"
                ) from error
        waiting(why)
        time.sleep(_PAUSE_SECONDS)


def open_store(host: str) -> tuple[TCPStore, str]:
    """A store that lives with this object, on `host` and a free port; and its address for `join_store`.

    It listens on that address alone, where torch by itself would listen on all.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = _listen(host, 0)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=_STORE_SECONDS)
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timeout
    )
    return store, f"{host} {port}"


def join_store(address: str) -> TCPStore:
    """A client of the store at this address."""
    from torch._C._distributed_c10d import TCPStore

    host, _, port = address.rpartition(" ")
    timeout = timedelta(seconds=_STORE_SECONDS)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _listen(host: str, port: int) -> socket.socket:
    where = _text((host, port))
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidRequest(f"dist_init_addr: the ranks cannot meet at {where}: no such host ({error})") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = {
            errno.EADDRINUSE: "the port is taken; another engine may run there: give another port",
            errno.EADDRNOTAVAIL: "that is no address of this host, which leads (node_rank 0): give one that is",
            errno.EACCES: "ports below 1024 are not for everybody: give a higher one",
        }.get(error.errno or 0, str(error.strerror))
        raise InvalidRequest(f"dist_init_addr: the ranks cannot meet at {where}: {why}") from error
    return listener


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _torchrun_has_store() -> bool:
    """Whether MASTER_PORT is a store of torchrun's own, and not a free port for rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _torchrun_store(address: tuple[str, int], seconds: float = _STORE_SECONDS) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _torchrun_key() -> str:
    """Where the leader leaves its address; another one after each restart of all ranks."""
    return f"stretto/leader/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
