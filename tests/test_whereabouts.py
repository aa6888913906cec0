"""Where a host is that does not come back to the loop, as other ranks are told."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.config import EngineConfig
from stretto.observe.whereabouts import whereabouts
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.server_process import wait_until


def test_a_beat_says_where_the_loop_is_for_long(tmp_path: Path) -> None:
    config = EngineConfig(
        str(write_dummy_model(tmp_path)), load_format="dummy", max_model_len=64, inject=("slow-host=2s",)
    )
    runtime = Runtime.start(config)
    try:
        assert runtime.beat("running").where == ""
        runtime.add([5, 6], SamplingParams(max_tokens=1, detokenize=False))
        stepping = threading.Thread(target=runtime.step)
        stepping.start()
        told: list[str] = []

        def is_told() -> bool:
            told.append(runtime.beat("running").where)
            return told[-1] != "" or not stepping.is_alive()

        wait_until(is_told, "a slow step to be told")
        stepping.join()
        call = r"\w+ \(stretto/observe/inject\.py:\d+\)"
        assert re.fullmatch(f"{call} in {call} in {call}", told[-1])
        assert runtime.beat("running").where == ""
        while runtime.has_work:
            runtime.step()
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("file", "told"),
    [("/job.py", "job (/job.py:2)"), ("job.py", "job (job.py:2)"), ("", "job (:2)"), ("<string>", "job (<string>:2)")],
)
def test_a_program_may_be_of_any_file(file: str, told: str) -> None:
    scope: dict[str, Any] = {"sleep": time.sleep, "ends": threading.Event()}
    exec(compile("def job():\n    while not ends.is_set(): sleep(0.01)\n", file, "exec"), scope)
    working = threading.Thread(target=scope["job"])
    working.start()
    try:
        wait_until(lambda: whereabouts(working.ident or 0) == told, told)
    finally:
        scope["ends"].set()
        working.join()


def test_a_call_of_a_library_is_told_with_the_calls_around_it() -> None:
    waits = threading.Event()
    waiting = threading.Thread(target=waits.wait)
    waiting.start()
    wait_until(lambda: "wait (" in whereabouts(waiting.ident or 0), "the thread to wait")
    where = whereabouts(waiting.ident or 0)
    waits.set()
    waiting.join()
    assert re.match(r"wait \(.*threading\.py:\d+\)$", where)
    assert whereabouts(waiting.ident or 0) == ""
