"""A rank without an engine: meets, agrees, does turns and ends as a real one does, but loads no torch.

It lingers in what `tokenizer` of its options names: `loading` (before its sizes are told), or `shutdown`.
"""

from __future__ import annotations

import time
from pathlib import Path

from stretto.config import EngineConfig
from stretto.distributed.follower import Follower
from stretto.distributed.link import Beat
from stretto.distributed.rank_process import main
from stretto.errors import EngineBroken

LONG = 60.0


class FakeRuntime:
    """Its only turn is the last one: it comes when a file appears beside the model."""

    def __init__(self, config: EngineConfig, member: Follower) -> None:
        self._lingers_in = config.tokenizer
        self._last_turn = Path(config.model) / "last-turn"
        watchdog = member.watchdog
        watchdog.agree("hello", {})
        watchdog.enter("loading")
        if config.tokenizer == f"broken {member.place.rank}":
            raise EngineBroken("out of memory, let us say")
        if config.tokenizer == "loading":
            time.sleep(LONG)
        watchdog.agree("sizes", {"num_pages": "7"})

    def follow(self) -> int:
        until = time.monotonic() + LONG
        while not self._last_turn.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return 1

    def beat(self, phase: str) -> Beat:
        return Beat(phase, "receive", 3)

    def close(self) -> None:
        if self._lingers_in == "shutdown":
            time.sleep(LONG)


if __name__ == "__main__":
    main(FakeRuntime)
