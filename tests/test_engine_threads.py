"""The engine on a device with a real worker thread: same streams under real concurrency, checked and unchecked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.device.cpu import CpuDevice
from stretto.device.delayed import DelayedCpuDevice
from stretto.engine.engine import Engine
from stretto.request import SamplingParams
from stretto.scheduler.integrity import IntegrityError
from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.llm_fixture import dummy_llm
from tests.helpers.simulation import Simulation, small_config

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def _load(simulation: Simulation) -> None:
    streams = [simulation.add([1 + (i + j) % 10 for j in range(1 + 3 * i)], PARAMS) for i in range(5)]
    simulation.run()
    for stream in streams:
        simulation.assert_as_expected(stream)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_delays_change_no_token(depth: int, seed: int) -> None:
    slow, fast = (0.0, 1e-3), (0.0, 1e-5)
    device_delay, host_delay = (slow, fast) if seed % 2 else (fast, slow)
    device = DelayedCpuDevice(seed, device_delay=device_delay, host_delay=host_delay)
    try:
        _load(Simulation(small_config(overlap_depth=depth, num_pages=9 + 4 * seed), device))
    finally:
        device.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("checked", [False, True])
def test_the_plain_device_gives_the_serial_streams(depth: int, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With STRETTO_CHECK=1 all books are checked after each step, and released pages and rows are poisoned."""
    monkeypatch.setenv("STRETTO_CHECK", "1" if checked else "0")
    device = CpuDevice(1)
    try:
        simulation = Simulation(small_config(overlap_depth=depth, num_pages=9), device)
        assert (simulation.runtime.scheduler.monitor is not None) == checked
        _load(simulation)
    finally:
        device.close()


def test_a_violation_stops_with_a_readable_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CHECK", "1")
    device = CpuDevice(1)
    try:
        simulation = Simulation(small_config(), device)
        stream = simulation.add([1, 2, 3, 4, 5], PARAMS)
        simulation.turn()
        simulation.runtime.scheduler.pages.pool.share(stream.request.pages[:1])
        with pytest.raises(IntegrityError) as caught:
            simulation.run()
    finally:
        device.close()
    assert "page 1: the pool counts 3 holders, there are 2" in str(caught.value)
    assert "uid  slot  state" in str(caught.value)


def test_a_length_that_differs_from_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CHECK", "1")
    device = CpuDevice(1)
    try:
        simulation = Simulation(small_config(), device)
        stream = simulation.add([1, 2, 3], PARAMS)
        simulation.turn()
        tables = simulation.runtime.engine.tables
        simulation.runtime.engine.stream.run(lambda: tables.length_R[stream.request.slot].add_(1) and None)
        with pytest.raises(RuntimeError, match="the device's lengths are"):
            simulation.run()
    finally:
        device.close()


COUNT_THREADS = """
import os, sys, time
from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.request import SamplingParams
from stretto.runtime import Runtime

def threads():
    # Those that end are gone: it is the same number for a fifth of a second.
    counts = [0]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1]

config = EngineConfig(
    model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, num_threads=2, max_num_seqs=1024, device="cpu"
)
parts = assemble(config)
parts.device.call(lambda: __import__("torch").ones(1000, 1000).sum())  # the worker has its pool now, if not before
before = threads()
runtime = Runtime(parts.config, parts.device, parts.model, parts.attention)
runtime.add([5] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
while runtime.has_work:
    runtime.step()
print(before, threads())
runtime.close()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_cpu_engine_has_one_openmp_pool(tmp_path: Path) -> None:
    """With a second one there are more OpenMP threads than cores, and each parallel region waits for a sleeper."""
    model = write_dummy_model(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNT_THREADS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    before, after = done.stdout.split()
    assert before == after


def test_pages_that_are_released_alone_leave_the_row_of_padding_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 is nobody's, and what captures steps pads them with it: poisoned, it pointed far outside of the tables."""
    monkeypatch.setenv("STRETTO_CHECK", "1")
    released: list[tuple[int, int]] = []
    poison = Engine.poison

    def seen(self: Engine, slot: int, pages: list[int]) -> None:
        released.append((slot, len(pages)))
        poison(self, slot, pages)

    monkeypatch.setattr(Engine, "poison", seen)
    with dummy_llm(tmp_path, max_model_len=64, num_pages=8, page_size=8, max_num_seqs=2) as llm:
        for first in range(6):  # each prompt drives cached pages of earlier ones out
            llm.generate([{"prompt_token_ids": [first, *range(1, 30)]}], SamplingParams(max_tokens=4), use_tqdm=False)
        engine = llm._runtime.engine
        rows = llm._runtime.device.call(
            lambda: (engine.tables.length_R[0].clone(), engine.tables.token_ids_RL[0].clone())
        )
    assert any(slot == 0 and count for slot, count in released), "nothing was driven out of the cache"
    assert rows[0] == 0
    assert not rows[1].any()
