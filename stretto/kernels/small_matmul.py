"""Matrix products of one row: bound by reading the weights once, fused with what comes before and after them.

`x @ w.T`, either with an RMS norm of x in front and with a bias, a SiLU gate or an addition to the residual stream
behind. One program reads a few whole rows of the weight, before it waits for the kernel in front of it (see
`launch.py`), as weights depend on nothing. More rows: `few_rows.py`.

Legend: M rows of x, I in-features, O out-features, F ffn.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.elementwise import add_rms_norm_reference, silu_and_mul_reference
from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, num_multiprocessors, options

_MAX_CHUNK = 4096
_STREAMED_WIDTHS = (2048, _MAX_CHUNK)
"""For wider weights than the first, up to the second, programs that each go through many rows are the fastest."""
_MOST_STREAMED = 65536
"""Up to so many outputs: of a head's, programs that own a few rows read more bytes a second."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of x in front of the product."""

    weight: Tensor
    eps: float


def small_matmul_reference(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """[norm], product, [bias], then [silu(gate) * up] or [add_to += result, in place]; in float32 in between."""
    x = x_MI if norm is None else add_rms_norm_reference(x_MI, None, norm.weight, norm.eps)
    y = x.float() @ weight_OI.float().T
    if bias_O is not None:
        y = y + bias_O.float()
    if gate:
        y = silu_and_mul_reference(y)
    if add_to is not None:
        return add_to.copy_(add_to.float() + y)
    return y.to(x_MI.dtype)


# hot path
def small_matmul(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """`small_matmul_reference` in one kernel, for one contiguous row. Never blocks."""
    width = x_MI.shape[1]
    outputs = weight_OI.shape[0] // 2 if gate else weight_OI.shape[0]
    out = x_MI.new_empty(1, outputs) if add_to is None else add_to
    device = x_MI.device
    given = (
        x_MI,
        x_MI if norm is None else norm.weight,
        weight_OI,
        x_MI if bias_O is None else bias_O,
        out,
        0.0 if norm is None else norm.eps,
    )
    flags = {"NORM": norm is not None, "GATE": gate, "ADD": add_to is not None, "BIAS": bias_O is not None}
    chunk = min(_MAX_CHUNK, next_power_of_2(width))
    if _STREAMED_WIDTHS[0] < width <= _STREAMED_WIDTHS[1] and outputs <= _MOST_STREAMED:
        block_n = 2 if gate else 4
        programs = min(cdiv(outputs, block_n), 2 * num_multiprocessors(device))
        _streamed_gemv[(programs,)](
            *given,
            OUTPUTS=outputs,
            WIDTH=width,
            BLOCK_N=block_n,
            CHUNK=chunk,
            PROGRAMS=programs,
            **flags,
            num_warps=8,
            **options(device),
        )
        return out
    block_n, warps = gemv_blocks(outputs, width, gate)
    _gemv[(cdiv(outputs, block_n),)](
        *given,
        OUTPUTS=outputs,
        WIDTH=width,
        BLOCK_N=block_n,
        CHUNK=chunk,
        CHUNKS=cdiv(width, chunk),
        **flags,
        num_warps=warps,
        **options(device),
    )
    return out


def gemv_blocks(outputs: int, width: int, gate: bool) -> tuple[int, int]:
    """(rows of the weight per program, warps) for one row of x: the fastest of those measured on an H200."""
    if outputs > 65536:
        # More elements a thread would not fit into its registers.
        return max(2, 16384 // max(1024, next_power_of_2(width))), 4
    if gate:
        return (4, 4) if width <= 2048 else (2, 4)
    if width <= 2048:
        return (8, 8) if outputs > 2048 else (2, 4)
    return (8, 8) if width < 4096 else (4, 4)


@triton.jit
def _load_rows(weight_ptr, n, k, first, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns `first` + `k` of rows `n` of a weight [OUTPUTS, WIDTH]."""
    rows = weight_ptr + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    inside = (n < OUTPUTS)[:, None] & (first + k < WIDTH)[None, :]
    # `first` comes last, so that chunks share the addresses: otherwise, some kernels take a quarter more registers.
    return tl.load(rows + first, mask=inside, other=0.0)


@triton.jit
def _load_x(x_ptr, norm_ptr, k, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Columns `k` of x, if NORM times the norm's weight, and the sum of their squares before that."""
    x = tl.load(x_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 0)
    if NORM:
        x = x * tl.load(norm_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def _dot(w, x):
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def _write(
    acc,
    acc_up,
    n,
    bias_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Outputs `n`: products `acc` and, if GATE, those of up, after all that comes behind them."""
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
        if GATE:
            acc_up += tl.load(bias_ptr + OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
    if GATE:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if ADD:
        acc += tl.load(out_ptr + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, acc.to(out_ptr.dtype.element_ty), mask=n < OUTPUTS)


@kernel
def _gemv(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)
    up_ptr = weight_ptr + OUTPUTS * WIDTH
    w = _load_rows(weight_ptr, n, k, 0, OUTPUTS, WIDTH)
    if GATE:
        w_up = _load_rows(up_ptr, n, k, 0, OUTPUTS, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x, squares = _load_x(x_ptr, norm_ptr, k, WIDTH, NORM)
    acc = _dot(w, x)
    acc_up = acc
    if GATE:
        acc_up = _dot(w_up, x)
    for chunk in tl.static_range(1, CHUNKS):
        w = _load_rows(weight_ptr, n, k, chunk * CHUNK, OUTPUTS, WIDTH)
        x, chunk_squares = _load_x(x_ptr, norm_ptr, k + chunk * CHUNK, WIDTH, NORM)
        squares += chunk_squares
        acc += _dot(w, x)
        if GATE:
            w_up = _load_rows(up_ptr, n, k, chunk * CHUNK, OUTPUTS, WIDTH)
            acc_up += _dot(w_up, x)
    if NORM:
        factor = 1.0 / tl.sqrt(squares / WIDTH + eps)
        acc = acc * factor
        acc_up = acc_up * factor
    _write(acc, acc_up, n, bias_ptr, out_ptr, OUTPUTS, GATE, ADD, BIAS)


@kernel
def _streamed_gemv(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x is read once a program, whose next rows of the weight are on their way while it sums the last ones."""
    k = tl.arange(0, CHUNK)
    r = tl.arange(0, BLOCK_N)
    tile = tl.program_id(0)
    tiles: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    up_ptr = weight_ptr + OUTPUTS * WIDTH
    w = _load_rows(weight_ptr, tile * BLOCK_N + r, k, 0, OUTPUTS, WIDTH)
    w_up = w
    if GATE:
        w_up = _load_rows(up_ptr, tile * BLOCK_N + r, k, 0, OUTPUTS, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x, squares = _load_x(x_ptr, norm_ptr, k, WIDTH, NORM)
    factor = 1.0
    if NORM:
        factor = 1.0 / tl.sqrt(squares / WIDTH + eps)
    while tile < tiles:
        n = tile * BLOCK_N + r
        tile += PROGRAMS
        w_next = _load_rows(weight_ptr, tile * BLOCK_N + r, k, 0, OUTPUTS, WIDTH)
        w_up_next = w_next
        if GATE:
            w_up_next = _load_rows(up_ptr, tile * BLOCK_N + r, k, 0, OUTPUTS, WIDTH)
        acc = _dot(w, x) * factor
        acc_up = acc
        if GATE:
            acc_up = _dot(w_up, x) * factor
        _write(acc, acc_up, n, bias_ptr, out_ptr, OUTPUTS, GATE, ADD, BIAS)
        w = w_next
        w_up = w_up_next
