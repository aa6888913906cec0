"""Runs a server under mixed good and bad clients for a while and checks that nothing leaks and nobody is harmed.

    python scripts/server_soak.py --seconds 3600

Good clients repeat seeded requests and compare each answer with an undisturbed one. Bad clients vanish in three ways
after their first chunk, read nothing, send broken bodies, or flood the queue. At the end the engine must be idle, all
pages and slots free, and memory and file descriptors of every process where they were at half time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.server_process import ServerProcess, wait_until

MIB = 2**20


class Soak:
    """The clients of one run, and what they found."""

    def __init__(self, server: ServerProcess, seconds: float, vanishing: int, queued: int) -> None:
        self.server = server
        self.until = time.monotonic() + seconds
        self.vanishing = vanishing
        self.queued = queued
        self.counts: dict[str, int] = {}
        self.expected: dict[int, str] = {}
        self.random = random.Random(0)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    async def exchange(self, body: bytes, read: int = -1) -> tuple[bytes, socket.socket]:
        """Send a completion request; read all of the answer, or until `read` bytes are there."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        data = await reader.read() if read < 0 else await reader.read(read)
        kept = writer.get_extra_info("socket").dup()
        writer.transport.abort() if read < 0 else writer.close()
        return data, kept

    def body(self, **fields: Any) -> bytes:
        return json.dumps({"prompt": "the quick brown", "max_tokens": 60, **fields}).encode()

    async def good(self, seed: int) -> None:
        """One seeded answer; it must be the one that it always is."""
        data, kept = await self.exchange(self.body(seed=seed, stop=["q"]))
        kept.close()
        if b" 429 " in data[:20]:
            self.count("refused as busy")
            return
        text = json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        if self.expected.setdefault(seed, text) != text:
            raise AssertionError(f"seed {seed} was answered differently under load")
        self.count("answers")

    async def vanish(self, way: int) -> None:
        """Leave after the first chunk."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        body = self.body(stream=way % 2 == 0, max_tokens=800)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        if way % 2 == 0:
            await reader.read(400)
        else:
            await asyncio.sleep(0.05)
        raw = writer.get_extra_info("socket")
        if way % 3 == 0:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way % 3 == 1 and writer.can_write_eof():
            writer.write_eof()
        writer.close()
        self.count("vanished")

    async def broken(self) -> None:
        """A body that is no request; it must be a 400."""
        bodies = (b"{", b"\xff\xfe", self.body(prompt=[10**9]), self.body(temperature="x"), self.body(prompt=""))
        data, kept = await self.exchange(self.random.choice(bodies))
        kept.close()
        if b" 400 " not in data[:20]:
            raise AssertionError(f"a broken body was answered with {data[:40]!r}")
        self.count("broken bodies")

    async def sleepy(self) -> None:
        """A reader that does not read for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1024)
        body = self.body(stream=True, n=4, max_tokens=200, logprobs=5)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(1.0)
        while b"[DONE]" not in (part := await reader.read(65536)) and part:
            pass
        writer.close()
        self.count("slow readers")

    async def flood(self, number: int) -> None:
        """Many requests at once; each is answered or refused with a 429."""

        async def one() -> None:
            data, kept = await self.exchange(self.body(max_tokens=2))
            kept.close()
            if data[9:12] not in (b"200", b"429"):
                raise AssertionError(f"a flood was answered with {data[:60]!r}")
            self.count("flood " + data[9:12].decode())

        await asyncio.gather(*(one() for _ in range(number)))

    async def client(self) -> None:
        """One client after the other, until the time is over."""
        while self.goes_on:
            kind = self.random.random()
            if kind < 0.5:
                await self.good(self.random.randrange(10))
            elif kind < 0.85:
                await self.vanish(self.random.randrange(6))
            elif kind < 0.95:
                await self.broken()
            else:
                await self.sleepy()

    async def run(self, begin: float) -> dict[int, tuple[int, int]]:
        """All clients; returns the sizes of the processes at half time."""
        for seed in range(10):
            await self.good(seed)
        await asyncio.gather(*(self.vanish(index) for index in range(self.vanishing)))
        await self.flood(self.queued)
        clients = [asyncio.ensure_future(self.client()) for _ in range(12)]
        await asyncio.sleep(max(0.0, (begin + self.until) / 2 - time.monotonic()))
        early = sizes(self.server)
        await asyncio.gather(*clients)
        return early


def sizes(server: ServerProcess) -> dict[int, tuple[int, int]]:
    """Resident bytes and open files of every process of the server."""
    found = {}
    for pid in (server.process.pid, *server.children()):
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found[pid] = (resident, len(os.listdir(f"/proc/{pid}/fd")))
    return found


def main() -> None:
    """Run it; exit with 1 and a reason if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--vanishing", type=int, default=300, help="clients that vanish at once, at the start")
    parser.add_argument("--queued", type=int, default=10_000, help="requests at once, after that")
    parser.add_argument(
        "--allowed-growth",
        type=float,
        default=32.0,
        help="MiB per process in the second half; an engine that is minutes old still warms up by more",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_dummy_model(Path(scratch), endless=True)
        limits = (
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "32",
            "--max-queued-requests",
            "12000",
            "--no-access-log",
        )
        with ServerProcess(model, *limits, "--api-workers", "2") as server:
            begin = time.monotonic()
            soak = Soak(server, options.seconds, options.vanishing, options.queued)
            early = asyncio.run(soak.run(begin))
            server.wait_until_idle()
            wait_until(lambda: server.metric("num_free_pages") == server.metric("num_pages"), "all pages to be free")
            late = sizes(server)
            failures = compare(early, late, options.allowed_growth * MIB)
            code = server.stop()
    for name, value in sorted(soak.counts.items()):
        print(f"{name:<18}{value:8}")
    print(f"{'seconds':<18}{time.monotonic() - begin:8.0f}")
    if code != 0:
        failures.append(f"the server ended with code {code}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(bool(failures))


def compare(early: dict[int, tuple[int, int]], late: dict[int, tuple[int, int]], allowed: float) -> list[str]:
    """What has grown by more than `allowed` bytes, or died."""
    failures = [] if early.keys() == late.keys() else ["a process has died on the way"]
    for pid in early.keys() & late.keys():
        (memory, files), (memory_late, files_late) = early[pid], late[pid]
        print(f"process {pid}: {memory / MIB:.1f} -> {memory_late / MIB:.1f} MiB, {files} -> {files_late} files")
        if memory_late - memory > allowed:
            failures.append(f"process {pid} has grown by {(memory_late - memory) / MIB:.1f} MiB")
        if files_late > files + 8:
            failures.append(f"process {pid} has {files_late - files} more files open")
    return failures


if __name__ == "__main__":
    main()
