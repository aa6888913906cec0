"""RMSNorm of a residual stream, with the addition before it, and the gate of the feed-forward block.

What is added may come in parts: float32 [S, ...], whose sum over S it is (`few_rows.py`). Legend: T tokens, D hidden,
F ffn, S parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options


def add_rms_norm_reference(residual_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """residual += update (where given) in place; returns the RMS norm of it (Zhang and Sennrich, 2019) in its dtype.

    An update in parts is float32 [S, T, D].
    """
    if update_TD is not None:
        residual_TD.copy_(residual_TD.float() + (update_TD if update_TD.dim() == 2 else update_TD.sum(0)))
    x_TD = residual_TD.float()
    factor_T1 = torch.rsqrt(x_TD.square().mean(1, keepdim=True) + eps)
    return (x_TD * factor_T1 * weight_D.float()).to(residual_TD.dtype)


# hot path
def add_rms_norm(residual_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """`add_rms_norm_reference` in one kernel. Rows contiguous. Never blocks."""
    rows, width = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    parts = 0 if update_TD is None else (1 if update_TD.dim() == 2 else update_TD.shape[0])
    _add_rms_norm[(rows,)](
        residual_TD,
        residual_TD if update_TD is None else update_TD,
        weight_D,
        out_TD,
        rows,
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        PARTS=parts,
        num_warps=_norm_warps(width, parts),
        **options(residual_TD.device),
    )
    return out_TD


def _norm_warps(width: int, parts: int) -> int:
    """With more elements a thread than two, compilers read parts one after the other, each a trip to memory."""
    if parts <= 1:
        return 4 if width <= 2048 else 8
    return min(32, max(4, next_power_of_2(width) // 64))


@kernel(do_not_specialize=["num_rows"])
def _add_rms_norm(
    residual_ptr,
    update_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual_ptr + row * WIDTH + d, mask=inside, other=0.0)
    if PARTS > 0:
        total = summed(update_ptr + row * WIDTH + d, inside, num_rows * WIDTH, PARTS)
        x = (x.to(tl.float32) + total).to(x.dtype)
        tl.store(residual_ptr + row * WIDTH + d, x, mask=inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + d, (wide * factor * weight).to(x.dtype), mask=inside)


@triton.jit
def summed(ptrs, inside, stride, PARTS: tl.constexpr):
    """The sum in float32, in order, of `PARTS` vectors, `stride` elements apart."""
    parts = (tl.load(ptrs, mask=inside, other=0.0).to(tl.float32),)
    for part in tl.static_range(1, PARTS):  # all on their way before the first is needed
        loaded = tl.load(ptrs + part * stride, mask=inside, other=0.0).to(tl.float32)
        parts = parts + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    return total


# hot path
def sum_parts(parts_STD: Tensor, dtype: torch.dtype) -> Tensor:
    """`parts.sum(0)` of float32 parts, in `dtype`, in one kernel, added in order. Never blocks."""
    parts, rows, width = parts_STD.shape
    out_TD = torch.empty(rows, width, dtype=dtype, device=parts_STD.device)
    block = 1024
    _sum_parts[(cdiv(rows * width, block),)](
        parts_STD, out_TD, rows * width, BLOCK=block, PARTS=parts, num_warps=4, **options(parts_STD.device)
    )
    return out_TD


@kernel
def _sum_parts(parts_ptr, out_ptr, count, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = summed(parts_ptr + at, inside, count, PARTS)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up as [T, F], computed in float32, from [T, 2F] that holds gate first, then up."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)


# hot path
def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """`silu_and_mul_reference` in one kernel. Never blocks."""
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    block = 1024
    _silu_and_mul[(rows, cdiv(width, block))](
        gate_up_T2F, out_TF, WIDTH=width, BLOCK=block, num_warps=4, **options(gate_up_T2F.device)
    )
    return out_TF


@kernel
def _silu_and_mul(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + f, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=inside)
