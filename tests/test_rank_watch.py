"""Ranks die, hang, stick, differ and come twice: the watch sees it, says it in one message, and ends all of them.

The ranks are real processes that meet, agree and end as real ones do, but load no torch.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.config import EngineConfig
from stretto.distributed import patience, rendezvous
from stretto.distributed.agreement import environment_facts, option_facts, version_facts
from stretto.distributed.follower import Follower
from stretto.distributed.launch import host_ranks, start_ranks
from stretto.distributed.link import PROTOCOL, Beat, Broken, Digest, Failed, Hello, Link, Message
from stretto.distributed.place import Place
from stretto.distributed.rendezvous import connect_to_leader, open_listener
from stretto.distributed.stuck import find_stuck
from stretto.distributed.watch import Watch
from stretto.errors import EngineBroken, InvalidRequest
from tests.helpers.processes import children_of, free_port, nothing_left, ranks_of, wait_until_dead

ROOT = Path(__file__).parent.parent
FAKE = "tests.helpers.fake_rank"


@pytest.fixture(autouse=True)
def everything_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with nothing_left():
        yield


def facts_of(config: EngineConfig) -> dict[str, str]:
    return {**version_facts(), **environment_facts(), **option_facts(config)}


class FakeLeader:
    """Rank 0 without an engine, and `size - 1` fake ranks."""

    def __init__(self, directory: Path, size: int = 3, lingers_in: str | None = None) -> None:
        self.directory = directory
        config = EngineConfig(str(directory), tokenizer=lingers_in, tensor_parallel_size=size)
        place = Place(0, size, 0, size, None)
        listener = open_listener(place)
        host, port = listener.getsockname()
        places = [Place(rank, size, rank, size, (host, port)) for rank in range(1, size)]
        self.watch = Watch(place, listener, facts_of(config), lambda: start_ranks(config, places, FAKE))
        self.watch.start()

    def meet(self) -> None:
        self.watch.gather("hello", seconds=20)
        self.watch.agree("hello", {})

    def run(self) -> None:
        self.meet()
        for stage in ("sizes", "ready"):
            self.watch.gather(stage, seconds=20)
            self.watch.agree(stage, {})

    def stop(self) -> None:
        (self.directory / "last-turn").touch()
        self.watch.close(orderly=True)

    def pid(self, rank: int) -> int:
        """Ranks are started in order."""
        while len(pids := ranks_of(os.getpid())) < rank:
            self.watch.check()
            time.sleep(0.01)
        return pids[rank - 1]

    def wait_for_failure(self) -> str:
        until = time.monotonic() + 9.0  # every rank has to end within 10 s
        while self.watch.failure is None:
            assert time.monotonic() < until, "nobody has noticed"
            time.sleep(0.01)
        return self.watch.failure


def test_ranks_meet_agree_and_end_in_order(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path)
    leader.run()
    assert leader.watch.facts_of("sizes") == [{"num_pages": "7"}] * 2
    pids = ranks_of(os.getpid())
    assert len(pids) == 2
    leader.stop()
    assert leader.watch.failure is None
    assert not ranks_of(os.getpid())


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process, and those that it starts, may have and has so many open files that new ones are above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no process may have that many open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_leader_with_many_open_files_leads(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path, size=2)
    leader.run()
    leader.stop()
    assert leader.watch.failure is None
    assert leader.watch.last_steps() == {1: 1}


@pytest.mark.usefixtures("many_files")
def test_a_follower_with_many_open_files_hears_its_leader() -> None:
    with open_listener(Place(0, 2, 0, 1, None)) as listener:
        ended = Ended()
        place = Place(1, 2, 0, 1, listener.getsockname())
        follower = Follower(EngineConfig("model", tensor_parallel_size=2), place, None, ended)
        leader = Link(listener.accept()[0])
        assert leader.wait(5.0)
        assert isinstance(leader.receive()[0], Hello)
        leader.send(Failed("said by the leader"))
        assert ended.wait() == ("said by the leader", True)
        leader.close()
    follower.watchdog.leave(0)


def test_a_watchdog_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_listener(Place(0, 2, 0, 1, None)) as listener:
        ended = Ended()
        place = Place(1, 2, 0, 1, listener.getsockname())
        monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
        follower = Follower(EngineConfig("model", tensor_parallel_size=2), place, None, ended)
        leader = Link(listener.accept()[0])

        def own_beat(phase: str) -> Beat:
            if threading.current_thread() is threading.main_thread():
                return Beat(phase)
            raise ValueError("too much")

        follower.watchdog.enter("running", own_beat)
        assert ended.wait() == ("its watchdog failed: ValueError: too much", False)
        messages: list[Message] = []
        while not any(isinstance(message, Broken) for message in messages):
            assert leader.wait(5.0)
            messages += leader.receive()
        leader.close()
    follower.watchdog.leave(0)


def start(leader: FakeLeader) -> None:
    leader.pid(2)


def loading(leader: FakeLeader) -> None:
    leader.meet()
    time.sleep(0.1)


def running(leader: FakeLeader) -> None:
    leader.run()


PHASES = {"start": (start, None), "loading": (loading, "loading"), "running": (running, None)}


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies_or_stops_ends_all(tmp_path: Path, phase: str, sig: signal.Signals) -> None:
    get_there, lingers_in = PHASES[phase]
    leader = FakeLeader(tmp_path, lingers_in=lingers_in)
    freed: list[str] = []
    leader.watch.on_failure(lambda: freed.append(str(leader.watch.failure)))
    get_there(leader)
    victim = leader.pid(2)
    os.kill(victim, sig)
    message = leader.wait_for_failure()
    how = "was killed by signal 9 (SIGKILL)" if sig == signal.SIGKILL else "hangs: its process is stopped (SIGSTOP)"
    assert message.startswith(f"rank 2 (pid {victim}")
    assert how in message
    assert f"({phase}" in message
    with pytest.raises(EngineBroken, match="rank 2"):
        leader.watch.check()
    leader.watch.close(orderly=False)
    assert freed == [message]
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "stopped", "slow"])
def test_ranks_that_do_not_end_are_ended(tmp_path: Path, sig: signal.Signals | None) -> None:
    leader = FakeLeader(tmp_path, lingers_in="shutdown")
    leader.run()
    if sig is not None:
        for pid in ranks_of(os.getpid()):
            os.kill(pid, sig)
    began = time.monotonic()
    leader.stop()
    assert time.monotonic() - began < 9.0
    assert not ranks_of(os.getpid())


def test_the_ranks_of_a_leader_that_nobody_has_any_more_end(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path, size=2)
    leader.run()
    leader.watch.abandon()
    leader.watch.close(orderly=False)
    assert leader.watch.failure is None  # it left because it was told to


def test_ranks_that_have_not_come_yet_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.distributed.watch.CLOSE_SECONDS", 60.0)
    leader = FakeLeader(tmp_path, size=2)
    leader.pid(1)
    began = time.monotonic()
    leader.watch.close(orderly=False)
    assert time.monotonic() - began < 30.0
    assert not ranks_of(os.getpid())


def test_the_cause_is_named_and_not_its_echo(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path)
    leader.run()
    os.kill(leader.pid(1), signal.SIGKILL)
    cause = leader.watch.explain(RuntimeError("Connection closed by peer"))
    assert "rank 1" in cause
    assert "SIGKILL" in cause
    leader.watch.close(orderly=False)


def test_an_error_of_the_leader_is_its_own_if_all_others_live(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path, size=2)
    leader.run()
    assert leader.watch.explain(ValueError("boom")) == "rank 0 failed: ValueError: boom"
    leader.watch.close(orderly=False)


def test_a_rank_that_fails_tells_why(tmp_path: Path) -> None:
    leader = FakeLeader(tmp_path, lingers_in="broken 2")
    leader.meet()
    with pytest.raises(EngineBroken, match=r"rank 2 .* failed: out of memory, let us say"):
        leader.watch.gather("sizes", seconds=20)
    leader.watch.close(orderly=False)


# -- who may come ----------------------------------------------------------------------------------------------------


class Guest:
    """Somebody who connects to a leader whose other ranks are missing."""

    def __init__(self, size: int = 2, hang_seconds: float = 6.0, *, pid: int = 77, launched: bool = False) -> None:
        self.config = EngineConfig("model", tensor_parallel_size=size)
        self.pid = pid
        place = Place(0, size, 0, size if launched else 1, None, launched)
        listener = open_listener(place)
        self.address = listener.getsockname()
        self.watch = Watch(place, listener, facts_of(self.config), list, hang_seconds)
        self.link = Link(socket.create_connection(self.address))

    def hello(self, rank: int = 1, **facts: str) -> None:
        self.link.send(Hello(rank, "elsewhere", self.pid, PROTOCOL, {**facts_of(self.config), **facts}))

    def leave(self) -> None:
        """Hang up, and end the leader."""
        self.link.close()
        self.watch.close(orderly=False)

    def told(self) -> str:
        """What the guest is told about the end."""
        while self.link.wait(5.0):
            for message in self.link.receive():
                if isinstance(message, Failed):
                    return message.message
        raise AssertionError("the guest was told nothing")


@pytest.fixture
def guest() -> Iterator[Guest]:
    guest = Guest(hang_seconds=0.5)
    yield guest
    guest.leave()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"stretto version": "0.0.9"}, "stretto version is 0.0.9 on rank 1, but"),
        ({"torch version": "1.0"}, "torch version is 1.0 on rank 1, but"),
        ({"dtype": "'bfloat16'"}, "dtype is 'bfloat16' on rank 1, but 'auto' on rank 0"),
        ({"tensor_parallel_size": "4"}, "tensor_parallel_size is 4 on rank 1, but 2 on rank 0"),
        ({"STRETTO_CHECK": "True"}, "STRETTO_CHECK is True on rank 1, but False on rank 0"),
        ({"a newer option": "5"}, "a newer option is 5 on rank 1, but unknown on rank 0"),
    ],
)
def test_a_rank_that_differs_is_refused_on_both_sides(
    guest: Guest, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], said: str
) -> None:
    monkeypatch.delenv("STRETTO_CHECK", raising=False)
    guest.hello(**facts)
    told = guest.told()
    assert said in told
    with pytest.raises(InvalidRequest) as error:
        guest.watch.gather("hello", seconds=5)
    assert str(error.value) == told


def test_a_rank_of_another_engine_is_refused(guest: Guest) -> None:
    guest.hello(rank=5)
    assert "rank 5 came to an engine of 2 ranks" in guest.told()


def test_a_rank_that_comes_twice_is_refused() -> None:
    guest = Guest(size=3)
    guest.hello()
    second = Link(socket.create_connection(guest.address))
    time.sleep(0.1)
    second.send(Hello(1, "nowhere", 78, PROTOCOL, facts_of(guest.config)))
    assert "rank 1 came twice (rank 1 (pid 77 on elsewhere), and pid 78 on nowhere)" in guest.told()
    second.close()
    guest.leave()


def test_a_stranger_is_sent_away_and_harms_nobody(guest: Guest) -> None:
    with socket.create_connection(guest.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stranger.settimeout(5.0)
        assert stranger.recv(100) == b""
    guest.hello()
    guest.watch.gather("hello", seconds=5)


def test_a_rank_on_another_host_that_falls_silent_hangs(guest: Guest) -> None:
    guest.hello()
    guest.watch.gather("hello", seconds=5)
    guest.link.send(Beat("running"))
    with pytest.raises(EngineBroken, match=r"rank 1 \(pid 77 on elsewhere\) hangs: no sign of life"):
        guest.watch.gather("sizes", seconds=5)
    assert "hangs" in guest.told()


def test_a_rank_of_torchrun_that_is_stopped_is_seen_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun itself would wait for it for half a minute."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if it were started beside this process
        guest = Guest(pid=rank.pid, launched=True)
        guest.hello()
        guest.watch.gather("hello", seconds=5)
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineBroken, match=r"rank 1 .* hangs: its process is stopped \(SIGSTOP\)"):
            guest.watch.gather("sizes", seconds=5)
        guest.leave()
        assert rank.wait(5.0) == -signal.SIGKILL


def test_a_rank_on_another_host_whose_line_breaks_is_gone(guest: Guest) -> None:
    guest.hello()
    guest.watch.gather("hello", seconds=5)
    guest.link.close()
    with pytest.raises(EngineBroken, match=r"rank 1 .* is gone: it died, or its connection broke"):
        guest.watch.gather("sizes", seconds=5)


def test_digests_that_differ_end_the_engine(guest: Guest) -> None:
    guest.watch.on_digest = lambda rank, data: f"ranks 0 and {rank} differ: {data.decode()}"
    guest.hello()
    guest.watch.gather("hello", seconds=5)
    guest.link.send(Digest(b"both views"))
    with pytest.raises(EngineBroken, match="ranks 0 and 1 differ: both views"):
        guest.watch.gather("sizes", seconds=5)


def test_a_rank_that_sticks_is_found(guest: Guest) -> None:
    guest.hello()
    guest.watch.gather("hello", seconds=5)
    guest.link.send(Beat("running", "host", 12, since_s=60.0, where="launch (stretto/engine/engine.py:3)"))
    said = r"rank 1 .* is stuck: its host has not come back to the loop for 60 s; it is in launch \(stretto/engine/"
    with pytest.raises(EngineBroken, match=said):
        guest.watch.gather("sizes", seconds=5)


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = taken.getsockname()
        with pytest.raises(InvalidRequest, match=rf"cannot meet at 127.0.0.1:{address[1]}: the port is taken"):
            open_listener(Place(0, 2, 0, 1, address))


def test_an_address_of_another_host_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no address of this host"):
        open_listener(Place(0, 2, 0, 1, ("192.0.2.1", 29500)))


def test_a_further_host_with_other_options_ends_with_the_message() -> None:
    """Its rank is a real one: it is refused before it loads anything."""
    port = free_port()
    config = EngineConfig("model", tensor_parallel_size=2, nnodes=2, dist_init_addr=f"127.0.0.1:{port}", seed=1)
    place = Place(0, 2, 0, 1, ("127.0.0.1", port))
    leader = Watch(place, open_listener(place), facts_of(config), list)
    other = EngineConfig(
        "model", tensor_parallel_size=2, nnodes=2, node_rank=1, dist_init_addr=f"127.0.0.1:{port}", seed=2
    )
    with pytest.raises(EngineBroken, match="seed is 2 on rank 1, but 1 on rank 0; start all ranks alike"):
        host_ranks(other, Place(1, 2, 0, 1, ("127.0.0.1", port)))
    leader.close(orderly=False)


# -- a leader that is lost --------------------------------------------------------------------------------------------


class Ended:
    """Why a follower was told to end."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, bool]] = []

    def __call__(self, reason: str, told: bool) -> None:
        self.reasons.append((reason, told))

    def wait(self) -> tuple[str, bool]:
        until = time.monotonic() + 9.0
        while not self.reasons:
            assert time.monotonic() < until, "the follower goes on"
            time.sleep(0.01)
        return self.reasons[0]


@pytest.mark.parametrize("loss", ["gone", "hangs", "no rank"])
def test_a_follower_sees_that_its_leader_is_lost(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    monkeypatch.setattr(patience, "HANG_SECONDS", 0.5)
    with open_listener(Place(0, 2, 0, 1, None)) as listener:
        ended = Ended()
        place = Place(1, 2, 0, 1, listener.getsockname())
        follower = Follower(EngineConfig("model", tensor_parallel_size=2), place, None, ended)
        follower.watchdog.enter("running")
        leader, _ = listener.accept()
        if loss == "gone":
            leader.close()
        elif loss == "no rank":
            leader.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        reason, told = ended.wait()
        leader.close()
    said = {"gone": "the leader (rank 0) is gone", "hangs": "the leader (rank 0) hangs: no sign", "no rank": "talks"}
    assert said[loss] in reason
    assert not told
    with pytest.raises(EngineBroken, match=re.escape(reason)):
        follower.check()
    follower.watchdog.leave(0)


def test_a_name_that_nobody_knows_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NAME_SECONDS", 0.2)
    told: list[str] = []
    with pytest.raises(EngineBroken, match=r"found no leader at nowhere\.invalid:29500 within 0\.2 s \(.*[Nn]ame"):
        connect_to_leader(Place(1, 2, 0, 1, ("nowhere.invalid", 29500)), 600.0, told.append)
    assert told


STOPPED_LEADER = """
    import signal, sys
    from pathlib import Path
    from tests import test_rank_watch
    phase, directory = sys.argv[1], Path(sys.argv[2])
    get_there, lingers_in = test_rank_watch.PHASES[phase]
    leader = test_rank_watch.FakeLeader(directory, lingers_in=lingers_in)
    get_there(leader)
    if phase == "running":
        leader.watch.rest(True)
    print("there", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("phase", PHASES)
def test_a_leader_that_is_stopped_ends_the_ranks_of_its_host(tmp_path: Path, phase: str) -> None:
    """In every phase as soon as a stopped rank ends all, though silence is forgiven for longer; also when it rests."""
    command = [sys.executable, "-c", textwrap.dedent(STOPPED_LEADER), phase, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stderr is not None
        assert leader.stdout.readline() == "there\n"
        ranks = children_of(leader.pid)
        os.kill(leader.pid, signal.SIGSTOP)
        try:
            assert len(ranks) == 2
            wait_until_dead(ranks, 9.0)
        finally:
            leader.kill()
        said = leader.stderr.read()
    assert said.count("hangs: its process is stopped (SIGSTOP)") == 2, said


@pytest.mark.parametrize("end", ["dies", "goes on and hangs"])
def test_a_leader_that_rests_may_be_silent(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Its user's code may hold the GIL; but its end is seen, and so is a silence after it has gone on."""
    monkeypatch.setattr(patience, "HANG_SECONDS", 0.5)
    with open_listener(Place(0, 2, 0, 1, None)) as listener:
        ended = Ended()
        place = Place(1, 2, 0, 1, listener.getsockname())
        follower = Follower(EngineConfig("model", tensor_parallel_size=2), place, None, ended)
        follower.watchdog.enter("running")
        leader = Link(listener.accept()[0])
        leader.send(Beat(resting=True))
        time.sleep(1.5)
        assert not ended.reasons
        if end == "dies":
            leader.close()
        else:
            leader.send(Beat())
        reason, _ = ended.wait()
        leader.close()
    assert ("is gone" if end == "dies" else "hangs: no sign of life") in reason
    follower.watchdog.leave(0)


def test_a_follower_that_finds_no_leader_says_where_it_looked() -> None:
    place = Place(1, 2, 0, 1, ("127.0.0.1", free_port()))
    with pytest.raises(EngineBroken, match=rf"rank 1 found no leader at 127.0.0.1:{place.address[1]}"):  # type: ignore[index]
        connect_to_leader(place, seconds=0.0)


# -- who is stuck ----------------------------------------------------------------------------------------------------

LONG, SHORT = 60.0, 0.5


@pytest.mark.parametrize(
    ("beats", "stuck"),
    [
        ({0: Beat("running", "device", 5, LONG), 1: Beat("running", "device", 5, LONG)}, None),  # a long step
        ({0: Beat("running", "outside", 5, LONG), 1: Beat("running", "receive", 5, LONG)}, None),  # idle
        ({0: Beat("running", "device", 5, LONG), 1: Beat("running", "host", 4, LONG)}, 1),
        ({0: Beat("running", "host", 5, LONG), 1: Beat("running", "receive", 5, LONG)}, 0),
        ({0: Beat("running", "device", 5, LONG), 1: Beat("running", "receive", 5, LONG)}, 1),
        ({0: Beat("running", "device", 5, SHORT), 1: Beat("running", "receive", 5, LONG)}, None),
        ({0: Beat("running", "outside", 6, LONG), 1: Beat("running", "device", 5, LONG)}, 1),
        ({0: Beat("running", "host", 5, SHORT), 1: Beat("running", "host", 5, SHORT)}, None),
    ],
)
def test_a_rank_is_stuck_if_it_holds_up_the_others(beats: dict[int, Beat], stuck: int | None) -> None:
    found = find_stuck(beats, limit=6.0)
    assert (None if found is None else found[0]) == stuck


def test_who_waits_for_a_device_too_long_says_where() -> None:
    """It need not be the device: a handler of a signal may keep the host, in the middle of its wait."""
    place = "handler (script.py:12) in wait (stretto/device/cpu.py:7)"
    beats = {0: Beat("running", "device", 57, 5.2, where=place), 1: Beat("running", "receive", 58, 5.1)}
    said = f"is stuck: its device has not finished step 57 for 5 s, which others have; its host is in {place}"
    assert find_stuck(beats, limit=5.0) == (0, said)
