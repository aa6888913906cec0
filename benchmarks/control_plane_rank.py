"""What the ranks of `control_plane.py` do: forked processes that send, receive, and write down when.

The leader announces each phase in the control plane itself. Each rank keeps its times (CLOCK_MONOTONIC, one clock for
all processes of a host) in memory and writes them to its file after the phase.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stretto.distributed.transport import FollowerTransport, LeaderTransport, connect, listen
from stretto.ipc.control import die_with_parent

CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One control plane to be measured, and how much of it."""

    transport: str
    host: str | None
    size: int
    sizes: tuple[int, ...]
    """Message sizes, bytes."""
    messages: int
    """Messages of a paced phase at most; fewer if `seconds` end first."""
    trips: int
    seconds: float
    """Of each phase, about."""
    pause_s: float
    """Between messages of the paced phase: long enough for every rank to sleep, as it does between steps."""
    idle_s: float


def cpu_s() -> float:
    """Processor time of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_leader(plan: Plan, directory: Path, parent: socket.socket) -> None:
    """Lead: all phases without load, then (when the parent has started it) with load."""
    leader = listen(plan.transport, plan.size, plan.host)
    parent.sendall((json.dumps({"address": leader.address}) + "\n").encode())
    leader.wait_for_followers(CONNECT_S)
    back_address = directory / "back"
    while not back_address.exists():
        time.sleep(0.01)
    back = connect(back_address.read_text(), 1, 2, CONNECT_S)
    with (directory / "rank-0.jsonl").open("w") as out:
        for load in (False, True):
            parent.sendall(b'{"load": %s}\n' % (b"true" if load else b"false"))
            parent.recv(1)
            for row in _lead(plan, leader, back):
                out.write(json.dumps({"load": load} | row) + "\n")
    _say(leader, {"phase": "end"})
    leader.close()
    back.close()


def _lead(plan: Plan, leader: LeaderTransport, back: FollowerTransport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    _say(leader, {"phase": "idle"})
    time.sleep(plan.idle_s)
    leader.publish(b"over")
    back.receive(None)
    for size in plan.sizes:
        data, row = os.urandom(size), {}
        for phase in ("paced", "trips", "flood"):
            # Where ranks are more than cores, one may not run for long: without answers, paced messages would measure
            # the queue before it.
            answered = phase != "flood"
            _say(leader, {"phase": phase, "size": size, "answered": answered})
            back.receive(None)
            if phase == "flood":  # what a slow transport has queued must be read before the next phase
                most = max(50, round(10 * plan.seconds / (median(row["trips"]) / 1e9)))
                row = _flood(plan, leader, data, most)
            else:
                row = (_paced if phase == "paced" else _trips)(plan, leader, back, data)
            rows.append({"phase": phase, "size": size} | row)
            leader.publish(b"over")
            back.receive(None)
    return rows


def _paced(plan: Plan, leader: LeaderTransport, back: FollowerTransport, data: bytes) -> dict[str, Any]:
    """One message at a time, with a pause in which everybody falls asleep."""
    pause_s = plan.pause_s + len(data) * plan.size / 5e8  # and to have read it
    used = cpu_s()
    for _ in range(50):
        time.sleep(plan.pause_s)
    pause_cpu = (cpu_s() - used) / 50
    sent, took = [], []
    end, used = time.monotonic() + plan.seconds, cpu_s()
    while len(sent) < plan.messages and (time.monotonic() < end or len(sent) < 10):
        time.sleep(pause_s)
        before = time.monotonic_ns()
        leader.publish(data)
        sent.append(before)
        took.append(time.monotonic_ns() - before)
        back.receive(None)
    return {"sent": sent, "took": took, "cpu": (cpu_s() - used) / len(sent) - pause_cpu}


def _trips(plan: Plan, leader: LeaderTransport, back: FollowerTransport, data: bytes) -> dict[str, Any]:
    """There, and back from the last rank over a control plane that it leads."""
    trips = []
    end = time.monotonic() + plan.seconds
    while len(trips) < plan.trips and (time.monotonic() < end or len(trips) < 10):
        before = time.monotonic_ns()
        leader.publish(data)
        back.receive(None)
        trips.append(time.monotonic_ns() - before)
    return {"trips": trips}


def _flood(plan: Plan, leader: LeaderTransport, data: bytes, most: int) -> dict[str, Any]:
    """As fast as it goes, at most `most` messages: until the slowest has read the last one."""
    before, used, count = time.monotonic(), cpu_s(), 0
    while count < most and time.monotonic() - before < plan.seconds:
        leader.publish(data)
        count += 1
    return {"begin": before, "count": count, "cpu": (cpu_s() - used) / count}


def run_follower(plan: Plan, rank: int, address: str, directory: Path) -> None:
    """Follow, and answer if it is the last rank."""
    follower = connect(address, rank, plan.size, CONNECT_S)
    back: LeaderTransport | None = None
    if rank == plan.size - 1:
        back = listen(plan.transport, 2, plan.host)
        (directory / "new").write_text(back.address)
        (directory / "new").rename(directory / "back")
        back.wait_for_followers(CONNECT_S)
    with (directory / f"rank-{rank}.jsonl").open("w") as out:
        while (phase := json.loads(follower.receive(None) or b"")) != {"phase": "end"}:
            out.write(json.dumps(phase | _follow(phase, follower, back)) + "\n")
            if back is not None:
                back.publish(b"done")
    follower.close()
    if back is not None:
        back.close()


def _follow(announced: dict[str, Any], follower: FollowerTransport, back: LeaderTransport | None) -> dict[str, Any]:
    phase, answered = announced["phase"], announced.get("answered", False)
    if back is not None and phase != "idle":
        back.publish(b"ready")
    used, began, times = cpu_s(), time.monotonic(), []
    receive, now = follower.receive, time.monotonic_ns
    while True:
        data = receive(None)
        times.append(now())
        if data == b"over":
            break
        if answered and back is not None and data is not None:
            back.publish(data if phase == "trips" else b"")
    result: dict[str, Any] = {"end": times[-1] / 1e9, "cpu": cpu_s() - used, "wall": time.monotonic() - began}
    result["count"] = len(times)
    return result | ({"times": times} if phase == "paced" else {})


def _say(leader: LeaderTransport, phase: dict[str, Any]) -> None:
    leader.publish(json.dumps(phase).encode())


def burn() -> None:
    """Load: a process that wants one core for itself."""
    while True:
        pass


def fork(work: Any, *arguments: Any) -> int:
    """Run `work` in a process that dies with this one; returns its id. The caller has no threads."""
    parent = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        die_with_parent(parent)
        work(*arguments)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
