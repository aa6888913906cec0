"""Supervisor: the parent process. Starts engine and front ends, watches them, and ends them in order.

Owns the listening socket, the private directory, and the exit code. Knows nothing about requests.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from stretto.config import EngineConfig
from stretto.distributed.children import STOPPED_SECONDS, is_stopped
from stretto.distributed.place import place_of
from stretto.errors import StrettoError
from stretto.interrupts import starting_children
from stretto.ipc.control import (
    Beat,
    Control,
    ControlLine,
    Drain,
    EngineGone,
    EngineInfo,
    EngineStuck,
    Failed,
    Progress,
    Serving,
    Stop,
    WorkerGone,
)
from stretto.ipc.settings import EngineSettings, write_settings
from stretto.ipc.sockets import make_private_directory
from stretto.server.settings import ServerConfig, WorkerSettings

logger = logging.getLogger("stretto.server")

FAILED = 1
BAD_INPUT = 2
_MAX_RESTARTS = 5
"""Front ends that may be replaced within `_RESTART_WINDOW` seconds; more is no accident."""
_RESTART_WINDOW = 60.0
_STUCK_WORKER_SECONDS = 60.0
_STOP_SECONDS = 10.0
"""How long a child may take to leave when it has nothing to do any more."""


@dataclass(eq=False)
class _Child:
    """A process, and the line to it."""

    process: subprocess.Popen[bytes]
    control: ControlLine
    number: int
    """0 for the engine; front ends count from 1 and never reuse a number."""
    life: int
    """Closes with this process: the child's sign that its parent is gone."""
    last_beat: float = field(default_factory=time.monotonic)
    serving: bool = False


class Supervisor:
    """One server: `run` starts it and returns its exit code."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        *,
        engine_module: str = "stretto.ipc.engine_process",
        on_progress: Callable[[str, float], None] = lambda what, fraction: None,
        on_ready: Callable[[EngineInfo, str], None] = lambda info, url: None,
    ) -> None:
        """`engine_module` is what runs as the engine; `on_ready` is told the URL."""
        self._engine_config = engine
        self._config = server
        self._engine_module = engine_module
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._engine: _Child | None = None
        self._workers: list[_Child] = []
        self._listener: socket.socket | None = None
        self._directory = Path()
        self._info: EngineInfo | None = None
        self._num_workers = 0
        self._restarts: list[float] = []
        self._signals = 0
        self._draining_until: float | None = None
        self._failing_until: float | None = None
        self._told_ready = False
        self._engine_runs = time.monotonic()
        self._exit_code = 0
        self.error: str | None = None
        """Why it failed, for the operator."""

    def run(self) -> int:
        """Serve until stopped: 0 after a drain, 1 after a failure, 2 for bad options. Main thread only.

        On a further host of a tensor-parallel engine there is nothing to serve but the leader: until that one stops.
        """
        if not place_of(self._engine_config).leads:
            return self._serve_leader()
        self._listener = self._listen()
        self._directory = make_private_directory()
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        self._selector.register(wake, selectors.EVENT_READ)
        os.set_blocking(wake, False)
        handlers = {sig: signal.signal(sig, self._signalled) for sig in (signal.SIGTERM, signal.SIGINT)}
        old_wake = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            self._write_settings()
            self._engine = self._spawn([self._engine_module, str(self._directory)], 0)
            for _ in range(self._config.api_workers):
                self._start_worker()
            while self._turn(wake):
                pass
        finally:
            self._end_children()
            signal.set_wakeup_fd(old_wake)
            for sig, handler in handlers.items():
                signal.signal(sig, handler)
            self._selector.close()
            self._listener.close()
            os.close(wake)
            os.close(woken)
            shutil.rmtree(self._directory, ignore_errors=True)
        return self._exit_code

    def _serve_leader(self) -> int:
        # What a server with one host never needs: torch.
        from stretto.runtime import Runtime

        try:
            Runtime.start(self._engine_config, self._on_progress)
        except SystemExit:
            return 0
        except StrettoError as error:
            self.error = str(error)
            return FAILED
        raise AssertionError("a rank above 0 came back from its leader")

    # -- start ------------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        config = self._config
        try:
            kind, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(kind, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(4096)
        except OSError as error:
            raise StrettoError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from error
        listener.setblocking(False)
        return listener

    @property
    def port(self) -> int:
        """The port in use; the system's choice if 0 was asked for."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def _write_settings(self) -> None:
        engine = EngineSettings(
            self._engine_config, self._config.max_queued_requests, os.getpid(), self._config.log_level
        )
        write_settings(self._directory, "engine.json", engine)
        write_settings(self._directory, "worker.json", WorkerSettings(self._config, self._engine_config.model))
        (self._directory / "metrics").mkdir(mode=0o700)

    def _start_worker(self) -> None:
        assert self._listener is not None
        self._num_workers += 1
        number = self._num_workers
        replaces = "0" if self._info is None else "1"
        command = ["stretto.server.worker", str(self._directory), str(number), replaces]
        child = self._spawn(command, number, self._listener.fileno())
        self._workers.append(child)
        if self._info is not None:
            child.control.send(self._info)

    def _spawn(self, command: Sequence[str], number: int, *fds: int) -> _Child:
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        passed = [theirs.fileno(), *((life_read,) if number else ()), *fds]
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._directory / "metrics")}
        try:
            with starting_children():
                process = subprocess.Popen(
                    [sys.executable, "-m", *command, *map(str, passed)],
                    pass_fds=passed,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                )
        finally:
            theirs.close()
            os.close(life_read)
        child = _Child(process, ControlLine(ours), number, life_write)
        self._selector.register(child.control, selectors.EVENT_READ, child)
        return child

    # -- watch ------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _turn(self, wake: int) -> bool:
        """Wait for something to happen, and see to it; False when everything has ended."""
        for key, _ in self._selector.select(0.5):
            if key.data is None:
                os.read(wake, 4096)
            else:
                self._hear(key.data)
        self._see_signals()
        self._see_deaths()
        now = time.monotonic()
        self._see_stopped_engine(now)
        for worker in self._workers:
            if now - worker.last_beat > _STUCK_WORKER_SECONDS:
                logger.error("front end %d is stuck; it is replaced", worker.number)
                worker.process.kill()
        if self._draining_until is not None:
            return bool(self._workers) and now < self._draining_until
        if self._failing_until is not None:
            return bool(self._workers) and now < self._failing_until
        return True

    def _hear(self, child: _Child) -> None:
        for message in child.control.receive():
            self._take(child, message)
        if child.control.closed:
            self._stop_hearing(child)

    def _stop_hearing(self, child: _Child) -> None:
        with suppress(KeyError):
            self._selector.unregister(child.control)

    def _take(self, child: _Child, message: Control) -> None:
        if isinstance(message, Beat):
            child.last_beat = time.monotonic()
        elif isinstance(message, Progress):
            self._on_progress(message.what, message.fraction)
        elif isinstance(message, EngineInfo):
            self._info = message
            for worker in self._workers:
                worker.control.send(message)
            self._tell_ready()
        elif isinstance(message, Serving):
            child.serving = True
            self._tell_ready()
        elif isinstance(message, Failed):
            self._fail(message.message, BAD_INPUT if message.bad_input else FAILED)
        elif isinstance(message, EngineStuck):
            self._fail("the engine does not answer any more")

    def _tell_ready(self) -> None:
        if self._info is not None and not self._told_ready and all(worker.serving for worker in self._workers):
            self._told_ready = True
            self._on_ready(self._info, f"http://{self._config.url_host}:{self.port}")

    def _see_signals(self) -> None:
        if self._signals and self._draining_until is None and self._failing_until is None:
            self._signals = 1
            logger.info("shutting down: running requests have %g s", self._config.drain_timeout)
            self._draining_until = time.monotonic() + self._config.drain_timeout + _STOP_SECONDS
            for worker in self._workers:
                worker.control.send(Drain(self._config.drain_timeout))
        elif self._signals > 1:
            self._exit_code = self._exit_code or FAILED
            self._draining_until = self._failing_until = 0.0

    def _see_deaths(self) -> None:
        engine = self._engine
        if engine is not None and engine.process.poll() is not None and self._failing_until is None:
            self._hear_last(engine)
            leads = " (rank 0)" if self._engine_config.tensor_parallel_size > 1 else ""
            self._fail(f"the engine process{leads} has died ({_describe(engine.process.returncode)})")
        for worker in list(self._workers):
            if worker.process.poll() is None:
                continue
            self._workers.remove(worker)
            self._hang_up(worker)
            if engine is not None:
                engine.control.send(WorkerGone(worker.number))
            if self._ending:
                continue
            why = _describe(worker.process.returncode)
            now = time.monotonic()
            self._restarts = [when for when in self._restarts if now - when < _RESTART_WINDOW] + [now]
            if len(self._restarts) > _MAX_RESTARTS:
                self._fail(f"front ends die again and again (the last: {why})")
            else:
                logger.error("front end %d has died (%s); it is replaced", worker.number, why)
                self._start_worker()

    def _see_stopped_engine(self, now: float) -> None:
        """Without their leader the other ranks end by themselves; then the server has to as well."""
        engine = self._engine
        if engine is None or self._failing_until is not None or self._engine_config.tensor_parallel_size == 1:
            return
        if not is_stopped(engine.process.pid):
            self._engine_runs = now
        elif now - self._engine_runs > STOPPED_SECONDS:
            self._fail(f"rank 0 (pid {engine.process.pid}, the engine process) hangs: its process is stopped (SIGSTOP)")

    @property
    def _ending(self) -> bool:
        return self._draining_until is not None or self._failing_until is not None

    def _hear_last(self, child: _Child) -> None:
        """What a dead child said before it died."""
        while not child.control.closed:
            self._hear(child)

    def _fail(self, message: str, code: int = FAILED) -> None:
        """The server cannot go on: front ends end their requests with an error, then everything ends."""
        if self._failing_until is not None:
            return
        logger.error("%s; the server stops", message)
        self.error = message
        self._exit_code = code
        self._draining_until = None
        self._failing_until = time.monotonic() + _STOP_SECONDS
        if self._engine is not None:
            self._engine.process.kill()
        for worker in self._workers:
            worker.control.send(EngineGone())

    # -- end --------------------------------------------------------------------------------------------------------

    def _end_children(self) -> None:
        """Nobody outlives this."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            self._hang_up(worker)
        self._workers.clear()
        if self._engine is not None:
            self._engine.control.send(Stop())
            loads = self._info is None  # hears nothing, and has nothing to lose
            try:
                self._engine.process.wait(_STOP_SECONDS if self._exit_code == 0 and not loads else 1.0)
            except subprocess.TimeoutExpired:
                self._engine.process.kill()
                self._engine.process.wait()
            self._hang_up(self._engine)

    def _hang_up(self, child: _Child) -> None:
        self._stop_hearing(child)
        child.control.close()
        os.close(child.life)


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
