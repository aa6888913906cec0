"""The feed-forward block's first product with its gate, silu(x @ gate.T) * (x @ up.T), for thousands of rows.

A product and a kernel for the gate write and read all of gate and up once more than this, which on an H200 costs a
quarter of the product's own time. A fixed number of programs run over the tiles, so that a tile's first operands are on
their way while the last one's gate is computed. A tile holds the same columns of gate and of up. Weights of 16 bits, on
GPUs that `runs_on` names. Legend: M rows of x, I in-features, F ffn.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.kernels.elementwise import silu_and_mul_reference
from stretto.kernels.jit import kernel
from stretto.kernels.launch import INTERPRETED, Gpu, cdiv, gpu_of, num_multiprocessors, options

LEAST_ROWS = 1024
"""With fewer, too few tiles of 128 rows to keep an H200's multiprocessors busy: 768 of the 0.6B gain nothing."""

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
"""Of a tile: rows of x, columns of gate (and of up), and elements of k at a time."""
_SHARED_MEMORY = 180 * 1024
"""Bytes that a program has room for: the operands of three turns, and the tile of the result."""
_GROUP = 8
"""Tiles with the same columns that follow each other: their weights are read from memory once."""


def gated_matmul_reference(x_MI: Tensor, weight_2FI: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once, of weights that hold gate first, then up."""
    return silu_and_mul_reference(x_MI.float() @ weight_2FI.float().T).to(x_MI.dtype)


def takes(rows: int, weight_2FI: Tensor) -> bool:
    """Whether `gated_matmul` can multiply with these weights here, and is the fastest for so many rows. hot path"""
    return rows >= LEAST_ROWS and weight_2FI.dtype.itemsize == 2 and _fits(*weight_2FI.shape, weight_2FI.device)


def runs_on(gpu: Gpu) -> bool:
    """Whether `gated_matmul` has what it needs: data-centre GPUs from Hopper on; newer ones for desktops lack room."""
    return gpu.loads_tiles and gpu.shared_memory >= _SHARED_MEMORY


@functools.cache
def _fits(outputs: int, width: int, device: torch.device) -> bool:
    whole_tiles = outputs % (2 * _COLUMNS) == 0 and width % _DEPTH == 0
    return whole_tiles and device.type == "cuda" and runs_on(gpu_of(device))


# hot path (of large steps)
def gated_matmul(x_MI: Tensor, weight_2FI: Tensor) -> Tensor:
    """`gated_matmul_reference` as [M, F], for contiguous tensors with F a multiple of 128 and I of 64. Never blocks."""
    (rows, width), ffn, device = x_MI.shape, weight_2FI.shape[0] // 2, x_MI.device
    out_MF = torch.empty(rows, ffn, dtype=x_MI.dtype, device=device)
    programs = num_multiprocessors(device)
    _gated_matmul[(min(programs, cdiv(rows, _ROWS) * (ffn // _COLUMNS)),)](
        TensorDescriptor(x_MI, [rows, width], [width, 1], [_ROWS, _DEPTH]),
        TensorDescriptor(weight_2FI, [2, ffn, width], [ffn * width, width, 1], [2, _COLUMNS, _DEPTH]),
        TensorDescriptor(out_MF, [rows, ffn], [ffn, 1], [_ROWS, _COLUMNS]),
        rows,
        FFN=ffn,
        WIDTH=width,
        BLOCK_M=_ROWS,
        BLOCK_F=_COLUMNS,
        BLOCK_K=_DEPTH,
        GROUP=_GROUP,
        PROGRAMS=programs,
        FLATTEN=not INTERPRETED,
        num_warps=8,
        num_stages=4,
        **options(device),
    )
    return out_MF


@kernel(do_not_specialize=["num_rows"])
def _gated_matmul(
    x_desc,
    weight_desc,
    out_desc,
    num_rows,
    FFN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    tiles_f: tl.constexpr = FFN // BLOCK_F
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, PROGRAMS, flatten=FLATTEN):
        group = tile // (GROUP * tiles_f)
        group_size = tl.minimum(GROUP, tiles_m - group * GROUP)
        within = tile % (GROUP * tiles_f)
        m = (group * GROUP + within % group_size) * BLOCK_M
        f = (within // group_size) * BLOCK_F
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for k in range(0, WIDTH, BLOCK_K):
            x = x_desc.load([m, k])
            w = tl.reshape(weight_desc.load([0, f, k]), (2 * BLOCK_F, BLOCK_K))
            acc = tl.dot(x, tl.trans(w), acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1)))
        out_desc.store([m, f], (gate / (1.0 + tl.exp(-gate)) * up).to(out_desc.dtype))
