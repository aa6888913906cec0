"""Norm of q and k heads, rotary turn, and the write of new keys and values into their pages, in one kernel.

The projection may come in parts: float32 [parts, T, X, H], whose sum it is (`few_rows.py`).

Legend: T tokens, N query heads, K kv heads, Q = N + K, X = N + 2 K, H head dim, P pages, S page size, L positions.
Head dimensions are in pair order: elements 2i and 2i + 1 turn together (models/rope.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.elementwise import summed
from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options

_HEADS = 8
"""Heads that one program handles."""


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What happens to every head of q and k before attention."""

    num_heads: int
    num_kv_heads: int
    norm_weight_QH: Tensor | None
    """RMS norm's weight for each head of q, then of k; None: no norm."""
    eps: float
    turns_LH: Tensor
    """float32 [L, H]: cosine and sine of every pair in turn, at every position."""


def rope_write_reference(
    qkv_TXH: Tensor,
    positions_T: Tensor,
    location_T: Tensor,
    transform: HeadTransform,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
) -> Tensor:
    """Norm and turn q and k of `qkv_TXH` in place, then store k and v in the cache. Returns the changed projection.

    `location` is page * S + offset. Parts are not changed: their sum, in the cache's dtype, is.
    """
    if qkv_TXH.dim() == 4:
        qkv_TXH = qkv_TXH.sum(0).to(keys_PKSH.dtype)
    heads, kv_heads = transform.num_heads, transform.num_kv_heads
    page_size = keys_PKSH.shape[2]
    qk_TQH = qkv_TXH[:, : heads + kv_heads].float()
    if transform.norm_weight_QH is not None:
        factor = torch.rsqrt(qk_TQH.square().mean(-1, keepdim=True) + transform.eps)
        qk_TQH = qk_TQH * factor * transform.norm_weight_QH.float()
    turns_T1hC = torch.view_as_complex(transform.turns_LH.unflatten(-1, (-1, 2)))[positions_T].unsqueeze(1)
    turned = torch.view_as_real(torch.view_as_complex(qk_TQH.unflatten(-1, (-1, 2)).contiguous()) * turns_T1hC)
    qkv_TXH[:, : heads + kv_heads] = turned.flatten(-2).to(qkv_TXH.dtype)
    page_T, offset_T = location_T // page_size, location_T % page_size
    keys_PKSH[page_T, :, offset_T] = qkv_TXH[:, heads : heads + kv_heads]
    values_PKSH[page_T, :, offset_T] = qkv_TXH[:, heads + kv_heads :]
    return qkv_TXH


# hot path
def rope_write(
    qkv_TXH: Tensor,
    positions_T: Tensor,
    location_T: Tensor,
    transform: HeadTransform,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
) -> Tensor:
    """`rope_write_reference` in one kernel. `qkv_TXH` contiguous; positions and locations int64. Never blocks."""
    tokens, width, dim = qkv_TXH.shape[-3:]
    parts = qkv_TXH.shape[0] if qkv_TXH.dim() == 4 else 0
    out_TXH = qkv_TXH.new_empty((tokens, width, dim), dtype=keys_PKSH.dtype) if parts else qkv_TXH
    heads, kv_heads = transform.num_heads, transform.num_kv_heads
    q_groups, kv_groups = cdiv(heads, _HEADS), cdiv(kv_heads, _HEADS)
    norm = transform.norm_weight_QH
    _rope_write[(tokens, q_groups + 2 * kv_groups)](
        qkv_TXH,
        out_TXH,
        tokens,
        positions_T,
        location_T,
        transform.turns_LH if norm is None else norm,
        transform.turns_LH,
        keys_PKSH,
        values_PKSH,
        keys_PKSH.stride(0),
        transform.eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        DIM=dim,
        BLOCK=next_power_of_2(dim),
        PAGE=keys_PKSH.shape[2],
        GROUP=_HEADS,
        NORM=norm is not None,
        PARTS=parts,
        num_warps=4 if parts <= 2 else 8,
        **options(qkv_TXH.device),
    )
    return out_TXH


@triton.jit
def transformed(
    x,
    norm_weight,
    turns,
    eps,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads [ROWS, DIM_PAD] normed (with float32 weights of the same shape) and turned, in their own dtype."""
    wide = x.to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)
        wide = wide * factor[:, None] * norm_weight
    cosine, sine = tl.split(tl.reshape(turns, (DIM_PAD // 2, 2)))
    even, odd = tl.split(tl.reshape(wide, (ROWS, DIM_PAD // 2, 2)))
    turned = tl.join(
        even * cosine[None, :] - odd * sine[None, :],
        even * sine[None, :] + odd * cosine[None, :],
    )
    return tl.reshape(turned, (ROWS, DIM_PAD)).to(x.dtype)


@kernel(do_not_specialize=["tokens"])
def _rope_write(
    qkv_ptr,
    out_ptr,
    tokens,
    positions_ptr,
    location_ptr,
    norm_ptr,
    turns_ptr,
    keys_ptr,
    values_ptr,
    page_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    kv_groups: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    d = tl.arange(0, BLOCK)
    within = tl.arange(0, GROUP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    # Heads counted over q, then k, then v; `kv_head` within k or v.
    if is_q:
        kv_head = group * GROUP + within
        first = 0
        count = HEADS
    elif is_v:
        kv_head = (group - q_groups - kv_groups) * GROUP + within
        first = HEADS + KV_HEADS
        count = KV_HEADS
    else:
        kv_head = (group - q_groups) * GROUP + within
        first = HEADS
        count = KV_HEADS
    inside = (kv_head < count)[:, None] & (d < DIM)[None, :]
    from_head = (first + kv_head)[:, None] * DIM + d[None, :]
    norm_weight = 0.0
    if NORM:
        norm_weight = tl.load(
            norm_ptr + from_head, mask=inside & (d * 0 + group < q_groups + kv_groups)[None, :], other=0.0
        ).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # All at once, as each costs a trip to memory.
    position = tl.load(positions_ptr + token)
    location = tl.load(location_ptr + token)
    place = token * (WIDTH * DIM) + from_head
    if PARTS > 0:
        x = summed(qkv_ptr + place, inside, tokens.to(tl.int64) * WIDTH * DIM, PARTS).to(out_ptr.dtype.element_ty)
    else:
        x = tl.load(qkv_ptr + place, mask=inside, other=0.0)
    if not is_v:
        turns = tl.load(turns_ptr + position * DIM + d, mask=d < DIM, other=0.0)
        x = transformed(x, norm_weight, turns, eps, GROUP, DIM, BLOCK, NORM)
        tl.store(out_ptr + place, x, mask=inside)
    elif PARTS > 0:
        tl.store(out_ptr + place, x, mask=inside)
    if not is_q:
        offset = (
            (location // PAGE) * page_stride + kv_head[:, None] * (PAGE * DIM) + (location % PAGE) * DIM + d[None, :]
        )
        if is_v:
            tl.store(values_ptr + offset, x, mask=inside)
        else:
            tl.store(keys_ptr + offset, x, mask=inside)
