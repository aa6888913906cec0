"""Attention of decode rows over paged keys and values: work split evenly over the GPU, all query heads of a kv head at
once, lengths read on the device.

The keys of all (row, kv head) pairs, cut into blocks of tokens, lie end to end on one line of *units*; the line is cut
into equal pieces, one a program ("stream-K", Osama et al., 2023; the merge of parts is flash-decoding's). A program
may begin inside one pair and end inside another. Parts of pairs that were cut are merged by the program that finishes
last. Legend: B rows, N query heads, K kv heads, G = N / K, H head dim, P pages, S page size, C programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import dot_precision, num_multiprocessors, options

FEW_PAIRS = 128
"""Up to so many pairs of row and kv head, programs are few and have several warps; beyond, many with one."""
LEAST_TOKENS: tl.constexpr = tl.constexpr(64)
"""A program takes at least this many tokens of a pair: merging more parts costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is shaped; what is best depends on the head dim."""

    unit: int
    """Tokens of a unit."""
    warps: int
    stages: int
    """Turns of the loop in flight: keys and values get (stages - 1) // 2 buffers, as page numbers must come first."""
    programs_per_multiprocessor: int

    @classmethod
    def of(cls, head_dim: int, *, few: bool) -> Tuning:
        """Measured on an H200 for heads of 128. `few`: not many more pairs of row and kv head than multiprocessors."""
        if few:
            return cls(unit=64 if head_dim <= 128 else 32, warps=4, stages=5, programs_per_multiprocessor=2)
        if head_dim <= 128:
            return cls(unit=16, warps=1, stages=5, programs_per_multiprocessor=8)
        return cls(unit=16, warps=2, stages=5, programs_per_multiprocessor=4)


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
    """How the line of units is cut for one step, and the room where cut pairs meet. Written and read on the device."""

    tuning: Tuning
    num_programs: int
    first_unit_B1: Tensor
    """int32 [B + 1]: units (per kv head) of the rows before each row; the last entry is of all rows."""
    first_row_C: Tensor
    """int32 [C]: the row in which each program begins."""
    partial_C2GH: Tensor
    """float32: unnormalised results of cut pairs; 0: begun by an earlier program, 1: begun by this one."""
    partial_state_C2G2: Tensor
    """float32: maximum and sum of each."""
    arrived_BK: Tensor
    """int32: programs that have delivered their part of a pair; 0 between kernels."""

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
        tuning = tuning or Tuning.of(head_dim, few=max_rows * num_kv_heads <= FEW_PAIRS)
        programs = num_multiprocessors(device) * tuning.programs_per_multiprocessor
        groups = num_heads // num_kv_heads

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tuning=tuning,
            num_programs=programs,
            first_unit_B1=zeros(max_rows + 1, dtype=torch.int32),
            first_row_C=zeros(programs, dtype=torch.int32),
            partial_C2GH=zeros(programs, 2, groups, head_dim, dtype=torch.float32),
            partial_state_C2G2=zeros(programs, 2, groups, 2, dtype=torch.float32),
            arrived_BK=zeros(max_rows, num_kv_heads, dtype=torch.int32),
        )


@triton.jit
def plan_decode_work(
    context,
    num_rows,
    part,
    first_unit_ptr,
    first_row_ptr,
    num_programs,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
):
    """Cut the line: called by programs `part` = 0, 1, ... of a kernel, each for PART programs of the attention.

    `context`: int32 [ROWS], 0 beyond `num_rows`.
    """
    row = tl.arange(0, ROWS)
    units = (context + UNIT - 1) // UNIT
    end = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    if part == 0:
        tl.store(first_unit_ptr + row + 1, end, mask=row < num_rows)
        tl.store(first_unit_ptr, 0)
    per_program = tl.maximum((total * KV_HEADS + num_programs - 1) // num_programs, LEAST_TOKENS // UNIT)
    program = part * PART + tl.arange(0, PART)
    before = ((end * KV_HEADS)[None, :] <= (program * per_program)[:, None]) & (row < num_rows)[None, :]
    tl.store(first_row_ptr + program, tl.sum(before.to(tl.int32), 1), mask=program < num_programs)


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

    q's rows may be a view into a fused projection. A row whose page table or context is wrong reads other pages, but
    nothing outside the cache as long as the table's entries are pages.
    """
    rows, heads, dim = q_BNH.shape
    kv_heads, page_size = keys_PKSH.shape[1], keys_PKSH.shape[2]
    _decode_attention[(work.num_programs,)](
        q_BNH,
        keys_PKSH,
        values_PKSH,
        page_table_RM,
        slot_B,
        context_B,
        work.first_unit_B1,
        work.first_row_C,
        work.partial_C2GH,
        work.partial_state_C2G2,
        work.arrived_BK,
        out_BNH,
        rows,
        work.num_programs,
        q_BNH.stride(0),
        keys_PKSH.stride(0),
        page_table_RM.stride(0),
        out_BNH.stride(0),
        scale * 1.4426950408889634,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        GROUPS_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        PAGE=page_size,
        GROUPS_MERGED=triton.next_power_of_2(heads // kv_heads),
        UNIT=work.tuning.unit,
        PARTS=8,
        PRECISION=dot_precision(q_BNH.dtype),
        num_warps=work.tuning.warps,
        num_stages=work.tuning.stages,
        **options(q_BNH.device),
    )


@kernel(do_not_specialize=["num_rows", "num_programs"])
def _decode_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    slot_ptr,
    context_ptr,
    first_unit_ptr,
    first_row_ptr,
    partial_ptr,
    state_ptr,
    arrived_ptr,
    out_ptr,
    num_rows,
    num_programs,
    q_stride,
    page_stride,
    table_stride,
    out_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUPS_MERGED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(first_unit_ptr + num_rows) * KV_HEADS
    per_program = tl.maximum((total + num_programs - 1) // num_programs, LEAST_TOKENS // UNIT)
    unit = program * per_program
    stop = tl.minimum(unit + per_program, total)
    row = tl.load(first_row_ptr + program)
    g = tl.arange(0, GROUPS_PAD)
    d = tl.arange(0, DIM_PAD)
    t = tl.arange(0, UNIT)
    in_q = (g < GROUPS)[:, None] & (d < DIM)[None, :]
    while unit < stop:
        row_first = tl.load(first_unit_ptr + row)
        row_units = tl.load(first_unit_ptr + row + 1) - row_first
        within_row = unit - row_first * KV_HEADS
        head = within_row // row_units
        begin = within_row - head * row_units
        end = tl.minimum(row_units, begin + stop - unit)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        context = tl.load(context_ptr + row).to(tl.int32)
        table = page_table_ptr + slot * table_stride
        head_row = row.to(tl.int64) * q_stride + (head * GROUPS + g)[:, None] * DIM + d[None, :]
        q = tl.load(q_ptr + head_row, mask=in_q, other=0.0)
        head_keys = keys_ptr + head * (PAGE * DIM)
        head_values = values_ptr + head * (PAGE * DIM)
        top = tl.full((GROUPS_PAD,), float("-inf"), tl.float32)
        total_weight = tl.zeros((GROUPS_PAD,), tl.float32)
        acc = tl.zeros((GROUPS_PAD, DIM_PAD), tl.float32)
        for block in range(begin, end):
            token = block * UNIT + t
            seen = token < context
            page = tl.load(table + token // PAGE, mask=seen, other=0).to(tl.int64)
            place = (page * page_stride + (token % PAGE) * DIM)[:, None] + d[None, :]
            inside = seen[:, None] & (d < DIM)[None, :]
            k = tl.load(head_keys + place, mask=inside, other=0.0)
            v = tl.load(head_values + place, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total_weight = total_weight * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            top = new_top
        out_row = out_ptr + row.to(tl.int64) * out_stride + (head * GROUPS + g)[:, None] * DIM + d[None, :]
        if (begin == 0) & (end == row_units):
            tl.store(out_row, (acc / total_weight[:, None]).to(out_ptr.dtype.element_ty), mask=in_q)
        else:
            # Part 0 of a program belongs to a pair that an earlier program began, part 1 to one that it began itself.
            part = program * 2 + (begin == 0).to(tl.int32)
            tl.store(partial_ptr + (part * GROUPS + g)[:, None] * DIM + d[None, :], acc, mask=in_q)
            tl.store(state_ptr + (part * GROUPS + g) * 2, top, mask=g < GROUPS)
            tl.store(state_ptr + (part * GROUPS + g) * 2 + 1, total_weight, mask=g < GROUPS)
            # All threads' stores before the one thread's count; whoever counts last sees them all.
            tl.debug_barrier()
            pair_first = unit - begin
            first_program = pair_first // per_program
            last_program = (pair_first + row_units - 1) // per_program
            arrived = tl.atomic_add(arrived_ptr + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
            if arrived == last_program - first_program:
                # Several parts at once: one after the other, each would wait for its own loads.
                m = tl.arange(0, GROUPS_MERGED)
                merged_top = tl.full((GROUPS_MERGED,), float("-inf"), tl.float32)
                merged_weight = tl.zeros((GROUPS_MERGED,), tl.float32)
                merged = tl.zeros((GROUPS_MERGED, DIM_PAD), tl.float32)
                for first_other in range(first_program, last_program + 1, PARTS):
                    other = first_other + tl.arange(0, PARTS)
                    line = (other * 2 + (other == first_program).to(tl.int32))[:, None] * GROUPS + m[None, :]
                    there = (other <= last_program)[:, None] & (m < GROUPS)[None, :]
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
                merged_row = out_ptr + row.to(tl.int64) * out_stride + (head * GROUPS + m)[:, None] * DIM + d[None, :]
                tl.store(
                    merged_row,
                    (merged / merged_weight[:, None]).to(out_ptr.dtype.element_ty),
                    mask=(m < GROUPS)[:, None] & (d < DIM)[None, :],
                )
                tl.store(arrived_ptr + row * KV_HEADS + head, 0)
        unit += end - begin
        if (head == KV_HEADS - 1) & (end == row_units):
            row += 1


# hot path
def plan_decode(context_B: Tensor, num_rows: int, num_kv_heads: int, work: DecodeWork) -> None:
    """Fill `work` for the first `num_rows` rows from their contexts (int64, on the device), as a kernel of its own."""
    part = 64
    _plan_decode[(triton.cdiv(work.num_programs, part),)](
        context_B,
        work.first_unit_B1,
        work.first_row_C,
        num_rows,
        work.num_programs,
        ROWS=triton.next_power_of_2(max(num_rows, 2)),
        KV_HEADS=num_kv_heads,
        UNIT=work.tuning.unit,
        PART=part,
        num_warps=4,
    )


@kernel(do_not_specialize=["num_rows", "num_programs"])
def _plan_decode(
    context_ptr,
    first_unit_ptr,
    first_row_ptr,
    num_rows,
    num_programs,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    context = tl.load(context_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
    plan_decode_work(
        context,
        num_rows,
        tl.program_id(0),
        first_unit_ptr,
        first_row_ptr,
        num_programs,
        ROWS=ROWS,
        KV_HEADS=KV_HEADS,
        UNIT=UNIT,
        PART=PART,
    )
