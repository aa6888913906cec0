"""Matrix products of 2 to 64 rows, for decode steps: bound by reading the weights, and by what lies between kernels.

Computed as y^T = w x^T: 64 rows of the weight fill the tensor cores' fixed side, and the rows of x are the side that
may be narrow. A program owns 64 rows of the weight and a span of columns. Its sums over one span of several are written
as float32, and added in a fixed order by the kernel that reads them next; a row's result does not depend on the others.
Weights depend on no other kernel, so they are read, or sent for, before the wait for the one in front (`launch.py`).

Legend: M rows of x, I in-features, O out-features, F ffn, S spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, dot_precision, gpu_of, next_power_of_2, options
from stretto.kernels.small_matmul import small_matmul_reference

MAX_ROWS = 64
KINDS_OF_ROWS = (2, 32, MAX_ROWS)
"""Any number of rows runs in the kernels of one of these."""

_BLOCK = 64
"""Rows of the weight a program."""
_RESIDENT_SPAN = 512
_RESIDENT_ELEMENTS = 2 * 132 * _BLOCK * _RESIDENT_SPAN
"""Up to here all tiles of the weight fit into the shared memory of an H200 at once, two a multiprocessor."""
_PROGRAMS = 3 * 132
"""About how many programs stream larger weights: as many as run at once on an H200."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into programs."""

    span: int
    """Columns of a program."""
    num_spans: int
    step: int
    """Columns of a turn; 0: the program holds its whole tile."""
    stages: int = 1
    prefetch: bool = False
    """The tile is sent for before the wait."""


def few_rows_matmul_reference(
    x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, gate: bool = False
) -> Tensor:
    """`x @ w.T`, [bias], [silu(gate) * up] in float32, in the dtype of x: what the result, or its sum over S, is."""
    return small_matmul_reference(x_MI, weight_OI, bias_O, gate=gate)


# hot path
def few_rows_matmul(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, whole: bool = False) -> Tensor:
    """`x @ w.T` [+ bias]: [M, O] in x's dtype, or float32 [S, M, O] whose sum over S it is.

    Contiguous, 2 to `MAX_ROWS` rows. `whole`: never in parts. Never blocks.
    """
    (outputs, width), rows = weight_OI.shape, x_MI.shape[0]
    tiles = gpu_of(x_MI.device).loads_tiles
    how = cut(outputs, width, x_MI.element_size(), rows, whole=whole, loads_tiles=tiles)
    return _launch(x_MI, weight_OI, bias_O, how, gate=False)


# hot path
def few_rows_gated(x_MI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu(gate) * up as [M, F], of weights that hold gate first, then up. As `few_rows_matmul`."""
    (outputs, width), rows = weight_2FI.shape, x_MI.shape[0]
    tiles = gpu_of(x_MI.device).loads_tiles
    how = cut(outputs, width, x_MI.element_size(), rows, whole=True, loads_tiles=tiles)
    return _launch(x_MI, weight_2FI, bias_2F, how, gate=True)


def padded(rows: int) -> int:
    """Rows of x that a program multiplies with."""
    return max(16, next_power_of_2(rows))


def cut(outputs: int, width: int, itemsize: int, rows: int, *, whole: bool, loads_tiles: bool = True) -> Cut:
    """How to cut a product; the spans are the same for any number of rows. The fastest of those measured on an H200.

    `loads_tiles`: of the GPU. If not, a whole tile would pass through registers, of which there are too few.
    """
    aligned = width * itemsize % 16 == 0
    if loads_tiles and not whole and itemsize == 2 and aligned and outputs * width <= _RESIDENT_ELEMENTS:
        return Cut(_RESIDENT_SPAN, cdiv(width, _RESIDENT_SPAN), 0)
    step = 256 // itemsize
    tiles = cdiv(outputs, _BLOCK)
    steps = cdiv(width, step)
    most = 1 if whole else max(1, _PROGRAMS // tiles)
    # Equal spans, unless that would make them more than twice as long as they may be.
    spans = next((s for s in range(most, most // 2, -1) if steps % s == 0), most)
    span = step * cdiv(steps, spans)
    # Of larger weights, programs that wait their turn would drive each other's tiles out of the cache.
    prefetch = outputs * width <= _RESIDENT_ELEMENTS
    # Of more than 32 rows, a fourth stage would leave a multiprocessor room for one program only.
    stages = 4 if whole and width <= 2048 and rows <= 32 else 3
    return Cut(span, cdiv(width, span), step, stages, prefetch)


def _launch(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, how: Cut, *, gate: bool) -> Tensor:
    (rows, width), outputs, device = x_MI.shape, weight_OI.shape[0], x_MI.device
    block_m = padded(rows)
    if how.num_spans > 1:
        out = torch.empty(how.num_spans, rows, outputs, dtype=torch.float32, device=device)
    else:
        out = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x_MI.dtype, device=device)
    grid = (cdiv(outputs, _BLOCK), how.num_spans)
    flags = {"BLOCK_M": block_m, "BLOCK_N": _BLOCK, "BIAS": bias_O is not None, "SUMS": how.num_spans > 1}
    bias = x_MI if bias_O is None else bias_O
    if not how.step:
        _resident[grid](
            TensorDescriptor(x_MI, [rows, width], [width, 1], [block_m, how.span]),
            TensorDescriptor(weight_OI, [outputs, width], [width, 1], [_BLOCK, how.span]),
            bias,
            out,
            rows,
            OUTPUTS=outputs,
            SPAN=how.span,
            **flags,
            num_warps=4,
            **options(device),
        )
        return out
    if gate:
        grid = (cdiv(outputs // 2, _BLOCK // 2), 1)
    _streamed[grid](
        x_MI,
        weight_OI,
        bias,
        out,
        rows,
        OUTPUTS=outputs,
        WIDTH=width,
        SPAN=how.span,
        STEP=how.step,
        SPAN_PAD=max(64, next_power_of_2(how.span)),
        PREFETCH=how.prefetch,
        GATE=gate,
        PRECISION=dot_precision(x_MI.dtype),
        **flags,
        num_warps=4,
        num_stages=how.stages,
        **options(device),
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def _resident(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The whole tile of the weight is in shared memory before the wait."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = weight_desc.load([tl.program_id(0) * BLOCK_N, span * SPAN])
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = x_desc.load([0, span * SPAN])
    acc = tl.dot(w, tl.trans(x))
    if BIAS:
        acc = _biased(acc, bias_ptr, n, n < OUTPUTS, span)
    _store(tl.trans(acc), out_ptr, num_rows, span, n, n < OUTPUTS, OUTPUTS, BLOCK_M, SUMS)


@kernel(do_not_specialize=["num_rows"])
def _streamed(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    SPAN_PAD: tl.constexpr,
    STEP: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turns over columns, several in flight; before the wait, the tile may be sent for."""
    tile = tl.program_id(0)
    span = tl.program_id(1)
    r = tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    half: tl.constexpr = BLOCK_N // 2
    if GATE:  # a program's rows are some of gate, and the same of up
        f = tile * half + r % half
        n = f + (r // half) * (OUTPUTS // 2)
        n_inside = f < OUTPUTS // 2
    else:
        n = tile * BLOCK_N + r
        n_inside = n < OUTPUTS
    w_rows = weight_ptr + n.to(tl.int64) * WIDTH + span * SPAN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:  # a line of 128 bytes each
            per_line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
            c = tl.arange(0, SPAN_PAD // per_line) * per_line
            # Past the last row or column the first one is sent for again.
            begin = tl.where(n_inside, n, 0).to(tl.int64) * WIDTH + span * SPAN
            lines = weight_ptr + begin[:, None] + tl.where(span * SPAN + c < WIDTH, c, 0)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [lines.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, STEP)
    w_ptrs = w_rows[:, None] + k[None, :]
    x_ptrs = x_ptr + m[:, None] * WIDTH + (span * SPAN + k)[None, :]
    m_inside = (m < num_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, SPAN, STEP):
        k_inside = (span * SPAN + start + k < WIDTH)[None, :]
        w = tl.load(w_ptrs + start, mask=n_inside[:, None] & k_inside, other=0.0)
        x = tl.load(x_ptrs + start, mask=m_inside & k_inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if BIAS:
        acc = _biased(acc, bias_ptr, n, n_inside, span)
    acc = tl.trans(acc)
    if GATE:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        f = tile * half + tl.arange(0, half)
        _store(acc, out_ptr, num_rows, span, f, f < OUTPUTS // 2, OUTPUTS // 2, BLOCK_M, SUMS)
    else:
        _store(acc, out_ptr, num_rows, span, n, n_inside, OUTPUTS, BLOCK_M, SUMS)


@triton.jit
def _biased(acc, bias_ptr, n, n_inside, span):
    """The bias belongs to the first span."""
    bias = tl.load(bias_ptr + n, mask=n_inside & (n * 0 + span == 0), other=0.0).to(tl.float32)
    return acc + bias[:, None]


@triton.jit
def _store(acc, out_ptr, num_rows, span, n, n_inside, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, SUMS: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    inside = (m < num_rows)[:, None] & n_inside[None, :]
    place = out_ptr + m[:, None] * OUTPUTS + n[None, :]
    if SUMS:
        place += span.to(tl.int64) * num_rows * OUTPUTS
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)
