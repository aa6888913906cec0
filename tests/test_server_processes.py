"""Processes die in every way: the others notice, open requests end with an error, and nobody is left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import children_of
from tests.helpers.server_process import PATIENCE, ServerProcess, alive, wait_until

LONG = {"prompt": "the quick", "max_tokens": 4000, "n": 2}
OPTIONS = ("--max-model-len", "4096", "--max-num-seqs", "4", "--no-access-log")


KEY = {"authorization": "Bearer secret-key"}


class TwoFrontEnds:
    """A server with two front ends and a key, for tests that leave it running and for one that does not."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._server: ServerProcess | None = None

    def running(self) -> ServerProcess:
        """The server; a new one if the last was ended."""
        if self._server is not None and self._server.process.poll() is not None:
            self.stop()
        if self._server is None:
            server = ServerProcess(self._model, *OPTIONS, "--api-workers", "2", "--api-key", "secret-key")
            server.headers = KEY
            self._server = server.__enter__()
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


@pytest.fixture(scope="module")
def two_front_ends(dummy_model: Path) -> Iterator[TwoFrontEnds]:
    kept = TwoFrontEnds(dummy_model)
    yield kept
    kept.stop()


class Stream:
    """A streaming completion that is read in a thread."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.status = 0
        self.data = b""
        self._headers = server.headers
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self._body = json.dumps({**LONG, "stream": True, **fields})
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", self._body, self._headers)
            response = self._connection.getresponse()
            self.status = response.status
            while part := response.read1(65536):
                self.data += part
        except (OSError, http.client.HTTPException):
            pass

    def wait_for_data(self) -> None:
        wait_until(lambda: b"data:" in self.data or not self.thread.is_alive(), "a stream to begin")

    def result(self) -> bytes:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.data

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[6:]) for line in self.data.split(b"\n\n") if line.startswith(b"data: {")]


def test_the_private_directory_is_private(two_front_ends: TwoFrontEnds) -> None:
    server = two_front_ends.running()
    (name,) = server.leftovers()
    directory = Path(server._scratch.name) / name
    assert directory.stat().st_mode & 0o777 == 0o700
    for file in directory.glob("*.json"):
        assert file.stat().st_mode & 0o777 == 0o600
    commands = [command for pid, command in server.children().items()]
    assert not any("secret-key" in command for command in commands)


def test_a_killed_front_end_is_replaced_and_the_others_go_on(two_front_ends: TwoFrontEnds) -> None:
    server = two_front_ends.running()
    expected = server.post("/v1/completions", {"prompt": "fox", "seed": 3, "max_tokens": 300})[1]["choices"]
    old = server.worker_pids
    streams = [Stream(server, n=1, seed=3, prompt="fox", max_tokens=300) for _ in range(8)]
    for stream in streams:
        stream.wait_for_data()
    os.kill(old[0], signal.SIGKILL)
    whole = [stream for stream in streams if b"[DONE]" in stream.result()]
    for stream in whole:
        assert "".join(event["choices"][0]["text"] for event in stream.events) == expected[0]["text"]
    wait_until(lambda: len(server.worker_pids) == 2 and old[0] not in server.worker_pids, "a new front end")
    wait_until(lambda: server.is_idle(), "the engine to be idle")
    for _ in range(4):
        status, answer = server.post("/v1/completions", {"prompt": "fox", "seed": 3, "max_tokens": 300})
        assert (status, answer["choices"][0]["text"]) == (200, expected[0]["text"])


def test_children_of_a_killed_parent_leave_and_clean_up(two_front_ends: TwoFrontEnds) -> None:
    server = two_front_ends.running()
    pids = list(server.children())
    assert len(pids) == 3
    stream = Stream(server)
    stream.wait_for_data()
    (directory,) = Path(server._scratch.name).iterdir()
    for number in range(3000):  # so that cleaning up takes longer than noticing
        (directory / str(number)).touch()
    server.process.kill()
    wait_until(lambda: not any(map(alive, pids)), "the children to leave")
    stream.result()
    assert server.leftovers() == []


def test_a_killed_engine_ends_requests_with_an_error_and_the_server(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS, "--api-workers", "2") as server:
        pids, engine = list(server.children()), server.engine_pid
        streams = [Stream(server) for _ in range(6)]
        wait_until(lambda: any(b"data:" in stream.data for stream in streams), "a stream to begin")
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.result()
            assert stream.status in (200, 503)
            assert (b'"engine_dead"' in stream.data) != (b"[DONE]" in stream.data)
        assert any(b'"engine_dead"' in stream.data for stream in streams)
        assert server.process.wait(PATIENCE) == 1
        assert not any(map(alive, pids))
        assert server.leftovers() == []
        assert "the engine process has died (signal 9)" in server.text


def test_a_stuck_engine_is_noticed_and_ended(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS, "--engine-timeout", "2") as server:
        engine = server.engine_pid
        stream = Stream(server)
        stream.wait_for_data()
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: server.get("/health")[0] != 200, "health to fail")
        assert b'"engine_dead"' in stream.result()
        assert server.process.wait(PATIENCE) == 1
        assert not alive(engine)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS) as server:
        pids = list(server.children())
        stream = Stream(server, n=1, max_tokens=1500)
        stream.wait_for_data()
        keep_alive = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready")[0] == 503, "the drain to begin")
        assert server.get("/health")[0] == 200
        keep_alive.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 1}))
        response = keep_alive.getresponse()
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        assert b"[DONE]" in stream.result()
        assert sum(len(event["choices"]) for event in stream.events) > 0
        keep_alive.close()
        assert server.process.wait(PATIENCE) == 0
        assert not any(map(alive, pids))
        assert server.leftovers() == []


def test_an_engine_that_dies_while_requests_finish_ends_them_at_once(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS, "--drain-timeout", str(PATIENCE)) as server:
        stream = Stream(server, n=4)
        stream.wait_for_data()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready")[0] == 503, "the drain to begin")
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.get("/health")[0] != 200, "health to fail")
        assert b'"engine_dead"' in stream.result()
        assert server.process.wait(PATIENCE) == 1
        assert "the engine process has died (signal 9)" in server.text


def test_the_time_to_finish_has_an_end(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS, "--drain-timeout", "0.2") as server:
        stream = Stream(server, n=4)
        stream.wait_for_data()
        server.process.send_signal(signal.SIGTERM)
        assert b'"draining"' in stream.result()
        assert server.process.wait(PATIENCE) == 0


def test_a_second_signal_cuts(dummy_model: Path) -> None:
    with ServerProcess(dummy_model, *OPTIONS) as server:
        pids = list(server.children())
        stream = Stream(server, n=4)
        stream.wait_for_data()
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "shutting down" in server.text, "the first signal to be seen")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 1
        assert b"[DONE]" not in stream.result()
        assert not any(map(alive, pids))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_server_that_still_loads_is_ended_without_waiting_for_its_engine(sig: signal.Signals) -> None:
    """Ctrl-C goes to all of its processes at once, whose imports have only begun."""
    code = (
        "import sys\n"
        "from stretto.config import EngineConfig\n"
        "from stretto.server import supervisor\n"
        "from stretto.server.settings import ServerConfig\n"
        "supervisor._STOP_SECONDS = 1e6\n"  # what waits for the engine's answer never ends
        "made = supervisor.Supervisor(EngineConfig('m'), ServerConfig(port=0), "
        "engine_module='tests.helpers.loading_engine')\n"
        "sys.exit(made.run())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 2, "the children to start")
        pids = [int(pid) for pid in children.read_text().split()]
        if sig == signal.SIGINT:
            os.killpg(process.pid, sig)
        else:
            process.send_signal(sig)
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0, said
        assert "Traceback" not in said
        assert not any(map(alive, pids))
    finally:
        process.kill()


@pytest.mark.parametrize("is_read", [True, False])
def test_children_of_a_parent_that_is_killed_at_once_end_with_a_line(is_read: bool) -> None:
    """Before they have so much as read what they were told; and if nobody is left who reads the line."""
    scratch = tempfile.TemporaryDirectory(prefix="st")  # pytest's own have paths too long for sockets
    command = [sys.executable, "-m", "stretto", "serve", "--model", "m", "--port", "0"]
    process = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": scratch.name}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: len(children_of(process.pid)) >= 2, "the children to start", 10.0)
        pids = children_of(process.pid)
        assert process.stderr is not None
        if not is_read:
            process.stderr.close()
        process.kill()
        wait_until(lambda: not any(map(alive, pids)), "the children to leave")
        said = process.stderr.read() if is_read else ""
    finally:
        process.kill()
        process.wait()
    assert is_read == ("the parent process of the server is gone" in said)
    assert "Traceback" not in said
    assert os.listdir(scratch.name) == []
    scratch.cleanup()


def test_a_server_that_cannot_start_says_why(tmp_path: Path, dummy_model: Path) -> None:
    missing = ServerProcess(tmp_path / "nothing")
    with pytest.raises(AssertionError, match="nothing"), missing:
        pass
    assert missing.stop() != 0
    bad = ServerProcess(dummy_model, "--max-model-len", "99999999")
    with pytest.raises(AssertionError, match="max_model_len"), bad:
        pass
    assert bad.stop() == 2
