"""The control plane's transports: every message, in order, once, at every rank; and an end that everybody hears of."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.distributed.transport import (
    NAMES,
    ConnectFailed,
    FollowerBehind,
    LeaderTransport,
    Limits,
    PeerGone,
    TransportError,
    choose,
    connect,
    listen,
)
from stretto.distributed.transport.ring import RingReader, RingWriter
from stretto.distributed.transport.shared_memory import SharedMemoryFollower, SharedMemoryLeader
from tests.helpers.transport_rank import WAIT_S, Failed, RankProcess, digests, message, start_server

RING = 4096
SMALL = Limits(largest_message=2**22, pending_bytes=RING, linger_s=5.0)
SIZES = [0, 1, 7, 8, 0, 1000, 1001, 4079, 4080, 4081, 4096, 5000, 16384, 16385, 2**18 + 1, 0, 2**20, 3]
KINDS = [*((name, None) for name in NAMES), ("zeromq", "127.0.0.1")]
kinds = pytest.mark.parametrize(("name", "host"), KINDS, ids=["shared_memory", "zeromq", "gloo", "zeromq-tcp"])


@pytest.fixture(scope="module", autouse=True)
def server_of_ranks() -> None:
    """Before the tests change where temporary files are."""
    start_server()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name, which pytest's own do not when it runs in parallel."""
    with tempfile.TemporaryDirectory(prefix="st") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def nothing_is_left(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, however it went: no socket's directory, nothing in shared memory, no thread of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = set(os.listdir("/dev/shm"))
    yield
    assert os.listdir(scratch) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "stretto" in name}


@pytest.fixture
def ranks(scratch: Path) -> Iterator[Callable[[], RankProcess]]:
    """Makes processes that end with the test."""
    made: list[RankProcess] = []

    def make() -> RankProcess:
        made.append(RankProcess())
        made[-1].do("temporary_directory", str(scratch))
        return made[-1]

    yield make
    for rank in made:
        rank.kill()


@contextlib.contextmanager
def connected(
    make: Callable[[], RankProcess], name: str, host: str | None, size: int = 3, limits: Limits = SMALL
) -> Iterator[tuple[LeaderTransport, list[RankProcess]]]:
    """A leader here and followers in processes of their own."""
    leader = listen(name, size, host, limits)
    try:
        followers = [make() for _ in range(1, size)]
        for rank, follower in enumerate(followers, 1):
            follower.start("connect", leader.address, rank, size, WAIT_S, limits)
        leader.wait_for_followers(WAIT_S)
        for follower in followers:
            follower.result()
        yield leader, followers
    finally:
        leader.close()


def publish_until_error(leader: LeaderTransport, data: bytes = b"x") -> TransportError:
    """The error that sooner or later ends publishing."""
    for _ in range(10_000):
        try:
            leader.publish(data)
        except TransportError as error:
            return error
        threading.Event().wait(0.001)
    raise AssertionError("publishing goes on")


@kinds
def test_every_follower_gets_every_message_once_and_in_order(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    with connected(ranks, name, host) as (leader, followers):
        for follower in followers:
            follower.start("receive_all")
        sent = [message(index, size) for index, size in enumerate(SIZES)]
        for data in sent:
            leader.publish(data)
        leader.close()
        for follower in followers:
            assert follower.result() == (digests(sent), 0, True)
            follower.do("close")


@pytest.mark.parametrize("name", NAMES)
def test_messages_of_random_sizes_arrive(ranks: Callable[[], RankProcess], name: str) -> None:
    with connected(ranks, name, None) as (leader, followers):
        count = 0

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.one_of(st.integers(0, 64), st.integers(RING - 40, RING + 8), st.integers(0, 9 * RING))))
        def run(sizes: list[int]) -> None:
            nonlocal count
            sent = [message(index, size) for index, size in enumerate(sizes, count)]
            count += len(sent)
            for follower in followers:
                follower.start("receive", len(sent), WAIT_S)
            for data in sent:
                leader.publish(data)
            assert [follower.result() for follower in followers] == [digests(sent)] * 2

        run()
        for follower in followers:
            assert follower.do("receive", 1, 0.0) == [None]
            follower.do("close")


@kinds
def test_a_follower_may_read_late(ranks: Callable[[], RankProcess], name: str, host: str | None) -> None:
    limits = Limits(pending_bytes=2**20)
    with connected(ranks, name, host, limits=limits) as (leader, (slow, fast)):
        sent = [message(index, index) for index in range(200)]
        # Gloo's tree may pass a message on through the slow one; the others never let it keep the fast one waiting.
        if name != "gloo":
            fast.start("receive", len(sent), WAIT_S)
        for data in sent:
            leader.publish(data)
        if name == "gloo":
            fast.start("receive", len(sent), WAIT_S)
            slow.start("receive", len(sent), WAIT_S)
            assert slow.result() == fast.result() == digests(sent)
        else:
            assert fast.result() == digests(sent)
            assert slow.do("receive", len(sent), WAIT_S) == digests(sent)
        for follower in (slow, fast):
            follower.do("close")


@kinds
def test_a_follower_that_does_not_read_ends_publishing_instead_of_memory(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    limits = Limits(pending_bytes=2**16, patience_s=0.2, linger_s=0.1)
    with connected(ranks, name, host, size=2, limits=limits) as (leader, (follower,)):
        count = 0
        error = None
        while error is None:
            try:
                leader.publish(message(count, 2000))
                count += 1
            except FollowerBehind as behind:
                error = behind
        assert "has not read its messages" in str(error)
        assert error.rank == (None if name == "gloo" else 1)
        assert 5 < count <= 2**16 // 2000
        with pytest.raises(FollowerBehind):
            leader.publish(b"more")
        with pytest.raises(FollowerBehind):
            leader.check()
        leader.close()
        if name == "gloo":  # its messages end with the leader
            return
        got, rank, orderly = follower.do("receive_all")
        assert got[:count] == digests(message(index, 2000) for index in range(len(got[:count])))
        assert (rank, len(got) >= count - 1) == (0, True)
        follower.do("close")
        assert orderly in (True, False)


@kinds
def test_a_wait_ends_in_time_and_loses_nothing(ranks: Callable[[], RankProcess], name: str, host: str | None) -> None:
    with connected(ranks, name, host, size=2) as (leader, (follower,)):
        assert follower.do("receive", 2, 0.0) == [None, None]
        assert follower.do("receive", 2, 0.02) == [None, None]
        leader.publish(b"a")
        assert follower.do("receive", 1, WAIT_S) == digests([b"a"])
        follower.start("receive", 1, None)
        leader.publish(b"b" * 10_000)
        assert follower.result() == digests([b"b" * 10_000])
        follower.do("close")


@kinds
def test_a_killed_leader_ends_every_follower(ranks: Callable[[], RankProcess], name: str, host: str | None) -> None:
    leader, waiting, reading = ranks(), ranks(), ranks()
    address = leader.do("listen", name, 3, host, SMALL)
    for rank, follower in enumerate((waiting, reading), 1):
        follower.start("connect", address, rank, 3, WAIT_S, SMALL)
    leader.do("wait", WAIT_S)
    waiting.result(), reading.result()
    waiting.start("receive_all")
    sizes = [10, 0, 1000]
    if name == "gloo":  # a message lives as long as the leader there
        reading.start("receive", 3, WAIT_S)
    leader.do("publish", sizes)
    sent = digests(message(index, size) for index, size in enumerate(sizes))
    if name == "gloo":
        assert reading.result() == sent
        sent_to_reading: list[tuple[int, str]] = []
    else:
        sent_to_reading = sent
    leader.kill()
    got, rank, orderly = waiting.result()
    assert got == sent[: len(got)]
    assert rank in (0, None)
    assert not orderly
    got, rank, orderly = reading.do("receive_all")
    assert got == sent_to_reading[: len(got)]
    assert not orderly
    if name == "shared_memory":
        assert got == sent  # what was published is in memory, whoever is alive
    with pytest.raises(Failed, match="PeerGone"):
        reading.do("receive", 1, 0.0)
    waiting.do("close"), reading.do("close")


def test_a_leader_killed_in_the_middle_of_a_message_leaves_no_part_of_it(ranks: Callable[[], RankProcess]) -> None:
    leader, follower = ranks(), ranks()
    address = leader.do("listen", "shared_memory", 2, None, SMALL)
    follower.start("connect", address, 1, 2, WAIT_S, SMALL)
    leader.do("wait", WAIT_S)
    follower.result()
    leader.start("publish", [5, 10 * RING])  # the second one waits for room
    assert follower.do("receive", 1, WAIT_S) == digests([message(0, 5)])
    assert follower.do("receive", 1, 0.0) in ([None], digests([message(1, 10 * RING)]))
    leader.kill()
    got, rank, orderly = follower.do("receive_all")
    assert got in ([], digests([message(1, 10 * RING)]))
    assert (rank, orderly) == (0, False)
    follower.do("close")


@kinds
def test_a_killed_follower_ends_publishing(ranks: Callable[[], RankProcess], name: str, host: str | None) -> None:
    with connected(ranks, name, host) as (leader, (killed, other)):
        other.start("receive_all")
        leader.check()
        killed.kill()
        error = publish_until_error(leader)
        assert isinstance(error, PeerGone)
        assert (error.rank, error.orderly) == (None if name == "gloo" else 1, False)
        with pytest.raises(PeerGone):
            leader.publish(b"more")
        leader.close()
        got, _, _ = other.result()
        assert set(got) <= set(digests([b"x"]))
        other.do("close")


@kinds
def test_a_follower_that_closes_is_named(ranks: Callable[[], RankProcess], name: str, host: str | None) -> None:
    with connected(ranks, name, host) as (leader, (closing, other)):
        other.start("receive_all")
        closing.do("close")
        error = publish_until_error(leader)
        assert isinstance(error, PeerGone)
        assert (error.rank, error.orderly) == (1, True)
        assert "rank 1 closed the control plane" in str(error)
        leader.close()
        assert other.result()[1] in (0, 1, None)
        other.do("close")
        with pytest.raises(Failed, match="closed"):
            closing.do("receive", 1, 0.0)


@kinds
def test_a_follower_that_comes_late_misses_nothing(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    leader = listen(name, 3, host, SMALL)
    try:
        early, late = ranks(), ranks()
        early.start("connect", leader.address, 1, 3, WAIT_S, SMALL)
        with pytest.raises(ConnectFailed, match="before wait_for_followers"):
            leader.publish(b"too early")
        waiting = threading.Thread(target=leader.wait_for_followers, args=(WAIT_S,))
        waiting.start()
        late.do("receive", 0, 0.0)  # alive, but not there
        late.do("connect", leader.address, 2, 3, WAIT_S, SMALL)
        waiting.join()
        early.result()
        leader.publish(b"first")
        assert [rank.do("receive", 1, WAIT_S) for rank in (late, early)] == [digests([b"first"])] * 2
        for rank in (late, early):
            rank.do("close")
    finally:
        leader.close()


@kinds
def test_a_missing_follower_is_named(name: str, host: str | None) -> None:
    leader = listen(name, 3, host)
    with pytest.raises(ConnectFailed, match=r"within 0\.1 s: 1, 2"):
        leader.wait_for_followers(0.1)
    leader.close()
    leader.close()
    with pytest.raises(TransportError):
        leader.publish(b"")


@kinds
def test_who_does_not_belong_is_refused_and_told_why(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    leader = listen(name, 3, host, SMALL)
    waiting = threading.Thread(target=leader.wait_for_followers, args=(WAIT_S,))
    waiting.start()
    first, second, stranger = ranks(), ranks(), ranks()
    try:
        first.start("connect", leader.address, 1, 3, WAIT_S, SMALL)
        if name == "gloo":  # returns only when all are there; the claim of the rank is made before
            threading.Event().wait(0.3)
        else:
            first.result()
        with pytest.raises(Failed, match=r"refused: rank 1 is connected already|refused: rank 1 of 4"):
            stranger.do("connect", leader.address, 1, 3, WAIT_S, SMALL)
        with pytest.raises(Failed, match="refused: rank 3 of 4 does not belong to a control plane of 3 ranks"):
            stranger.do("connect", leader.address, 3, 4, WAIT_S, SMALL)
        if "#" in leader.address:
            wrong = leader.address[:-32] + "0" * 32
            with pytest.raises(Failed, match="refused: this is another engine's control plane"):
                stranger.do("connect", wrong, 2, 3, WAIT_S, SMALL)
        second.do("connect", leader.address, 2, 3, WAIT_S, SMALL)
        waiting.join()
        if name == "gloo":
            first.result()
        leader.publish(b"all here")
        assert [rank.do("receive", 1, WAIT_S) for rank in (first, second)] == [digests([b"all here"])] * 2
        for rank in (first, second):
            rank.do("close")
    finally:
        leader.close()
        waiting.join()


@kinds
def test_nobody_answers_at_the_address_of_a_leader_that_is_gone(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    leader = listen(name, 2, host)
    leader.close()
    with pytest.raises(Failed, match="ConnectFailed: rank 1"):
        ranks().do("connect", leader.address, 1, 2, 0.5)


@kinds
def test_a_message_that_is_too_long_is_refused_before_anything_is_sent(
    ranks: Callable[[], RankProcess], name: str, host: str | None
) -> None:
    limits = Limits(largest_message=1000)
    with connected(ranks, name, host, size=2, limits=limits) as (leader, (follower,)):
        with pytest.raises(ValueError, match=r"1,001 bytes; at most 1,000"):
            leader.publish(b"x" * 1001)
        leader.publish(b"y" * 1000)
        assert follower.do("receive", 1, WAIT_S) == digests([b"y" * 1000])
        follower.do("close")


def test_only_the_given_address_is_listened_to() -> None:
    def listening() -> set[str]:
        """Local addresses, in hexadecimal, of this process's listening TCP sockets."""
        own = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        rows = [
            row.split()
            for file in ("tcp", "tcp6")
            for row in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]
        ]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}

    before = listening()
    for name, host, adds in (
        ("shared_memory", None, 0),
        ("zeromq", None, 0),
        ("zeromq", "127.0.0.1", 1),
        ("gloo", None, 1),
    ):
        leader = listen(name, 2, host)
        loopback = f"{struct.unpack('=I', socket.inet_aton('127.0.0.1'))[0]:08X}"
        assert [where.split(":")[0] for where in listening() - before] == [loopback] * adds
        leader.close()


def test_shared_memory_and_zeromq_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from stretto.distributed.transport import choose, listen\n"
        "for name in ('shared_memory', 'zeromq'): listen(name, 2).close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STRANGER = """
    import os, sys
    from stretto.distributed.transport import ConnectFailed, connect, shared_memory, zeromq
    os.setuid(65534)
    try:
        connect(sys.argv[1], 1, 2, 2.0)
    except ConnectFailed as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("name", ["shared_memory", "zeromq"])
def test_another_user_of_the_host_is_no_rank(name: str) -> None:
    leader = listen(name, 2)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STRANGER), leader.address], stdout=subprocess.PIPE, text=True
    ) as stranger:
        with pytest.raises(ConnectFailed, match="did not connect"):
            leader.wait_for_followers(4.0)
        assert stranger.communicate()[0].startswith("rank 1: ")
    leader.close()


RAW_STRANGER = """
    import os, socket, sys
    from stretto.distributed.transport.shared_memory import _HELLO, _WHAT
    os.setuid(65534)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(sys.argv[1].removeprefix("shm:").replace("@", "\\0"))
    print("connected", flush=True)
    try:
        line.send(_HELLO.pack(_WHAT, 1, 2))
        answer, descriptors, _, _ = socket.recv_fds(line, 4096, 2)
        print(answer, descriptors)
    except OSError:
        print(b"", [])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_who_asks_nobody_is_given_no_memory() -> None:
    leader = listen("shared_memory", 2)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RAW_STRANGER), leader.address], stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        with pytest.raises(ConnectFailed, match="did not connect"):
            leader.wait_for_followers(1.0)
        assert stranger.communicate()[0] == "b'' []\n"
    leader.close()


@pytest.mark.parametrize("name", ["shared_memory", "zeromq"])
def test_a_leader_that_is_killed_before_all_are_there_leaves_no_file(scratch: Path, name: str) -> None:
    """Nobody else may be left who could remove one."""
    code = (
        "import os, signal, sys\n"
        "from stretto.distributed.transport import listen\n"
        "leader = listen(sys.argv[1], 2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    assert subprocess.run([sys.executable, "-c", code, name], env=environment).returncode == -signal.SIGKILL
    assert os.listdir(scratch) == []


def test_the_topology_decides() -> None:
    assert choose("auto", single_host=True) == "shared_memory"
    assert choose("auto", single_host=False) == "zeromq"
    assert [choose(name, single_host=True) for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match="one host only"):
        choose("shared_memory", single_host=False)
    with pytest.raises(ValueError, match="choose one of: auto, shared_memory, zeromq, gloo"):
        choose("carrier pigeons", single_host=True)


@pytest.mark.parametrize(
    ("address", "rank", "size", "text"),
    [
        ("http://127.0.0.1", 1, 2, "not the address of a control plane"),
        ("zmq+tcp://127.0.0.1:1", 1, 2, "not the address of a ZeroMQ control plane"),
        ("gloo://127.0.0.1", 1, 2, "not the address of a Gloo control plane"),
        ("shm:/tmp/x", 0, 2, "between 1 and size - 1"),
        ("shm:/tmp/x", 2, 2, "between 1 and size - 1"),
    ],
)
def test_bad_addresses_and_ranks_are_refused(address: str, rank: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        connect(address, rank, size, 1.0)


def test_limits_are_checked() -> None:
    for wrong in ({"largest_message": 0}, {"largest_message": 2**32}, {"pending_bytes": 63}, {"patience_s": -1.0}):
        with pytest.raises(ValueError):
            Limits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        listen("zeromq", 1)
    with pytest.raises(ValueError):
        listen("shared_memory", 2, "127.0.0.1")


def shared_memory_pair(limits: Limits = SMALL) -> tuple[SharedMemoryLeader, SharedMemoryFollower]:
    """Both ends in this process."""
    leader = SharedMemoryLeader(2, limits)
    waiting = threading.Thread(target=leader.wait_for_followers, args=(WAIT_S,))
    waiting.start()
    follower = connect(leader.address, 1, 2, WAIT_S, limits)
    waiting.join()
    assert isinstance(follower, SharedMemoryFollower)
    return leader, follower


def test_only_who_sleeps_costs_the_leader_a_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = shared_memory_pair()
    bells: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: bells.append(fd) or write(fd, data))  # type: ignore[func-returns-value]
    for index in range(100):
        leader.publish(b"%d" % index)
    assert [follower.receive(0.0) for _ in range(101)] == [*(b"%d" % index for index in range(100)), None]
    assert not bells
    reading = threading.Thread(target=follower.receive, args=(None,))
    reading.start()
    while not leader._ring.sleepers():
        threading.Event().wait(0.001)
    leader.publish(b"wake up")
    reading.join()
    assert len(bells) == 1
    leader.close()
    follower.close()


@pytest.mark.parametrize("sent_before", [b"", b"x" * 3 * RING], ids=["nothing", "a part"])
def test_what_comes_between_looking_and_waiting_is_noticed(sent_before: bytes) -> None:
    leader, follower = shared_memory_pair()
    publishing = threading.Thread(target=leader.publish, args=(sent_before or b"late",))
    take, looks = follower._take, 0

    def look_then_publish() -> bytes | None:
        nonlocal looks
        looks += 1
        message = take()
        if looks == 1:
            publishing.start()
            while not follower._ring.available():
                threading.Event().wait(0.001)
        return message

    follower._take = look_then_publish  # type: ignore[method-assign]
    assert follower.receive(WAIT_S) == (sent_before or b"late")
    publishing.join()
    leader.close()
    follower.close()


def test_what_is_not_a_ring_is_refused() -> None:
    fd = os.memfd_create("something else")
    os.ftruncate(fd, 16384)
    with pytest.raises(ConnectFailed):
        RingReader(fd, 1, 2)
    os.close(fd)


def test_damaged_memory_is_noticed() -> None:
    writer = RingWriter(2, 64)
    reader = RingReader(writer.fd, 1, 2)
    writer._words[16] = 1000  # more than the ring holds
    with pytest.raises(TransportError, match="damaged"):
        reader.available()
    reader._words[32] = 1000  # more than was written
    with pytest.raises(TransportError, match="damaged"):
        writer.write(memoryview(b"x" * 65))
    reader.close()
    writer.close()
    leader, follower = shared_memory_pair()
    leader._number = 7
    leader.publish(b"not the first")
    for _ in range(2):
        with pytest.raises(TransportError, match="message 7 of 13 bytes arrived in the place of number 0"):
            follower.receive(1.0)
    leader.close()
    follower.close()


def test_the_memory_cannot_be_shrunk_under_the_leader() -> None:
    writer = RingWriter(2, 64)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)
    writer.close()
