"""Several hosts, made of network namespaces; and ranks that torchrun has started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto import LLM, SamplingParams
from tests.helpers.last_threads import last_threads
from tests.helpers.processes import free_port, nothing_left

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "max_model_len": 16000}


@pytest.fixture(scope="module")
def expected(dummy_model: Path) -> str:
    """What one rank answers."""
    with LLM(str(dummy_model), **OPTIONS) as llm:
        return str(list(llm.generate(["the quick"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids))


class Hosts:
    """Two network namespaces joined by a cable."""

    ADDRESSES = ("10.77.43.1", "10.77.43.2")

    def __init__(self) -> None:
        self.names = [f"stretto-{os.getpid()}-{host}" for host in (0, 1)]
        self.cables = [f"st{os.getpid() % 100_000}h{host}" for host in (0, 1)]

    def make(self) -> str | None:
        """Why it cannot be done; None if it is."""
        if shutil.which("ip") is None:
            return "needs iproute2"
        for name in self.names:
            if why := self._try("netns", "add", name):
                return why
        ends = [("name", cable, "netns", name) for cable, name in zip(self.cables, self.names, strict=True)]
        if why := self._try("link", "add", *ends[0], "type", "veth", "peer", *ends[1]):
            return why
        for name, cable, address in zip(self.names, self.cables, self.ADDRESSES, strict=True):
            for command in (
                ("addr", "add", f"{address}/24", "dev", cable),
                ("link", "set", cable, "up"),
                ("link", "set", "lo", "up"),
            ):
                if why := self._try("-n", name, *command):
                    return why
        return None

    def cut(self) -> None:
        """Pull the cable: nobody is told anything."""
        assert self._try("-n", self.names[0], "link", "set", self.cables[0], "down") is None

    def remove(self) -> None:
        for name in self.names:
            self._try("netns", "del", name)

    def start(self, host: int, *command: str) -> subprocess.Popen[str]:
        """Run `command` on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _try(self, *arguments: str) -> str | None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        return f"ip {' '.join(arguments)}: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    why_not = hosts.make()
    if why_not is not None:
        hosts.remove()
        pytest.skip(f"no network namespaces: {why_not}")
    yield hosts
    hosts.remove()


LEADER = """
    import sys
    from stretto import LLM, SamplingParams
    llm = LLM(sys.argv[1], tensor_parallel_size=2, nnodes=2, dist_init_addr=sys.argv[2], load_format="dummy",
              dtype="float32", max_model_len=16000, overlap_depth=2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    print(list(llm.generate(["the quick"], params, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
    if sys.argv[3] == "close":
        llm.close()
    else:
        llm.generate(["the quick"], SamplingParams(max_tokens=15_000, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("end", ["close", "cut"])
def test_two_hosts_are_one_engine_and_end_together(hosts: Hosts, dummy_model: Path, expected: str, end: str) -> None:
    """By the leader's `close`; or because the network between them breaks while they compute."""
    address = f"{hosts.ADDRESSES[0]}:{free_port()}"
    options = ("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "16000", "--overlap-depth", "2")
    ranks = ("-tp", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address)
    with nothing_left():
        follower = hosts.start(
            1, sys.executable, "-m", "stretto", "generate", "--model", str(dummy_model), *options, *ranks, "unused"
        )
        leader = hosts.start(0, sys.executable, "-c", textwrap.dedent(LEADER), str(dummy_model), address, end)
        try:
            assert leader.stdout is not None
            assert leader.stdout.readline().strip() == expected
            if end == "cut":
                hosts.cut()
            codes = leader.wait(PATIENCE), follower.wait(PATIENCE)
            said = leader.communicate()[1], follower.communicate()[1]
        finally:
            for process in (leader, follower):
                process.kill()
                process.communicate()
    assert "serving the leader as rank 1 of 2" in said[1]
    if end == "close":
        assert codes == (0, 0), said
    else:
        assert codes == (1, 1), said
        assert "EngineBroken: rank 1 (pid " in said[0]
        assert "hangs: no sign of life" in said[0]
        assert "the leader (rank 0) hangs: no sign of life" in said[1]


SCRIPT = """
    from tests.helpers.last_threads import tell_last_threads
    tell_last_threads()
    import os, sys
    from stretto import LLM, SamplingParams
    with LLM(sys.argv[1], tensor_parallel_size=2, load_format="dummy", dtype="float32", max_model_len=16000) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        tokens = list(llm.generate(["the quick"], params, use_tqdm=False)[0].outputs[0].token_ids)
        print("rank", os.environ["RANK"], tokens, flush=True)
"""


def test_ranks_of_torchrun_are_one_engine(tmp_path: Path, dummy_model: Path, expected: str) -> None:
    """The script goes on after `LLM(...)` on rank 0 only; the others serve it, and exit with 0."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    with nothing_left():
        done = subprocess.run(
            [*command, str(script), str(dummy_model)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank 0 {expected}"]
    threads = last_threads(done.stderr)
    assert len(threads) == 2
    assert not any("gloo" in names for names in threads)


LAUNCHED = """
    from tests.helpers.last_threads import tell_last_threads
    tell_last_threads()
    import gc, os, sys, time
    from stretto import LLM, SamplingParams
    from stretto.errors import EngineBroken

    def work():
        llm = LLM(sys.argv[1], tensor_parallel_size=2, load_format="dummy", dtype="float32", max_model_len=16000,
                  control_transport=sys.argv[3])
        stream = llm.stream("the quick", SamplingParams(max_tokens=15_000, ignore_eos=True))
        next(stream)
        print("decoding", flush=True)
        for _ in stream:
            pass

    if sys.argv[2] == "lets it pass":
        work()
    try:
        work()
    except EngineBroken as error:
        print(error, flush=True)
    for _ in range(50):  # the device's thread may still be on its way out of a sum
        gc.collect()
        left = [thing for thing in gc.get_objects() if type(thing).__name__ == "Runtime"]
        if not left:
            break
        del left
        time.sleep(0.1)
    else:
        raise AssertionError("weights and cache are still there")
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("goes on", flush=True)
"""


class Launched:
    """Two ranks, each a process that another program has started, as torchrun does. But nobody ends one for another."""

    def __init__(self, script: Path, *arguments: str) -> None:
        script.write_text(textwrap.dedent(LAUNCHED))
        common = {
            "PYTHONPATH": str(ROOT),
            "STRETTO_HANG_SECONDS": "3",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def wait_until_decoding(self) -> None:
        assert self.ranks[0].stdout is not None
        assert self.ranks[0].stdout.readline() == "decoding\n", self.ranks[0].communicate()

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("lost", "sig", "user", "transport"),
    [
        (0, signal.SIGSTOP, "lets it pass", "auto"),
        (0, signal.SIGSTOP, "catches it", "gloo"),
        (0, signal.SIGKILL, "catches it", "auto"),
        (1, signal.SIGSTOP, "lets it pass", "auto"),
    ],
)
def test_a_rank_of_torchrun_ends_in_time_when_the_other_is_lost(
    tmp_path: Path, dummy_model: Path, lost: int, sig: signal.Signals, user: str, transport: str
) -> None:
    """Whether the user's script catches the error or not: neither a collection nor the interpreter's end, here or in a
    forked child, waits for a sum that the other rank takes no part in. A stopped follower ends too; torchrun would let
    it be for half a minute.
    """
    launched = Launched(tmp_path / "script.py", str(dummy_model), user, transport)
    try:
        launched.wait_until_decoding()
        victim, other = launched.ranks[lost], launched.ranks[1 - lost]
        victim.send_signal(sig)
        stopped_at = time.monotonic()
        said, errors = other.communicate(timeout=10.0)
        if lost == 1:
            victim.wait(max(0.1, stopped_at + 10.0 - time.monotonic()))
    finally:
        launched.end()
    why = "hangs: its process is stopped (SIGSTOP)"
    if lost == 0:
        why = "hangs: no sign of life" if sig == signal.SIGSTOP else "the leader (rank 0) is gone"
    assert why in said + errors
    assert other.returncode == (1 if user == "lets it pass" else 0), errors
    assert user == "lets it pass" or said.endswith("goes on\n")
    if lost == 1:
        assert victim.returncode == -signal.SIGKILL
        assert not any("gloo" in names for names in last_threads(errors))
