"""Attention of decode rows over paged keys and values: all query heads of some kv heads at once, lengths read on the
device.

Each program takes a piece of the line that `decode_work.py` lays rows end to end on: it may begin inside one row and
end inside another. Parts of rows that were cut are merged by the program that finishes last (flash-decoding's merge).

Legend: B rows, N query heads, K kv heads, H head dim, P pages, S page size.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.decode_work import DecodeWork
from stretto.kernels.jit import kernel
from stretto.kernels.launch import dot_precision, next_power_of_2, options


def decode_attention_reference(
    q_BNH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    page_table_RM: Tensor,
    slot_B: Tensor,
    context_B: Tensor,
    scale: float,
) -> Tensor:
    """softmax(q k scale) v over the first `context` tokens of each row, in float32; o_BNH in q's dtype."""
    rows = []
    for q_NH, slot, context in zip(q_BNH, slot_B.tolist(), context_B.tolist(), strict=True):
        size = keys_PKSH.shape[2]
        pages = page_table_RM[slot, : -(-context // size)]
        groups = q_NH.shape[0] // keys_PKSH.shape[1]
        keys_KCH = keys_PKSH[pages].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(groups, 0)
        values_KCH = values_PKSH[pages].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(groups, 0)
        scores_NC = torch.einsum("nh,nch->nc", q_NH.float(), keys_KCH) * scale
        rows.append(torch.einsum("nc,nch->nh", scores_NC.softmax(1), values_KCH))
    return torch.stack(rows).to(q_BNH.dtype)


# hot path
def decode_attention(
    q_BNH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    page_table_RM: Tensor,
    slot_B: Tensor,
    context_B: Tensor,
    scale: float,
    work: DecodeWork,
    out_BNH: Tensor,
) -> None:
    """`decode_attention_reference` into `out_BNH`, for which `plan_decode_work` has filled `work`. Never blocks.

    Contexts are at least 1. q's rows may be a view into a fused projection. A row whose page table or context is wrong
    reads other pages, but nothing outside the cache as long as the table's entries are pages.
    """
    rows, heads, dim = q_BNH.shape
    kv_heads, page_size = keys_PKSH.shape[1], keys_PKSH.shape[2]
    tuning = work.tuning
    together = heads // kv_heads * tuning.heads
    one_page = page_size % tuning.unit == 0
    buffers = tuning.buffers if keys_PKSH.element_size() <= 2 else 1
    _decode_attention[(kv_heads // tuning.heads, work.num_pieces(kv_heads))](
        q_BNH,
        keys_PKSH,
        values_PKSH,
        page_table_RM,
        slot_B,
        context_B,
        work.line_B2,
        work.first_row_C,
        work.partial_C2QH,
        work.partial_state_C2Q2,
        work.arrived_BK,
        out_BNH,
        rows,
        q_BNH.stride(0),
        keys_PKSH.stride(0),
        page_table_RM.stride(0),
        out_BNH.stride(0),
        scale * 1.4426950408889634,
        HEADS=tuning.heads,
        GROUPS=heads // kv_heads,
        TOGETHER=together,
        TOGETHER_PAD=max(16, next_power_of_2(together)),
        TOGETHER_MERGED=next_power_of_2(together),
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        PAGE=page_size,
        UNIT=tuning.unit,
        ONE_PAGE=one_page,
        PARTS=max(1, 16 // next_power_of_2(together)),
        PRECISION=dot_precision(q_BNH.dtype),
        num_warps=tuning.warps,
        # Page numbers read in the pipeline take a stage for each buffer; one page's is read a turn ahead instead.
        num_stages=buffers + 1 if one_page else 2 * buffers + 1,
        **options(q_BNH.device),
    )


@kernel(do_not_specialize=["num_rows"])
def _decode_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    slot_ptr,
    context_ptr,
    line_ptr,
    first_row_ptr,
    partial_ptr,
    state_ptr,
    arrived_ptr,
    out_ptr,
    num_rows,
    q_stride,
    page_stride,
    table_stride,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TOGETHER_PAD: tl.constexpr,
    TOGETHER_MERGED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs begin in this order: those with work, where not all have some, are the first.
    group = tl.program_id(0)
    piece = tl.program_id(1)
    num_groups = tl.num_programs(0)
    num_pieces = tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    per_piece = tl.load(line_ptr)
    row = tl.load(first_row_ptr + piece)
    at = piece * per_piece
    stop = at + per_piece
    start = tl.load(line_ptr + 1 + row)
    slot = tl.load(slot_ptr + row, mask=row < num_rows, other=0)
    context = tl.load(context_ptr + row, mask=row < num_rows, other=0)
    n = tl.arange(0, TOGETHER_PAD)
    d = tl.arange(0, DIM_PAD)
    # One side of the products: the unit's tokens, head by head.
    j = tl.arange(0, HEADS * UNIT)
    t = j % UNIT
    own = tl.minimum(n // GROUPS, HEADS - 1)[:, None] == (j // UNIT)[None, :]
    in_q = (n < TOGETHER)[:, None] & (d < DIM)[None, :]
    first_head = group * (HEADS * PAGE * DIM)
    within = ((j // UNIT) * (PAGE * DIM))[:, None] + d[None, :]
    while start < stop:
        # The next row's, which would otherwise be waited for when this one is done.
        following = (row + 1) < num_rows
        next_start = tl.load(line_ptr + 2 + row)
        next_slot = tl.load(slot_ptr + row + 1, mask=following, other=0)
        next_context = tl.load(context_ptr + row + 1, mask=following, other=0)
        length = context.to(tl.int32)
        units = (length + UNIT - 1) // UNIT
        begin = tl.maximum(at - start, 0)
        end = tl.minimum(stop - start, units)
        table = page_table_ptr + slot.to(tl.int64) * table_stride
        q_row = q_ptr + row.to(tl.int64) * q_stride + (group * TOGETHER + n)[:, None] * DIM + d[None, :]
        q = tl.load(q_row, mask=in_q, other=0.0)
        top = tl.full((TOGETHER_PAD,), float("-inf"), tl.float32)
        total_weight = tl.zeros((TOGETHER_PAD,), tl.float32)
        acc = tl.zeros((TOGETHER_PAD, DIM_PAD), tl.float32)
        if ONE_PAGE:
            ahead = tl.load(table + begin * UNIT // PAGE)
        for block in range(begin, end):
            token = block * UNIT + t
            seen = token < length
            if ONE_PAGE:
                page = ahead.to(tl.int64)
                ahead = tl.load(table + tl.minimum(block + 1, units - 1) * UNIT // PAGE)
                place = page * page_stride + (first_head + (token % PAGE) * DIM)[:, None] + within
            else:
                pages = tl.load(table + token // PAGE, mask=seen, other=0).to(tl.int64)
                place = (pages * page_stride + first_head + (token % PAGE) * DIM)[:, None] + within
            inside = seen[:, None] & (d < DIM)[None, :]
            k = tl.load(keys_ptr + place, mask=inside, other=0.0)
            v = tl.load(values_ptr + place, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            # Where a head meets another's keys, the product is ignored.
            scores = tl.where(own & seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total_weight = total_weight * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            top = new_top
        if (begin == 0) & (end == units):
            out_row = out_ptr + row.to(tl.int64) * out_stride + (group * TOGETHER + n)[:, None] * DIM + d[None, :]
            tl.store(out_row, (acc / total_weight[:, None]).to(out_ptr.dtype.element_ty), mask=in_q)
        else:
            # Part 0 of a program belongs to a row that an earlier program began, part 1 to one that it began itself.
            part = (group * num_pieces + piece) * 2 + (begin == 0).to(tl.int32)
            tl.store(partial_ptr + (part * TOGETHER + n)[:, None] * DIM + d[None, :], acc, mask=in_q)
            tl.store(state_ptr + (part * TOGETHER + n) * 2, top, mask=n < TOGETHER)
            tl.store(state_ptr + (part * TOGETHER + n) * 2 + 1, total_weight, mask=n < TOGETHER)
            # All threads' stores before the one thread's count; whoever counts last sees them all.
            tl.debug_barrier()
            first_piece = start // per_piece
            last_piece = (start + units - 1) // per_piece
            arrived = tl.atomic_add(arrived_ptr + row * num_groups + group, 1, sem="acq_rel", scope="gpu")
            if arrived == last_piece - first_piece:
                # Several parts at once: one after the other, each would wait for its own loads.
                m = tl.arange(0, TOGETHER_MERGED)
                merged_top = tl.full((TOGETHER_MERGED,), float("-inf"), tl.float32)
                merged_weight = tl.zeros((TOGETHER_MERGED,), tl.float32)
                merged = tl.zeros((TOGETHER_MERGED, DIM_PAD), tl.float32)
                for first_other in range(first_piece, last_piece + 1, PARTS):
                    other = first_other + tl.arange(0, PARTS)
                    other_part = (group * num_pieces + other) * 2 + (other == first_piece).to(tl.int32)
                    line = other_part[:, None] * TOGETHER + m[None, :]
                    there = (other <= last_piece)[:, None] & (m < TOGETHER)[None, :]
                    tops = tl.load(state_ptr + line * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    sums = tl.load(state_ptr + line * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    parts = tl.load(
                        partial_ptr + line[:, :, None] * DIM + d[None, None, :],
                        mask=there[:, :, None] & (d < DIM)[None, None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    top_so_far = tl.maximum(merged_top, tl.max(tops, 0))
                    shrunk = tl.exp2(merged_top - top_so_far)
                    factor = tl.exp2(tops - top_so_far[None, :])
                    merged_weight = merged_weight * shrunk + tl.sum(sums * factor, 0)
                    merged = merged * shrunk[:, None] + tl.sum(parts * factor[:, :, None], 0)
                    merged_top = top_so_far
                merged_row = (
                    out_ptr + row.to(tl.int64) * out_stride + (group * TOGETHER + m)[:, None] * DIM + d[None, :]
                )
                tl.store(
                    merged_row,
                    (merged / merged_weight[:, None]).to(out_ptr.dtype.element_ty),
                    mask=(m < TOGETHER)[:, None] & (d < DIM)[None, :],
                )
                tl.store(arrived_ptr + row * num_groups + group, 0)
        row += 1
        start = next_start
        slot = next_slot
        context = next_context
