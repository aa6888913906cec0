"""Products of few rows compute what their plain-torch reference says, and a row's result is its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")

from stretto.kernels.elementwise import add_rms_norm, add_rms_norm_reference, sum_parts
from stretto.kernels.few_rows import (
    KINDS_OF_ROWS,
    MAX_ROWS,
    Cut,
    cut,
    few_rows_gated,
    few_rows_matmul,
    few_rows_matmul_reference,
    padded,
)
from stretto.kernels.rope_write import HeadTransform, rope_write, rope_write_reference
from tests.test_kernels import DEVICE, GPU, random
from tests.test_kernels import assert_close as assert_close_as_usual

# What the interpreter cannot multiply in bfloat16 it does in float16.
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]

SHAPES = [(64, 48, False), (200, 72, True), (1024, 40, False), (1288, 130, True), (45, 20, True)]
LARGE = [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (12288, 4096), (1024, 151_936)]
SHAPES += [(width, outputs, False) for width, outputs in LARGE] if GPU else []
GATED = [(64, 24, False), (200, 36, True), (45, 33, True)]
GATED += [(1024, 3072, False), (4096, 12288, False)] if GPU else []
ROWS = [2, 3, 8, 17, 32, 64] if GPU else [2, 17]


def total(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y if y.dim() == 2 else y.sum(0).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close_as_usual(actual, expected, 1e-5 if actual.dtype == torch.float32 else 1e-2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "outputs", "biased"), SHAPES)
@pytest.mark.parametrize("whole", [False, True])
def test_few_rows_matmul(rows: int, width: int, outputs: int, biased: bool, whole: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(outputs, width, dtype=dtype) / width**0.5
    bias = random(outputs, dtype=dtype) if biased else None
    actual = few_rows_matmul(x, weight, bias, whole=whole)
    assert actual.dim() == 2 or not whole
    assert_close(total(actual, dtype), few_rows_matmul_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "ffn", "biased"), GATED)
def test_few_rows_gated(rows: int, width: int, ffn: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(2 * ffn, width, dtype=dtype) / width**0.5
    bias = random(2 * ffn, dtype=dtype) if biased else None
    assert_close(few_rows_gated(x, weight, bias), few_rows_matmul_reference(x, weight, bias, gate=True))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="the interpreter sums as numpy likes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), [(1288, 130), (1024, 4096), (3072, 1024), (4096, 6144)])
def test_a_rows_result_is_its_own(width: int, outputs: int, dtype: torch.dtype) -> None:
    """To the bit, whatever the number of rows: a choice by rows must not cut the sums differently."""
    x, weight = random(MAX_ROWS, width, dtype=dtype), random(outputs, width, dtype=dtype)
    all_rows = few_rows_matmul(x, weight)
    gated = few_rows_gated(x, weight)
    for rows in (2, 8, 32, 33):
        first = x[:rows].clone()
        assert torch.equal(few_rows_matmul(first, weight), all_rows[..., :rows, :])
        assert torch.equal(few_rows_gated(first, weight), gated[:rows])


def test_cuts_cover_all_columns() -> None:
    for outputs, width in ((4096, 1024), (1024, 3072), (6144, 4096), (24576, 4096), (4096, 12288), (72, 200), (48, 45)):
        for whole in (False, True):
            for itemsize, rows in itertools.product((2, 4), (2, 64)):
                how = cut(outputs, width, itemsize, rows, whole=whole)
                assert (how.num_spans - 1) * how.span < width <= how.num_spans * how.span
                assert not how.step or how.span % how.step == 0
                assert not whole or how.num_spans == 1


@pytest.mark.parametrize("loads_tiles", [True, False])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 1024), (151_936, 1024), (1024, 3072), (6144, 4096)])
def test_few_kinds_stand_for_all_numbers_of_rows(outputs: int, width: int, loads_tiles: bool) -> None:
    """Who has run these has compiled all."""
    for whole in (False, True):

        def kinds(counts: Iterable[int], whole: bool = whole) -> set[tuple[int, Cut]]:
            return {(padded(n), cut(outputs, width, 2, n, whole=whole, loads_tiles=loads_tiles)) for n in counts}

        assert kinds(KINDS_OF_ROWS) == kinds(range(2, MAX_ROWS + 1))


def test_no_tile_is_whole_where_it_would_pass_through_registers() -> None:
    for outputs, width in ((4096, 1024), (1024, 3072), (576, 576)):
        assert not cut(outputs, width, 2, 64, whole=False).step
        how = cut(outputs, width, 2, 64, whole=False, loads_tiles=False)
        assert how.step
        assert (how.num_spans - 1) * how.span < width <= how.num_spans * how.span


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 6])
def test_parts_are_summed_by_what_reads_them(parts: int, dtype: torch.dtype) -> None:
    rows, heads, kv_heads, dim = 5, 4, 2, 64
    residual, weight = random(rows, 1500, dtype=dtype), random(1500, dtype=dtype)
    update = random(parts, rows, 1500)
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(expected_residual, update, weight, 1e-6)
    assert_close(add_rms_norm(residual, update, weight, 1e-6), expected)
    assert_close(residual, expected_residual)
    assert_close(sum_parts(update, dtype), update.sum(0).to(dtype))
    angle = torch.randn(50, dim // 2, device=DEVICE)
    turns = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).flatten(1)
    transform = HeadTransform(heads, kv_heads, random(heads + kv_heads, dim, dtype=dtype), 1e-6, turns)
    qkv = random(parts, rows, heads + 2 * kv_heads, dim)
    positions, locations = torch.randint(0, 50, (rows,), device=DEVICE), torch.randperm(64, device=DEVICE)[:rows]
    caches = [torch.zeros(2, 4, kv_heads, 16, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    turned = rope_write(qkv, positions, locations, transform, caches[0][0], caches[0][1])
    expected = rope_write_reference(qkv, positions, locations, transform, caches[1][0], caches[1][1])
    assert_close(turned, expected)
    assert_close(caches[0], caches[1])
