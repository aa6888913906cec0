"""Real processes as the ranks of a tensor group: runs a function in each of them, and always reaps them.

Owns the processes. They are made once and used for many functions, since importing torch takes seconds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from stretto.distributed.group import TensorGroup, connect_group

RankFunction = Callable[..., Any]
"""(group, *arguments) -> result; at the top of a module that is quick to import. All of it is pickled."""


class RankPool:
    """`size` processes, of which any first few can be the ranks of a group."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        """`device`: the kind that the groups are between; with "cuda" rank r has GPU r."""
        # The server imports torch once, and the processes are copies of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.rank_pool", "tests.helpers.tensor_parallel"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._count = itertools.count()
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._store.port, device), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(
        self, size: int, function: RankFunction, *arguments: Any, limit_s: float = 60.0, timeout_s: float = 30.0
    ) -> list[Any]:
        """`function(group, *arguments)` of every rank, by rank. `timeout_s` is the group's.

        Raises AssertionError with the traceback of the first rank that raised, or if one took longer than `limit_s`;
        then the processes are gone.
        """
        name = f"group {next(self._count)}"
        for rank in range(size):
            self._pipes[rank].send((name, rank, size, timeout_s, function, arguments))
        deadline = time.monotonic() + limit_s
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise AssertionError(f"rank {rank} of {size} gave nothing within {limit_s:g} s: {failures}")
            worked, value = pipe.recv()
            (results if worked else failures).append(value)
        assert not failures, failures[0]
        return results

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _serve(pipe: Connection, port: int, kind: str) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            name, rank, size, timeout_s, function, arguments = pipe.recv()
        except EOFError:  # the tests' process is gone
            return
        try:
            device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
            if kind == "cuda":
                torch.cuda.set_device(device)
            group: TensorGroup = connect_group(PrefixStore(name, store), rank, size, device, timeout_s=timeout_s)
            try:
                answer = True, function(group, *arguments)
            finally:
                group.close()
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
