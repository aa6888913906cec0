"""Attention of decode rows over paged keys and values: work split evenly over the GPU, all query heads of some kv heads
at once, lengths read on the device.

The rows, cut into blocks of tokens, lie end to end on a line, one line for each group of kv heads; the line is cut into
equal pieces, one a program ("stream-K", Osama et al., 2023; the merge of parts is flash-decoding's). A program may
begin inside one row and end inside another. Parts of rows that were cut are merged by the program that finishes last.

Where rows begin on the line is chosen so that programs end together. A row costs more than its tokens: before its
first key come its place, its slot and its page, each a trip to memory. So each row begins one unit after the end of
the one before: without that, a piece of nothing but short rows (the padding of a captured step) took longer than all
others. And if there are more pieces than rows, rows begin where pieces do, so that a program has one row to look up.

Legend: B rows, N query heads, K kv heads, G = N / K, H head dim, P pages, S page size, C programs, Q query heads of a
group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, dot_precision, next_power_of_2, num_multiprocessors, options

_FEW_PAIRS = (128, 256)
"""Up to so many pairs of row and kv head, what a program costs before its first key counts for more than bandwidth."""
LEAST_TOKENS: tl.constexpr = tl.constexpr(64)
"""A program takes at least this many tokens of a row: merging more parts costs more than it saves."""
_BEHIND_ALL: tl.constexpr = tl.constexpr(2**30)
"""A place on the line that no piece reaches."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is shaped; what is best depends on the head dim."""

    unit: int
    """Tokens of a unit."""
    heads: int
    """kv heads of a unit, a power of 2 that divides all: a product has 16 rows for query heads, so several cost no more
    than one, and what lies together in memory is read together."""
    warps: int
    buffers: int
    """Units of keys and values in flight, the one being worked on included; one if elements are 4 bytes wide."""
    programs_per_multiprocessor: int

    @classmethod
    def of(cls, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Tuning:
        """For steps of up to `max_rows` rows. Measured on an H200 for heads of 128; others follow from them."""
        wide = head_dim > 128
        fewest, few = _FEW_PAIRS
        if max_rows * num_kv_heads <= fewest:
            return cls(32, heads=1, warps=4 if wide else 2, buffers=2, programs_per_multiprocessor=2 if wide else 4)
        if max_rows * num_kv_heads <= few:
            return cls(32 if wide else 64, heads=1, warps=4, buffers=2, programs_per_multiprocessor=2)
        if wide:
            return cls(16, heads=1, warps=2, buffers=2, programs_per_multiprocessor=4)
        heads = 8
        while heads > 1 and (num_kv_heads % heads or heads * (num_heads // num_kv_heads) > 16):
            heads //= 2
        # All must fit at once, or the last begin when the first have ended. Fewer than fit are no better: two programs
        # of four heads took a quarter longer than three.
        programs = {8: 1, 4: 3, 2: 4, 1: 8}[heads] * (2 if head_dim <= 64 else 1)
        return cls(16, heads, warps=heads, buffers=2, programs_per_multiprocessor=programs)


def row_steps(max_rows: int, num_kv_heads: int) -> tuple[int, ...]:
    """Numbers of rows, up to `max_rows`, up to which one `Tuning` is best: each wants a `DecodeWork` of its own."""
    few = (max(1, pairs // num_kv_heads) for pairs in _FEW_PAIRS)
    return tuple(sorted({max_rows, *(rows for rows in few if rows < max_rows)}))


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


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """How the line of units is cut for one step, and the room where cut rows meet. Written and read on the device."""

    tuning: Tuning
    num_programs: int
    line_B2: Tensor
    """int32 [B + 2]: units of a piece; where each row begins on the line; where none does, `_BEHIND_ALL`."""
    first_row_C: Tensor
    """int32 [C]: the row in which each piece begins; those of the line's end that is not in use: the row after all."""
    partial_C2QH: Tensor
    """float32: unnormalised results of cut rows; 0: begun by an earlier program, 1: begun by this one."""
    partial_state_C2Q2: Tensor
    """float32: maximum and sum of each."""
    arrived_BK: Tensor
    """int32: programs that have delivered their part of a row and group; 0 between kernels."""

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        tuning: Tuning | None = None,
    ) -> DecodeWork:
        """Room for steps of up to `max_rows` rows; `tuning` None chooses it for so many."""
        tuning = tuning or Tuning.of(max_rows, num_heads, num_kv_heads, head_dim)
        groups = num_kv_heads // tuning.heads
        programs = max(groups, num_multiprocessors(device) * tuning.programs_per_multiprocessor)
        together = num_heads // groups

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tuning=tuning,
            num_programs=programs,
            line_B2=zeros(max_rows + 2, dtype=torch.int32),
            first_row_C=zeros(programs, dtype=torch.int32),
            partial_C2QH=zeros(programs, 2, together, head_dim, dtype=torch.float32),
            partial_state_C2Q2=zeros(programs, 2, together, 2, dtype=torch.float32),
            arrived_BK=zeros(max_rows, groups, dtype=torch.int32),
        )

    def num_pieces(self, num_kv_heads: int) -> int:
        """Pieces of the line of each group of kv heads."""
        return self.num_programs // (num_kv_heads // self.tuning.heads)


@triton.jit
def plan_decode_work(
    context,
    num_rows,
    part,
    line_ptr,
    first_row_ptr,
    num_pieces,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
):
    """Cut the line: called by programs `part` = 0, 1, ... of a kernel, each for PART pieces.

    `context`: int32 [ROWS], 0 beyond `num_rows`.
    """
    row = tl.arange(0, ROWS)
    there = row < num_rows
    units = (context + UNIT - 1) // UNIT
    total = tl.sum(units, 0)
    least = LEAST_TOKENS // UNIT
    per_piece = tl.maximum((total + num_rows + num_pieces - 1) // num_pieces, least)
    length = units + there.to(tl.int32)
    gap = 1
    # Rows begin where pieces do if there are pieces enough for all their parts, at up to a quarter more units a piece.
    shortest = tl.maximum((total + num_pieces - 1) // num_pieces, least)
    for longer in tl.static_range(2, -1, -1):
        candidate = shortest + longer * ((shortest + 7) // 8)
        parts = (units + candidate - 1) // candidate
        if tl.sum(parts, 0) <= num_pieces:
            per_piece = candidate
            length = parts * candidate
            gap = 0
    start = tl.cumsum(length, 0) - length + gap
    if part == 0:
        tl.store(line_ptr, per_piece)
        tl.store(line_ptr + 1 + row, start, mask=there)
        tl.store(line_ptr + 1 + num_rows, _BEHIND_ALL)
    piece = part * PART + tl.arange(0, PART)
    passed = ((start + units)[None, :] <= (piece * per_piece)[:, None]) & there[None, :]
    tl.store(first_row_ptr + piece, tl.sum(passed.to(tl.int32), 1), mask=piece < num_pieces)


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


# hot path
def plan_decode(context_B: Tensor, num_rows: int, num_kv_heads: int, work: DecodeWork) -> None:
    """Fill `work` for the first `num_rows` rows from their contexts (int64, on the device), as a kernel of its own."""
    part = 64
    pieces = work.num_pieces(num_kv_heads)
    _plan_decode[(cdiv(pieces, part),)](
        context_B,
        work.line_B2,
        work.first_row_C,
        num_rows,
        pieces,
        ROWS=next_power_of_2(max(num_rows, 2)),
        UNIT=work.tuning.unit,
        PART=part,
        num_warps=4,
    )


@kernel(do_not_specialize=["num_rows", "num_pieces"])
def _plan_decode(
    context_ptr,
    line_ptr,
    first_row_ptr,
    num_rows,
    num_pieces,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    context = tl.load(context_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
    plan_decode_work(
        context, num_rows, tl.program_id(0), line_ptr, first_row_ptr, num_pieces, ROWS=ROWS, UNIT=UNIT, PART=PART
    )
