"""The control plane's transports: rank 0 broadcasts the raw bytes of each turn to all other ranks, on the host only.

    leader = listen(choose("auto", single_host=True), size=2)      # rank 0; pass leader.address to the others
    leader.wait_for_followers(timeout_s=60)
    leader.publish(b"turn 0")

    follower = connect(address, rank=1, size=2, timeout_s=60)      # ranks 1 to size - 1
    data = follower.receive(timeout_s=1.0)

Importing this package needs no torch; only the Gloo transport does, when it is used.
"""

from stretto.distributed.transport.base import (
    ConnectFailed,
    FollowerBehind,
    FollowerTransport,
    LeaderTransport,
    Limits,
    PeerGone,
    TransportError,
)
from stretto.distributed.transport.choice import NAMES, choose, connect, listen

__all__ = [
    "NAMES",
    "ConnectFailed",
    "FollowerBehind",
    "FollowerTransport",
    "LeaderTransport",
    "Limits",
    "PeerGone",
    "TransportError",
    "choose",
    "connect",
    "listen",
]
