"""The CPU device's one worker thread: who runs what, who ends it, and how failures and the GIL are handled."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from stretto.device.base import DeviceFault
from stretto.device.cpu import CpuDevice
from stretto.device.switch_interval import LOOP_INTERVAL_S, SwitchInterval
from stretto.errors import StrettoError


def worker_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "stretto-cpu-device"}


def test_one_thread_other_than_the_host_runs_the_work_of_all_streams() -> None:
    device = CpuDevice()
    idents: set[int] = set()
    streams = [device.stream(name) for name in ("scheduler", "engine", "copy")]
    for stream in streams:
        stream.run(lambda: idents.add(threading.get_ident()))
    for stream in streams:
        stream.synchronize()
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    device.close()


def test_the_number_of_threads_holds_in_the_work() -> None:
    before = torch.get_num_threads()
    device = CpuDevice(num_threads=1)
    stream, seen = device.stream("engine"), []
    stream.run(lambda: seen.append(torch.get_num_threads()))
    stream.synchronize()
    assert seen == [1]
    device.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0, -3])
def test_a_senseless_number_of_threads_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {number}"):
        CpuDevice(num_threads=number)


def test_close_ends_the_thread() -> None:
    before = worker_threads()
    devices = [CpuDevice() for _ in range(5)]
    assert len(worker_threads() - before) == 5
    for device in devices:
        device.close()
    assert worker_threads() == before


def test_a_forgotten_device_does_its_work_and_ends_its_thread() -> None:
    before = worker_threads()
    device = CpuDevice()
    stream, done = device.stream("engine"), threading.Event()
    gone = weakref.ref(device)
    stream.run(done.set)
    del device, stream
    gc.collect()
    assert done.wait(10)
    assert gone() is None
    for thread in threading.enumerate():
        if thread.ident in worker_threads() - before:
            thread.join(10)
    assert worker_threads() == before


def test_a_stream_or_event_keeps_its_device_alive() -> None:
    stream = CpuDevice().stream("engine")
    event = CpuDevice().event()
    gc.collect()
    seen: list[int] = []
    stream.run(seen.append, 1)
    stream.synchronize()
    assert seen == [1]
    event.device.close()
    stream.device.close()


def test_finished_work_is_not_kept_alive() -> None:
    class Weights:
        pass

    device = CpuDevice()
    stream, weights = device.stream("engine"), Weights()
    gone = weakref.ref(weights)
    stream.run(lambda _: None, weights)
    stream.synchronize()
    stream.run(lambda: None)
    stream.synchronize()
    del weights
    assert gone() is None
    device.close()


@pytest.mark.parametrize("ending", ["", "device.close()", "del device, stream"])
def test_the_interpreter_exits_cleanly_after_the_work(ending: str) -> None:
    code = f"""
import time
from stretto.device.cpu import CpuDevice
device = CpuDevice()
stream = device.stream("engine")
stream.run(time.sleep, 0.1)
stream.run(print, "done")
{ending}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_events_behind_a_failure_are_reached_so_nobody_waits_for_ever() -> None:
    device = CpuDevice()
    stream = device.stream("engine")
    gate = threading.Lock()
    gate.acquire()
    stream.run(gate.acquire)
    stream.run(divmod, 1, 0)
    events = [device.event() for _ in range(3)]
    for event in events:
        stream.run(pytest.fail, "work behind a failure must not run")
        stream.record(event)
    gate.release()
    for event in events:
        with pytest.raises(DeviceFault, match="divmod"):
            event.synchronize()
    device.close()


def test_even_a_system_exit_in_work_is_a_failure_and_not_the_silent_end_of_the_thread() -> None:
    device = CpuDevice()
    stream = device.stream("engine")
    stream.run(sys.exit, 3)
    with pytest.raises(DeviceFault, match="SystemExit"):
        stream.synchronize()
    device.close()


def test_every_report_of_a_failure_is_an_exception_of_its_own() -> None:
    device = CpuDevice()
    stream, event = device.stream("engine"), device.event()
    stream.run(divmod, 1, 0)
    stream.record(event)
    errors = []
    for _ in range(2):
        with pytest.raises(DeviceFault) as info:
            event.synchronize()
        errors.append(info.value)
    assert errors[0] is not errors[1]
    assert errors[0].__cause__ is errors[1].__cause__
    device.close()


def test_work_that_waits_for_what_is_behind_it_is_told_so() -> None:
    device = CpuDevice()
    stream = device.stream("engine")
    stream.run(stream.synchronize)
    with pytest.raises(DeviceFault, match="wait for ever") as info:
        stream.synchronize()
    assert isinstance(info.value.__cause__, StrettoError)
    device.close()


def test_synchronising_leaves_the_gil_to_others() -> None:
    device = CpuDevice()
    stream, seen = device.stream("engine"), []

    def count_in_python() -> None:
        seen.extend(range(1000))

    stream.run(time.sleep, 0.01)
    stream.run(count_in_python)
    stream.synchronize()
    assert len(seen) == 1000
    device.close()


def test_a_running_scope_shortens_the_switch_interval_and_restores_it() -> None:
    device, before = CpuDevice(), sys.getswitchinterval()
    with device.running():
        assert sys.getswitchinterval() == pytest.approx(LOOP_INTERVAL_S)
        with device.running():
            assert sys.getswitchinterval() == pytest.approx(LOOP_INTERVAL_S)
        assert sys.getswitchinterval() == pytest.approx(LOOP_INTERVAL_S)
    assert sys.getswitchinterval() == pytest.approx(before)
    with pytest.raises(RuntimeError, match="on purpose"), device.running():
        raise RuntimeError("on purpose")
    assert sys.getswitchinterval() == pytest.approx(before)
    device.close()


def test_running_scopes_of_two_loops_may_end_in_any_order() -> None:
    interval, before = SwitchInterval(), sys.getswitchinterval()
    first, second = interval.short(), interval.short()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(LOOP_INTERVAL_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_an_interval_that_is_shorter_already_is_left_alone() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with SwitchInterval().short():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)
