"""What the HTTP front end costs: a no-op engine emits tokens at a fixed rate to many streams, real clients read them.

    python benchmarks/server_frontend.py [--streams 256] [--rate 20000] [--seconds 10] [--profile FILE]

Reports the tokens per second that the clients got, the front end's CPU seconds per token, and so the tokens per second
that one core delivers. The engine, the front end and the clients are processes of their own, as when serving.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from stretto.config import EngineConfig
from stretto.request import FinishReason, Request, SamplingParams
from stretto.server.settings import ServerConfig

RATE = "STRETTO_NOOP_RATE"
PROFILE = "STRETTO_NOOP_PROFILE"


class NoopEngine:
    """Gives every request one token a step, `rate` tokens per second in all; computes nothing."""

    def __init__(self, rate: float, vocab: int) -> None:
        self._rate = rate
        self._vocab = vocab
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._uids = np.empty(0, np.int64)
        self._left = np.empty(0, np.int64)
        self._next = time.perf_counter()
        self._count = 0
        self._num_steps = 0

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
        return np.asarray(prompt_ids, np.int32)

    def add(self, prompt_ids: Any, params: SamplingParams, *, seed: int | None = None, priority: int = 0) -> Request:
        request = Request(self._count, prompt_ids, params, 0, 0, ())
        self._count += 1
        self._requests[request.uid] = request
        self._uids = np.append(self._uids, request.uid)
        self._left = np.append(self._left, params.max_tokens or 16)
        return request

    def end(self, request: Request, reason: Any = FinishReason.ABORT, num_output: int | None = None) -> None:
        if self._requests.pop(request.uid, None) is not None:
            keep = self._uids != request.uid
            self._uids, self._left = self._uids[keep], self._left[keep]
            request.finish_reason = reason
            self._ended.append(request)

    def step(self) -> list[Any]:
        from stretto.scheduler.batch import StepOutput

        count = len(self._uids)
        self._next = max(self._next + count / self._rate, time.perf_counter() - 0.05)
        time.sleep(max(0.0, self._next - time.perf_counter()))
        tokens = ((self._uids * 31 + self._num_steps * 7) % 3000 + 300).astype(np.int32)
        self._num_steps += 1
        uids, self._left = self._uids, self._left - 1
        for uid in uids[self._left <= 0].tolist():
            self.end(self._requests[uid], FinishReason.LENGTH)
        ended, self._ended = tuple(self._ended), []
        return [StepOutput(self._num_steps, uids, tokens, ended)]

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    @contextmanager
    def running(self) -> Iterator[None]:
        yield


def engine_main() -> None:
    """The engine process."""
    import zmq

    from stretto.ipc.control import ControlLine, EngineInfo
    from stretto.ipc.engine_process import prepare_process
    from stretto.ipc.engine_service import EngineService
    from stretto.ipc.settings import read_engine_settings
    from stretto.ipc.sockets import engine_socket
    from stretto.models.resolve import resolve_model

    directory, control = Path(sys.argv[1]), ControlLine.from_fd(int(sys.argv[2]))
    settings = read_engine_settings(directory)
    prepare_process(settings.parent_pid, "warning")
    source = resolve_model(settings.engine.model)
    engine = NoopEngine(float(os.environ[RATE]), 49152)
    with zmq.Context() as context, engine_socket(context, directory) as socket:
        sizes = (49152, 8192, 4096, 8192, 20, 16, 1000, 0)
        control.send(EngineInfo("no-op", "none", "none", source.kind, str(source.path), *sizes))
        EngineService(
            engine, socket, control, max_requests=100_000, figures=dict, derive_seed=lambda seed, index: seed
        ).run()
    os._exit(0)


async def client_main(port: int, streams: int, seconds: float) -> dict[str, float]:
    """Reads all streams in one process; counts events with text by a cheap search."""
    counts = [0] * streams
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1_000_000, "ignore_eos": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    started = asyncio.Event()

    class Reader(asyncio.Protocol):
        def __init__(self, index: int) -> None:
            self._index = index

        def connection_made(self, transport: Any) -> None:
            transport.write(head + body)

        def data_received(self, data: bytes) -> None:
            counts[self._index] += data.count(b'"content":"')
            started.set()

    loop = asyncio.get_running_loop()
    transports = [
        (await loop.create_connection(lambda index=index: Reader(index), "127.0.0.1", port))[0]  # type: ignore[misc]
        for index in range(streams)
    ]
    await started.wait()
    await asyncio.sleep(2.0)
    before, cpu_before, begin = sum(counts), time.process_time(), time.perf_counter()
    worker_before = cpu_seconds(int(os.environ["WORKER_PID"]))
    await asyncio.sleep(seconds)
    result = {
        "tokens": sum(counts) - before,
        "seconds": time.perf_counter() - begin,
        "worker_cpu": cpu_seconds(int(os.environ["WORKER_PID"])) - worker_before,
        "client_cpu": time.process_time() - cpu_before,
        "slowest": min(counts),
    }
    for transport in transports:
        transport.abort()
    return result


def layer_costs(streams: int) -> dict[str, float]:
    """Microseconds per token of the layers that are ours: taking a step (message, text) and making its events."""
    return asyncio.run(_layer_costs(streams))


async def _layer_costs(streams: int, steps: int = 40) -> dict[str, float]:
    import tempfile

    from stretto.ipc.client import EngineClient
    from stretto.ipc.messages import Step, decode_from_engine, encode
    from stretto.models.gguf_file import GGUFFile
    from stretto.models.resolve import resolve_model
    from stretto.prompts import Prompt
    from stretto.server.endpoints_chat import ChatEvents, ChatReply
    from stretto.server.frontend import Frontend, OpenRequest
    from stretto.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(GGUFFile(resolve_model("smollm2-135m").path).metadata)
    frontend = Frontend(ServerConfig(), "m")
    frontend._tokenizer = tokenizer
    with tempfile.TemporaryDirectory() as directory:
        client = EngineClient(1, Path(directory), tokenizer, lambda count, waits: None)
        params = SamplingParams(max_tokens=1_000_000)
        events = []
        for _ in range(streams):
            answer = client._make_answer([Prompt(None, [1])], params, 0)
            client._register(answer)
            events.append(ChatEvents(ChatReply(frontend, OpenRequest(answer, 1), "m", 0), None))
        ids = np.array(list(client._live), np.int64)
        spent = {"take a step": 0.0, "make events": 0.0}
        for step in range(steps):
            tokens = ((ids * 31 + step * 7) % 3000 + 300).astype(np.int32)
            data = encode(Step(ids.tobytes(), tokens.tobytes(), [], [], []))
            begin = time.process_time()
            message = decode_from_engine(data)
            assert isinstance(message, Step)
            client._take_step(message)
            middle = time.process_time()
            for each in events:
                each.new()
            spent["take a step"] += middle - begin
            spent["make events"] += time.process_time() - middle
        client.close()
    return {name: 1e6 * seconds / (steps * streams) for name, seconds in spent.items()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The parent process: a server with the no-op engine, and a thread that measures it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20_000.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from stretto.server.supervisor import Supervisor

    os.environ[RATE] = str(options.rate)
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ready = threading.Event()
    supervisor = Supervisor(
        EngineConfig(model="smollm2-135m"),
        ServerConfig(port=0, access_log=False, log_level="warning", drain_timeout=1.0),
        engine_module="server_frontend_engine",
        on_ready=lambda info, url: ready.set(),
    )
    results: list[dict[str, float]] = []

    def measure() -> None:
        import signal
        import subprocess

        ready.wait()
        time.sleep(1.5)
        worker = worker_pid()
        command = [sys.executable, __file__, "client", str(supervisor.port), str(options.streams), str(options.seconds)]
        environment = {**os.environ, "WORKER_PID": str(worker)}
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
        results.append(json.loads(output))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=measure, daemon=True).start()
    supervisor.run()
    (result,) = results
    tokens, seconds = result["tokens"], result["seconds"]
    report = {
        "streams": options.streams,
        "asked_tokens_per_s": options.rate,
        "delivered_tokens_per_s": tokens / seconds,
        "front_end_cpu_share": result["worker_cpu"] / seconds,
        "front_end_us_per_token": 1e6 * result["worker_cpu"] / tokens,
        "tokens_per_s_per_core": tokens / result["worker_cpu"],
        "client_cpu_share": result["client_cpu"] / seconds,
    }
    layers = layer_costs(options.streams)
    for name, cost in layers.items():
        report[f"us: {name}"] = cost
    report["us: loop, HTTP, sockets"] = report["front_end_us_per_token"] - sum(layers.values())
    for name, value in report.items():
        print(f"{name:<26}{value:12.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def worker_pid() -> int:
    """The one front end among this process's children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"stretto.server.worker" in (entry / "cmdline").read_bytes():
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid():
                return int(entry.name)
    raise RuntimeError("the front end is not there")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        import uvloop

        print(json.dumps(uvloop.run(client_main(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))))
    else:
        main()
