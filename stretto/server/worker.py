"""A front end process: uvicorn with the application, tied to the engine and to the parent. Never started by hand."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from stretto.interrupts import leave_signals_to_parent
from stretto.ipc.client import EngineClient
from stretto.ipc.control import (
    Beat,
    ControlLine,
    Drain,
    EngineGone,
    EngineInfo,
    EngineStuck,
    Failed,
    Serving,
    leave_when_closed,
)
from stretto.server.app import build_app
from stretto.server.frontend import Frontend
from stretto.server.http_protocol import limited_protocol
from stretto.server.settings import WorkerSettings, read_worker_settings
from stretto.tokenizer import Tokenizer

logger = logging.getLogger("stretto.server")

_BEAT_SECONDS = 1.0
_LAST_WORDS_SECONDS = 2.0
"""How long answers that end with an error have to reach their clients."""


def main() -> None:
    """`python -m stretto.server.worker DIRECTORY NUMBER REPLACES CONTROL_FD LIFE_FD SOCKET_FD`.

    REPLACES is 1 for a front end that joins a running server: it takes connections only once it can answer them.
    """
    directory, number = Path(sys.argv[1]), int(sys.argv[2])
    replaces = sys.argv[3] == "1"
    control_fd, life_fd, socket_fd = map(int, sys.argv[4:7])
    leave_when_closed(life_fd, directory)
    settings = read_worker_settings(directory)
    allow_open_files(settings.server.max_connections + 256)
    leave_signals_to_parent()
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    worker = Worker(settings, number, directory, ControlLine.from_fd(control_fd), socket.socket(fileno=socket_fd))
    uvloop.run(worker.run(wait_for_engine=replaces))


class Worker:
    """The life of one front end, from its start to its drain."""

    def __init__(
        self, settings: WorkerSettings, number: int, directory: Path, control: ControlLine, listener: socket.socket
    ) -> None:
        self._config = settings.server
        self._number = number
        self._directory = directory
        self._control = control
        self._listener = listener
        self._frontend = Frontend(settings.server, settings.model)
        self._engine: EngineClient | None = None
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = _Server(
            uvicorn.Config(
                build_app(self._frontend),
                http=limited_protocol(
                    self._config.max_header_bytes, self._config.max_connections, self._config.slow_client_timeout
                ),
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS) + 1,
            )
        )

    async def run(self, *, wait_for_engine: bool) -> None:
        """Serve until the parent says otherwise; before the engine is ready too, unless told to wait for it."""
        os.set_blocking(self._control.fileno(), False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._obey)
        self._spawn(self._beat())
        self._spawn(self._frontend.watch())
        self._spawn(self._say_serving())
        if wait_for_engine:
            await self._ready.wait()
        await self._server.serve(sockets=[self._listener])
        for task in list(self._tasks):
            task.cancel()
        if self._engine is not None:
            self._engine.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What runs beside the server must not fail unseen: without it the front end is no use."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a front end fails", exc_info=task.exception())
            os._exit(70)

    async def _say_serving(self) -> None:
        await self._ready.wait()
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._control.send(Serving())

    def _obey(self) -> None:
        for message in self._control.receive():
            if isinstance(message, EngineInfo):
                self._spawn(self._engine_ready(message))
            elif isinstance(message, EngineGone):
                self._spawn(self._fail())
            elif isinstance(message, Drain):
                self._spawn(self._drain(message.seconds))
        if self._control.closed:  # the parent is gone: the thread that watches for that cleans up and ends this process
            asyncio.get_running_loop().remove_reader(self._control.fileno())

    async def _engine_ready(self, info: EngineInfo) -> None:
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, info)
        except Exception as error:
            self._control.send(Failed(f"a front end cannot load the tokenizer: {error}", False))
            raise
        self._engine = EngineClient(self._number, self._directory, tokenizer, self._frontend.metrics.step)
        self._spawn(self._engine.run())
        await self._engine.ping(self._config.engine_timeout)
        self._frontend.engine_ready(info, self._engine, tokenizer)
        self._ready.set()

    async def _beat(self) -> None:
        """Tell the parent that this loop turns, and ask the engine the same."""
        asked = 0.0
        while True:
            self._control.send(Beat())
            engine = self._engine
            if engine is not None and engine.dead is None:
                if asked > engine.last_heard and time.monotonic() - asked > self._config.engine_timeout:
                    engine.fail("the engine does not answer")
                    self._control.send(EngineStuck())
                else:
                    if asked <= engine.last_heard:
                        asked = time.monotonic()
                    self._spawn(_ask(engine))
            await asyncio.sleep(_BEAT_SECONDS)

    async def _fail(self) -> None:
        """The engine is dead: open requests end with an error; then this process leaves."""
        if self._engine is not None:
            self._engine.fail("the engine has died")
        await self._finish(_LAST_WORDS_SECONDS)

    async def _drain(self, seconds: float) -> None:
        """No new requests; running ones may finish for a while, and then end with an error."""
        self._frontend.draining = True
        until = time.monotonic() + seconds
        while self._frontend.num_open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self._frontend.stop_open()
        await self._finish(_LAST_WORDS_SECONDS)

    async def _finish(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._frontend.num_open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self._server.should_exit = True


async def _ask(engine: EngineClient) -> None:
    await engine.ping(5.0)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def load_tokenizer(info: EngineInfo) -> Tokenizer | None:
    """The model's tokenizer, from the files that the engine found. Blocks. Raises ModelLoadError."""
    if info.tokenizer_kind is None:
        return None
    if info.tokenizer_kind == "gguf":
        from stretto.models.gguf_file import GGUFFile

        return Tokenizer.from_gguf(GGUFFile(Path(info.tokenizer_path)).metadata)
    return Tokenizer.from_directory(info.tokenizer_path)


class _Server(uvicorn.Server):
    """Signals are the parent's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


if __name__ == "__main__":
    main()
