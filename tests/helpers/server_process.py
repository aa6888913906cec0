"""A real `stretto serve` as a process of its own, on a free port, and what tests ask about it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE = 120.0
"""Seconds that anything may take on a slow machine before a test fails."""


class ServerProcess:
    """Started by `with`, and ended by it."""

    def __init__(self, model: Path | str, *options: str, dummy: bool = True, env: dict[str, str] | None = None) -> None:
        dummy_options = ("--load-format", "dummy", "--dtype", "float32") if dummy else ()
        self.command = [
            *(sys.executable, "-m", "stretto", "serve", "--model", str(model), "--port", "0"),
            *("--served-model-name", "tested", *dummy_options, *options),
        ]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._scratch = tempfile.TemporaryDirectory(prefix="st")
        self._env["TMPDIR"] = self._scratch.name
        self.log: list[str] = []
        self.url = ""
        self.headers: dict[str, str] = {}
        """Sent with every request that does not bring its own."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, env=self._env, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait_until(lambda: self.url != "" or self.process.poll() is not None, "the server to start")
            assert self.url, self.text
            wait_until(lambda: self.get("/health")[0] == 200, "the server to be healthy")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"address\s+(http://\S+)/v1", line)
            if found:
                self.url = found[1]

    @property
    def text(self) -> str:
        return "".join(self.log)

    def stop(self) -> int:
        """End it if it still runs; returns its exit code."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(sig)
                try:
                    self.process.wait(PATIENCE / 2)
                except subprocess.TimeoutExpired:
                    continue
        self._reader.join(PATIENCE)
        self._scratch.cleanup()
        return int(self.process.wait())

    def leftovers(self) -> list[str]:
        """Files that it left in its temporary directory."""
        return os.listdir(self._scratch.name)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    # -- its processes ------------------------------------------------------------------------------------------------

    def children(self) -> dict[int, str]:
        """Pid and command of its child processes."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == self.process.pid:
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                except OSError:
                    continue
        return found

    def pids(self, module: str) -> list[int]:
        """Children that run this module."""
        return [pid for pid, command in self.children().items() if module in command]

    @property
    def engine_pid(self) -> int:
        (pid,) = self.pids("stretto.ipc.engine_process")
        return pid

    @property
    def worker_pids(self) -> list[int]:
        return self.pids("stretto.server.worker")

    # -- requests -----------------------------------------------------------------------------------------------------

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body."""
        status, body, _ = self.call("GET", path, None, headers)
        return status, body

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded body; `body` is sent as JSON, or as it is if it is bytes."""
        status, answer, _ = self.call("POST", path, body, headers)
        return status, json.loads(answer)

    def call(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)
        except OSError:
            return 0, b"", {}

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        _, body = self.get("/metrics")
        values = re.findall(rf"^stretto:{name}(?:{{[^}}]*}})? (\S+)$", body.decode(), re.M)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def is_idle(self) -> bool:
        """Whether all resources of the engine are at their baseline."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names[:2])

    def wait_until_idle(self) -> None:
        """Fails if requests go on although nobody wants them."""
        wait_until(self.is_idle, "the engine to be idle")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Poll; fails with `what` after a long time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
