"""What kernels are given on GPUs that are no H200, from their capability and shared memory alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from stretto.kernels import gated_matmul, launch
from stretto.kernels.decode_work import DecodeWork, Tuning
from stretto.kernels.launch import H200
from tests.helpers.compile_kernels import OTHERS

ROOM = OTHERS["RTX 4090"].shared_memory
GROUPINGS = [(16, 8), (32, 8), (32, 32), (64, 8), (40, 10), (9, 3), (64, 2)]
DIMS = [64, 80, 128, 256, 512]


@pytest.fixture
def on_rtx_4090(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the CPU are launched on as if it were one."""
    monkeypatch.setattr(launch, "stand_in", OTHERS["RTX 4090"])
    launch.gpu_of.cache_clear()
    yield
    launch.gpu_of.cache_clear()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPINGS)
@pytest.mark.parametrize("rows", [1, 20, 1000])
def test_units_of_decode_attention_fit_into_shared_memory(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    tuning = Tuning.of(rows, heads, kv_heads, dim, ROOM)
    assert tuning.bytes_needed(dim) <= ROOM
    assert kv_heads % tuning.heads == 0
    # All programs of a multiprocessor begin at once.
    assert tuning.programs_per_multiprocessor * tuning.bytes_needed(dim) <= ROOM
    assert tuning.warps >= 1
    widest = Tuning.of(rows, heads, kv_heads, dim)
    if widest.bytes_needed(dim) <= ROOM:
        assert (tuning.heads, tuning.unit, tuning.warps) == (widest.heads, widest.unit, widest.warps)
        assert tuning.programs_per_multiprocessor <= widest.programs_per_multiprocessor


def test_heads_of_a_unit_are_as_many_as_fit() -> None:
    assert [Tuning.of(1000, 16, 8, 128, room).heads for room in (H200.shared_memory, 163 * 1024, ROOM)] == [8, 8, 4]
    assert Tuning.of(1000, 16, 8, 64, ROOM).heads == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts a GPU where there is none")
@pytest.mark.usefixtures("on_rtx_4090")
def test_work_is_cut_for_the_device_that_it_is_on() -> None:
    work = DecodeWork.allocate(256, 16, 8, 128, torch.device("cpu"))
    assert work.tuning == Tuning.of(256, 16, 8, 128, ROOM)
    assert work.num_programs == 128 * work.tuning.programs_per_multiprocessor
    assert work.arrived_BK.shape == (256, 2)


def test_the_product_with_its_gate_needs_tiles_and_room() -> None:
    assert gated_matmul.runs_on(H200)
    assert not any(gated_matmul.runs_on(gpu) for gpu in OTHERS.values())
    assert [name for name, gpu in OTHERS.items() if gpu.loads_tiles] == ["RTX 5090"]
