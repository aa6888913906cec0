"""`Kernel`: a launch like an earlier one goes to the same binary, any other to Triton. Triton and the GPU are acted."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.kernels import jit
from stretto.kernels.launch import INTERPRETED


def _add(x_ptr, count, width, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, count + width + scale + BLOCK + FLAG)


class Acted:
    """What Triton would do: look up or compile, launch, and give the compiled kernel."""

    def __init__(self) -> None:
        self.compiled = 0
        self.launches: list[tuple[object, ...]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        self.compiled += 1
        constants["debug"] = False  # Triton adds to its own copy
        number = self.compiled

        def launch(*given: Any) -> None:
            self.launches.append((number, given[:3], *given[9:]))

        return SimpleNamespace(run=launch, function="function", packed_metadata="metadata")


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Acted:
    triton_run = Acted()
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, **named: triton_run.run(*args, **named))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(jit, "_QUICK", True)
    return triton_run


X = torch.zeros(64)


def test_the_second_launch_goes_straight_to_the_binary(acted: Acted) -> None:
    add = jit.Kernel(_add, do_not_specialize=["count"])
    add[(3,)](X, 5, 32, 0.5, BLOCK=16, num_warps=4)
    assert (acted.compiled, acted.launches) == (1, [])
    add[(4, 2)](X, 6, 48, 0.7, BLOCK=16, num_warps=4)
    assert acted.compiled == 1
    number, grid, x, *rest = acted.launches[0]
    assert (number, grid) == (1, (4, 2, 1))
    assert x == X.data_ptr()
    assert rest == [6, 48, 0.7, 16, False]  # constants that were not given have their defaults


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"count": 17}, True),  # not specialised
        ({"count": 2**40}, False),  # another type
        ({"width": 64}, True),  # divisible by 16 as before
        ({"width": 33}, False),
        ({"width": 1}, False),
        ({"scale": 0.25}, True),
        ({"x": X[4:]}, True),  # 16 bytes further
        ({"x": X[1:]}, False),
        ({"x": X.to(torch.bfloat16)}, False),
        ({"BLOCK": 32}, False),
        ({"num_warps": 8}, False),
    ],
)
def test_what_a_binary_depends_on(acted: Acted, change: dict[str, Any], same: bool) -> None:
    add = jit.Kernel(_add, do_not_specialize=["count"])
    usual = {"x": X, "count": 5, "width": 32, "scale": 0.5, "BLOCK": 16, "num_warps": 4}

    def launch(x: torch.Tensor, count: int, width: int, scale: float, **constants: Any) -> None:
        add[(1,)](x, count, width, scale, **constants)

    launch(**usual)
    launch(**{**usual, **change})
    assert acted.compiled == (1 if same else 2)


def test_constants_by_place_are_told_apart(acted: Acted) -> None:
    add = jit.Kernel(_add)
    for block in (16, 32, 16):
        add[(1,)](X, 5, 32, 0.5, block)
    assert acted.compiled == 2


def test_descriptors_differ_in_dtype_and_block(acted: Acted) -> None:
    add = jit.Kernel(_add)

    def launch(x: torch.Tensor, length: int, block: int) -> None:
        add[(1,)](TensorDescriptor(x, [length], [1], [block]), 5, 32, 0.5, BLOCK=16)

    launch(X, 64, 16)
    launch(X[4:], 32, 16)
    assert acted.compiled == 1
    descriptor = acted.launches[0][2]
    assert (descriptor.base.data_ptr(), descriptor.shape) == (X[4:].data_ptr(), [32])  # type: ignore[attr-defined]
    launch(X, 64, 32)
    launch(X.to(torch.bfloat16), 64, 16)
    assert acted.compiled == 3


def test_another_device_has_its_own_binary(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    add = jit.Kernel(_add)
    add[(1,)](X, 5, 32, 0.5, BLOCK=16)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    add[(1,)](X, 5, 32, 0.5, BLOCK=16)
    assert acted.compiled == 2


def test_versions_that_were_not_read_launch_as_triton_does(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_QUICK", False)
    add = jit.Kernel(_add)
    for _ in range(3):
        add[(1,)](X, 5, 32, 0.5, BLOCK=16)
    assert (acted.compiled, acted.launches) == (3, [])


@pytest.mark.parametrize(("known", "warnings"), [(True, 0), (False, 1)])
def test_slow_launches_are_told_of_once(
    known: bool, warnings: int, acted: Acted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "_QUICK", known)
    jit._warn.cache_clear()
    with caplog.at_level(logging.WARNING, logger="stretto.kernels"):
        for add in (jit.Kernel(_add), jit.Kernel(_add)):
            for _ in range(3):
                add[(1,)](X, 5, 32, 0.5, BLOCK=16)
    assert [triton.__version__ in record.getMessage() for record in caplog.records] == [True] * warnings


def test_the_decorator_gives_what_the_process_needs() -> None:
    assert isinstance(jit.kernel(_add), jit.Kernel) != INTERPRETED
    assert isinstance(jit.kernel(do_not_specialize=["count"])(_add), jit.Kernel) != INTERPRETED
