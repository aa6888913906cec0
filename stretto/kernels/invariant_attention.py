"""Causal attention over paged keys and values whose every token is, to the bit, the same in any batch and any chunking.

One kernel for prompts and decode rows alike: a decode row is a chunk of one token. A row's context is cut into parts of
a fixed number of tokens from token 0 on. Within a part a token's sums run over blocks of keys in order; parts are
merged in order. All by the same instructions, so a token's result depends on nothing but its own query and the keys and
values up to it: what lies behind it leaves its sums to the bit as they were (they get 0 added, and are multiplied by
2**0). Parts of one tile run one after the other, or, for few rows, side by side in programs of which the last one
merges ("flash-decoding" with parts of fixed length). The query heads that share a kv head share a tile.

Legend: B rows, T tokens of the step, N query heads, K kv heads, G = N / K, H head dim, P pages, S page size, Z parts.
The reference is `prefill_attention_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, dot_precision, next_power_of_2, num_multiprocessors, options
from stretto.kernels.prefill_attention import attend_blocks, pages_of_block

PART_TOKENS = 512
_TILE_ROWS = 64
"""Queries times heads of a tile: one instruction of Hopper's matrix units."""


@dataclass(frozen=True, slots=True)
class PartScratch:
    """Where parts of decode rows that run side by side leave their results, and who of them came last."""

    partial_BKZGH: Tensor
    """float32: unnormalised results."""
    state_BKZG2: Tensor
    """float32: maximum and sum of each."""
    arrived_BK: Tensor
    """int32: parts that are there; 0 between kernels."""

    @classmethod
    def allocate(
        cls, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int, device: torch.device
    ) -> PartScratch:
        """For steps of as many rows as do not keep the GPU busy with one program a row and kv head."""
        rows = min(max_rows, max(1, 2 * num_multiprocessors(device) // num_kv_heads))
        shape = (rows, num_kv_heads, cdiv(max_context, PART_TOKENS), num_heads // num_kv_heads)
        return cls(
            torch.zeros(*shape, head_dim, dtype=torch.float32, device=device),
            torch.zeros(*shape, 2, dtype=torch.float32, device=device),
            torch.zeros(rows, num_kv_heads, dtype=torch.int32, device=device),
        )

    def serves(self, num_rows: int) -> bool:
        """Whether the parts of so many decode rows can, and should, run side by side."""
        return num_rows <= self.partial_BKZGH.shape[0] and self.partial_BKZGH.shape[2] > 1


# hot path
def invariant_attention(
    q_TNH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    page_table_RM: Tensor,
    slot_B: Tensor,
    context_B: Tensor,
    query_end_B: Tensor,
    num_rows: int,
    scale: float,
    out_TNH: Tensor,
    scratch: PartScratch | None = None,
) -> None:
    """Each new token sees its row's tokens up to itself; into `out_TNH`. Never blocks.

    Keys and values of the new tokens must be in their pages. Row b's new tokens end at `query_end[b]` (int64) of T.
    With a `scratch` that serves so many rows, all of which have one token, parts run side by side; to the bit the same.
    """
    tokens, heads, dim = q_TNH.shape
    kv_heads = keys_PKSH.shape[1]
    groups = heads // kv_heads
    groups_pad = next_power_of_2(groups)
    tile_rows = max(_TILE_ROWS, groups_pad)
    queries = tile_rows // groups_pad
    parallel = scratch is not None
    parts = scratch.partial_BKZGH.shape[2] if scratch is not None else 1
    # Where parts do not meet, nobody looks at these.
    partial, state, arrived = (
        (out_TNH, out_TNH, slot_B)
        if scratch is None
        else (scratch.partial_BKZGH, scratch.state_BKZG2, scratch.arrived_BK)
    )
    tiles = num_rows if parallel else tokens // queries + num_rows
    block_k = 16 if q_TNH.dtype.itemsize > 2 else 64 if dim <= 128 else 32  # more would not fit into registers
    _invariant_attention[(tiles, kv_heads, parts)](
        q_TNH,
        keys_PKSH,
        values_PKSH,
        page_table_RM,
        slot_B,
        context_B,
        query_end_B,
        out_TNH,
        partial,
        state,
        arrived,
        num_rows,
        q_TNH.stride(0),
        keys_PKSH.stride(0),
        page_table_RM.stride(0),
        out_TNH.stride(0),
        scale * 1.4426950408889634,
        ROWS=next_power_of_2(max(2, slot_B.shape[0])),
        GROUPS=groups,
        GROUPS_PAD=groups_pad,
        QUERIES=queries,
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        PAGE=keys_PKSH.shape[2],
        BLOCK_K=block_k,
        PART_BLOCKS=PART_TOKENS // block_k,
        KV_HEADS=kv_heads,
        PARTS=parts,
        PARALLEL=parallel,
        PRECISION=dot_precision(q_TNH.dtype),
        num_warps=8 if q_TNH.dtype.itemsize > 2 else 4,
        num_stages=2,
        **options(q_TNH.device),
    )


@triton.jit
def _merge(top, total, acc, part_top, part_total, part_acc):
    """The state of two neighbouring ranges of keys. Written so that there is one way to compute it."""
    new_top = tl.maximum(top, part_top)
    before = tl.exp2(top - new_top)
    here = tl.exp2(part_top - new_top)
    acc = tl.fma(part_acc, tl.broadcast_to(here[:, None], part_acc.shape), acc * before[:, None])
    return new_top, tl.fma(part_total, here, total * before), acc


@triton.jit
def _attend_part(
    q,
    head_keys,
    head_values,
    table,
    part,
    blocks,
    context,
    position,
    page_stride,
    scale,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state (maximum, sum, results not normalised yet) of a tile `q` after part `part` of the keys alone.

    `blocks`: how many blocks of keys the tile sees at most.
    """
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    first = part * PART_BLOCKS
    page = pages_of_block(table, first, context, PAGE, BLOCK_K)
    # All blocks masked: in a second loop for whole ones the compiler could join other pairs of operations.
    top, total, acc, _ = attend_blocks(
        q,
        top,
        total,
        acc,
        page,
        first,
        tl.minimum(first + PART_BLOCKS, blocks),
        context,
        position,
        head_keys,
        head_values,
        table,
        page_stride,
        scale,
        MASKED=True,
        DIM=DIM,
        PAGE=PAGE,
        BLOCK_K=BLOCK_K,
        PRECISION=PRECISION,
    )
    return top, total, acc


@kernel(do_not_specialize=["num_rows"])
def _invariant_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    slot_ptr,
    context_ptr,
    query_end_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    arrived_ptr,
    num_rows,
    q_stride,
    page_stride,
    table_stride,
    out_stride,
    scale,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PARALLEL: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if PARALLEL:
        row = program
        start = row.to(tl.int64)
        first_query = row * 0
        num_new = first_query + 1
    else:
        # Row b's tiles begin at program start[b] // QUERIES + b: distinct, in order, known to every program.
        b = tl.arange(0, ROWS)
        start_B = tl.load(query_end_ptr + b - 1, mask=(b > 0) & (b < num_rows), other=0)
        row = tl.sum(((start_B // QUERIES + b <= program) & (b < num_rows)).to(tl.int32), 0) - 1
        end = tl.load(query_end_ptr + row)
        start = tl.load(query_end_ptr + row - 1, mask=row > 0, other=0)
        first_query = ((program - (start // QUERIES + row)) * QUERIES).to(tl.int32)
        num_new = (end - start).to(tl.int32)
    if first_query < num_new:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        context = tl.load(context_ptr + row).to(tl.int32)
        past = context - num_new
        line = tl.arange(0, QUERIES * GROUPS_PAD)
        query = first_query + line // GROUPS_PAD
        group = line % GROUPS_PAD
        d = tl.arange(0, DIM_PAD)
        inside = ((query < num_new) & (group < GROUPS))[:, None] & (d < DIM)[None, :]
        head_at = ((kv_head * GROUPS + group) * DIM)[:, None] + d[None, :]
        position = past + query
        table = page_table_ptr + slot * table_stride
        head_keys = keys_ptr + kv_head * (PAGE * DIM)
        head_values = values_ptr + kv_head * (PAGE * DIM)
        seen = tl.minimum(context, past + first_query + QUERIES)
        blocks = (seen + BLOCK_K - 1) // BLOCK_K
        parts = (blocks + PART_BLOCKS - 1) // PART_BLOCKS
        first_part = 0
        if PARALLEL:
            first_part = tl.program_id(2)
        if first_part * PART_BLOCKS < blocks:
            q = tl.load(q_ptr + (start + query)[:, None] * q_stride + head_at, mask=inside, other=0.0)
            top, total, acc = _attend_part(
                q,
                head_keys,
                head_values,
                table,
                first_part,
                blocks,
                context,
                position,
                page_stride,
                scale,
                DIM=DIM,
                PAGE=PAGE,
                BLOCK_K=BLOCK_K,
                PART_BLOCKS=PART_BLOCKS,
                PRECISION=PRECISION,
            )
            place = out_ptr + (start + query)[:, None] * out_stride + head_at
            if not PARALLEL:
                for part in range(1, parts):
                    part_top, part_total, part_acc = _attend_part(
                        q,
                        head_keys,
                        head_values,
                        table,
                        part,
                        blocks,
                        context,
                        position,
                        page_stride,
                        scale,
                        DIM=DIM,
                        PAGE=PAGE,
                        BLOCK_K=BLOCK_K,
                        PART_BLOCKS=PART_BLOCKS,
                        PRECISION=PRECISION,
                    )
                    # A query that lies before this part has made no number of it.
                    reaches = position >= part * (PART_BLOCKS * BLOCK_K)
                    both_top, both_total, both_acc = _merge(top, total, acc, part_top, part_total, part_acc)
                    acc = tl.where(reaches[:, None], both_acc, acc)
                    top = tl.where(reaches, both_top, top)
                    total = tl.where(reaches, both_total, total)
            if not PARALLEL or parts == 1:
                tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
            else:
                first_line = (row * KV_HEADS + kv_head) * PARTS
                at = ((first_line + first_part) * GROUPS + group).to(tl.int64)
                is_head = (query < num_new) & (group < GROUPS)
                tl.store(partial_ptr + at[:, None] * DIM + d[None, :], acc, mask=inside)
                tl.store(state_ptr + at * 2, top, mask=is_head)
                tl.store(state_ptr + at * 2 + 1, total, mask=is_head)
                # All threads' stores before the one thread's count; whoever counts last sees them all.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrived_ptr + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
                if arrived == parts - 1:
                    at = (first_line * GROUPS + group).to(tl.int64)
                    acc = tl.load(
                        partial_ptr + at[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg"
                    )
                    top = tl.load(state_ptr + at * 2, mask=is_head, other=0.0, cache_modifier=".cg")
                    total = tl.load(state_ptr + at * 2 + 1, mask=is_head, other=1.0, cache_modifier=".cg")
                    for other in range(1, parts):
                        at = ((first_line + other) * GROUPS + group).to(tl.int64)
                        part_acc = tl.load(
                            partial_ptr + at[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg"
                        )
                        part_top = tl.load(state_ptr + at * 2, mask=is_head, other=0.0, cache_modifier=".cg")
                        part_total = tl.load(state_ptr + at * 2 + 1, mask=is_head, other=1.0, cache_modifier=".cg")
                        top, total, acc = _merge(top, total, acc, part_top, part_total, part_acc)
                    tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
                    tl.store(arrived_ptr + row * KV_HEADS + kv_head, 0)
