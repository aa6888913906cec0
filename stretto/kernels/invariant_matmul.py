"""`x @ w.T + bias` whose every row is, to the bit, the same whatever other rows there are: for `deterministic`.

Each element is one running sum over k from 0, in float32, by matrix instructions of 16 elements each: no split of k,
no other arithmetic for few rows. Only which elements one program computes depends on their number. That an instruction
for more outputs at once gives each of them the same bits is a property of the hardware, which the tests check over all
tiles. Legend: M rows of x, I in-features, O out-features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, dot_precision, options


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel is shaped. `rows` and `outputs` of one program, `depth` elements of k a turn."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, outputs: int, dtype: torch.dtype) -> Tile:
        """The fastest measured on an H200, with enough programs for its multiprocessors."""
        if dtype == torch.float32:  # computed by the ordinary units, in an order that the tile's shape may change
            return _EXACT
        for tile in TILES:
            programs = cdiv(rows, tile.rows) * cdiv(outputs, tile.outputs)
            if programs >= _LEAST_PROGRAMS and rows > tile.rows - 64:
                return tile
        return SMALLEST_TILE


_LEAST_PROGRAMS = 96
TILES = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 5))
SMALLEST_TILE = Tile(64, 32, 128, 4, 5)
_EXACT = Tile(32, 32, 32, 4, 3)


def invariant_matmul_reference(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """In float32, rounded once."""
    y_MO = x_MI.float() @ weight_OI.float().T
    return (y_MO if bias_O is None else y_MO + bias_O.float()).to(x_MI.dtype)


# hot path
def invariant_matmul(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """`invariant_matmul_reference` for any number of contiguous rows, in one kernel. Never blocks.

    `tile` (for measurements): another shape than `Tile.of` chooses.
    """
    rows, width = x_MI.shape
    outputs = weight_OI.shape[0]
    out_MO = torch.empty(rows, outputs, dtype=x_MI.dtype, device=x_MI.device)
    tile = tile or Tile.of(rows, outputs, x_MI.dtype)
    if rows:
        _invariant_matmul[(cdiv(rows, tile.rows) * cdiv(outputs, tile.outputs),)](
            x_MI,
            weight_OI,
            weight_OI if bias_O is None else bias_O,
            out_MO,
            rows,
            outputs,
            width,
            WHOLE=width % tile.depth == 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.depth,
            BIAS=bias_O is not None,
            PRECISION=dot_precision(x_MI.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options(x_MI.device),
        )
    return out_MO


@kernel(do_not_specialize=["num_rows"])
def _invariant_matmul(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    width,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that share rows of the weight follow each other: it is read from memory once.
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Sizes are no constants: a model's products share a few binaries.
    x_rows = x_ptr + m.to(tl.int64)[:, None] * width + k[None, :]
    w_rows = weight_ptr + n.to(tl.int64)[:, None] * width + k[None, :]
    x_inside = (m < num_rows)[:, None] & (k >= 0)[None, :]
    w_inside = (n < outputs)[:, None] & (k >= 0)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        if not WHOLE:
            x_inside = (m < num_rows)[:, None] & (start + k < width)[None, :]
            w_inside = (n < outputs)[:, None] & (start + k < width)[None, :]
        x = tl.load(x_rows + start, mask=x_inside, other=0.0)
        w = tl.load(w_rows + start, mask=w_inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < outputs)[None, :])
