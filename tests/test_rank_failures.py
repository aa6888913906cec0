"""A rank is lost while a real engine loads, computes or ends: the call in progress says which and why, and all end.

What each kind of loss looks like to the watch is in test_rank_watch.py, without engines and for more phases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto import LLM, SamplingParams
from stretto.errors import EngineBroken
from tests.helpers.last_threads import last_threads
from tests.helpers.processes import children_of, nothing_left, ranks_of, wait_until_dead

ROOT = Path(__file__).parent.parent
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 16000,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4096,
    "tensor_parallel_size": 2,
}
LIMIT = 10.0
"""Seconds in which every rank must have ended."""


class Hit:
    """A signal for rank 1, and when it was sent."""

    def __init__(self, sig: signal.Signals) -> None:
        self.signal = sig
        self.sent_at = 0.0

    def now(self) -> None:
        (pid,) = ranks_of(os.getpid())
        self.sent_at = time.monotonic()
        os.kill(pid, self.signal)

    def soon(self) -> None:
        """While the calling thread goes on."""
        threading.Timer(0.3, self.now).start()


def lost_while_loading(model: str, hit: Hit) -> None:
    def progress(what: str, fraction: float) -> None:
        if what == "loading weights" and not hit.sent_at:
            hit.now()

    LLM(model, on_progress=progress, **OPTIONS)


def lost_in_prefill(model: str, hit: Hit) -> None:
    with LLM(model, **OPTIONS) as llm:
        hit.soon()
        llm.generate([{"prompt_token_ids": [5] * 15_900}] * 40, SamplingParams(max_tokens=2), use_tqdm=False)


def lost_in_decode(model: str, hit: Hit) -> None:
    with LLM(model, **OPTIONS) as llm:
        stream = llm.stream("the quick", SamplingParams(max_tokens=15_000, ignore_eos=True))
        next(stream)
        hit.soon()
        for _ in stream:
            pass


def lost_while_idle(model: str, hit: Hit) -> None:
    with LLM(model, **OPTIONS) as llm:
        llm.generate(["the quick"], SamplingParams(max_tokens=2), use_tqdm=False)
        hit.now()
        while True:
            llm.generate(["the quick"], SamplingParams(max_tokens=2), use_tqdm=False)


CASES: list[tuple[Callable[[str, Hit], None], signal.Signals]] = [
    (lost_while_loading, signal.SIGKILL),
    (lost_in_prefill, signal.SIGSTOP),
    (lost_in_decode, signal.SIGKILL),
]
"""Each costs a start of an engine; STRETTO_ALL_FAILURES=1 runs all combinations."""
if os.environ.get("STRETTO_ALL_FAILURES"):
    CASES = [
        (case, sig)
        for case in (lost_while_loading, lost_in_prefill, lost_in_decode, lost_while_idle)
        for sig in (signal.SIGKILL, signal.SIGSTOP)
    ]


@pytest.mark.parametrize(("case", "sig"), CASES, ids=lambda value: value.__name__ if callable(value) else value.name)
def test_the_call_in_progress_says_which_rank_is_lost(
    dummy_model: Path, case: Callable[[str, Hit], None], sig: signal.Signals
) -> None:
    hit = Hit(sig)
    with nothing_left():
        with pytest.raises(EngineBroken) as error:
            case(str(dummy_model), hit)
        assert time.monotonic() - hit.sent_at < LIMIT
        message = str(error.value)
        assert message.startswith("rank 1 (pid ")
        cause = "was killed by signal 9 (SIGKILL)" if sig == signal.SIGKILL else "hangs: its process is stopped"
        assert cause in message
        error.value.__traceback__ = error.value.__cause__ = error.value.__context__ = None
        del error


def test_a_rank_that_is_lost_as_the_engine_closes_does_not_keep_it(dummy_model: Path) -> None:
    with nothing_left():
        llm = LLM(str(dummy_model), **OPTIONS)
        stream = llm.stream("the quick", SamplingParams(max_tokens=15_000, ignore_eos=True))
        next(stream)
        hit = Hit(signal.SIGSTOP)
        hit.now()
        llm.close()
        assert time.monotonic() - hit.sent_at < LIMIT
        del stream, llm


LEADER = """
    import signal
    from tests.helpers.last_threads import tell_last_threads
    tell_last_threads()
    import atexit, sys, time
    from stretto import LLM, SamplingParams

    def decode():
        llm = LLM(sys.argv[1], tensor_parallel_size=2, load_format="dummy", dtype="float32", max_model_len=16000)
        stream = llm.stream("the quick", SamplingParams(max_tokens=15_000, ignore_eos=True))
        next(stream)
        print("decoding", flush=True)
        if sys.argv[2] == "decode":
            for _ in stream:
                pass
        return llm, stream

    handler = signal.getsignal(signal.SIGINT)
    atexit.register(lambda: print("as before:", signal.getsignal(signal.SIGINT) == handler, flush=True))
    if sys.argv[2] == "forgotten":
        decode()
    else:
        llm, stream = decode()
    raise ValueError("the user's own mistake")
"""


@pytest.mark.parametrize("end", ["decode", "mistake", "forgotten"])
def test_no_rank_outlives_its_leader(dummy_model: Path, end: str) -> None:
    """Whether it is killed in the middle of a step, or ends without having closed the engine: one that it still has, or
    one that a function has left behind.
    """
    command = [sys.executable, "-c", textwrap.dedent(LEADER), str(dummy_model), end]
    with (
        nothing_left(),
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as leader,
    ):
        assert leader.stdout is not None
        assert leader.stderr is not None
        assert leader.stdout.readline() == "decoding\n"
        everyone = [leader.pid, *children_of(leader.pid)]
        if end == "decode":
            os.kill(leader.pid, signal.SIGKILL)
        else:
            errors = leader.stderr.read()
            assert leader.wait(LIMIT) == 1, errors
            assert errors.count("stretto: rank") == 0
            assert "Exception ignored" not in errors  # of the stream, which nobody has closed
            (threads,) = last_threads(errors)
            assert "gloo" not in threads
            assert leader.stdout.read() == "as before: True\n"
        wait_until_dead(everyone, LIMIT)


BUSY_USER = """
    import ctypes, gc, os, sys
    from stretto import LLM, SamplingParams

    llm = LLM(sys.argv[1], tensor_parallel_size=2, load_format="dummy", dtype="float32", max_model_len=1024,
              control_transport=sys.argv[2])

    def answer():
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return list(llm.generate(["the quick"], params, use_tqdm=False)[0].outputs[0].token_ids)

    first = answer()

    def fork(end):
        child = os.fork()
        if child == 0:
            end()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answer() == first, end

    def collect():
        global llm
        del llm
        gc.collect()
        os._exit(0)

    def close():
        llm.close()
        sys.exit(0)

    for end in (sys.exit, collect, close):
        fork(end)
    ctypes.PyDLL(None).sleep(5)  # holds the GIL: no thread of this process runs
    assert answer() == first
    print("unharmed", flush=True)
"""

TRANSPORTS = ["shared-memory", "gloo", "zeromq"] if os.environ.get("STRETTO_ALL_FAILURES") else ["gloo"]
"""Gloo is the one with most to destroy; all three with STRETTO_ALL_FAILURES=1."""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_user_does_between_calls_harms_no_rank(dummy_model: Path, transport: str) -> None:
    """Forked children exit, collect or close their copy of the engine; the parent's goes on. And it may hold the GIL
    right after a call for longer than silence is forgiven.
    """
    command = [sys.executable, "-c", textwrap.dedent(BUSY_USER), str(dummy_model), transport]
    environment = {**os.environ, "STRETTO_HANG_SECONDS": "3"}
    with nothing_left():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unharmed\n"
