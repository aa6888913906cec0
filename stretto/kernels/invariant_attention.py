"""Causal attention over paged keys and values whose every token is, to the bit, the same in any batch and any chunking.

One kernel for prompts and decode rows alike: a decode row is a chunk of one token. A token's sums run over the blocks
of its row from token 0 on, in order, all by the same instructions, so they depend on nothing but its own query and the
keys and values up to it; blocks that lie behind it leave them to the bit as they were (they add 0 to sums that are
multiplied by 2**0). The query heads that share a kv head share a tile. Legend: B rows, T tokens of the step, N query
heads, K kv heads, G = N / K, H head dim, P pages, S page size. The reference is `prefill_attention_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.launch import dot_precision, options
from stretto.kernels.prefill_attention import attend_block

_TILE_ROWS = 64
"""Queries times heads of a tile: one instruction of Hopper's matrix units."""


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
) -> None:
    """Each new token sees its row's tokens up to itself; into `out_TNH`. Never blocks.

    Keys and values of the new tokens must be in their pages. Row b's new tokens end at `query_end[b]` (int64) of T.
    """
    tokens, heads, dim = q_TNH.shape
    kv_heads = keys_PKSH.shape[1]
    groups = heads // kv_heads
    groups_pad = triton.next_power_of_2(groups)
    tile_rows = max(_TILE_ROWS, groups_pad)
    queries = tile_rows // groups_pad
    _invariant_attention[(tokens // queries + num_rows, kv_heads)](
        q_TNH,
        keys_PKSH,
        values_PKSH,
        page_table_RM,
        slot_B,
        context_B,
        query_end_B,
        out_TNH,
        num_rows,
        q_TNH.stride(0),
        keys_PKSH.stride(0),
        page_table_RM.stride(0),
        out_TNH.stride(0),
        scale * 1.4426950408889634,
        ROWS=triton.next_power_of_2(max(2, slot_B.shape[0])),
        GROUPS=groups,
        GROUPS_PAD=groups_pad,
        QUERIES=queries,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        PAGE=keys_PKSH.shape[2],
        BLOCK_K=64 if dim <= 128 and q_TNH.dtype.itemsize == 2 else 32,
        PRECISION=dot_precision(q_TNH.dtype),
        num_warps=4,
        num_stages=3 if dim <= 128 else 2,
        **options(q_TNH.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _invariant_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    slot_ptr,
    context_ptr,
    query_end_ptr,
    out_ptr,
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
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Row b's tiles begin at program start[b] // QUERIES + b: distinct, in order, known to every program.
    b = tl.arange(0, ROWS)
    start_B = tl.load(query_end_ptr + b - 1, mask=(b > 0) & (b < num_rows), other=0)
    row = tl.sum(((start_B // QUERIES + b <= program) & (b < num_rows)).to(tl.int32), 0) - 1
    end = tl.load(query_end_ptr + row)
    start = tl.load(query_end_ptr + row - 1, mask=row > 0, other=0)
    first_query = (program - (start // QUERIES + row)) * QUERIES
    num_new = end - start
    if first_query < num_new:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        context = tl.load(context_ptr + row)
        past = context - num_new
        line = tl.arange(0, QUERIES * GROUPS_PAD)
        query = first_query + line // GROUPS_PAD
        group = line % GROUPS_PAD
        d = tl.arange(0, DIM_PAD)
        inside = ((query < num_new) & (group < GROUPS))[:, None] & (d < DIM)[None, :]
        head_at = ((kv_head * GROUPS + group) * DIM)[:, None] + d[None, :]
        q = tl.load(q_ptr + (start + query)[:, None] * q_stride + head_at, mask=inside, other=0.0)
        position = past + query
        table = page_table_ptr + slot * table_stride
        head_keys = keys_ptr + kv_head * (PAGE * DIM)
        head_values = values_ptr + kv_head * (PAGE * DIM)
        top = tl.full((QUERIES * GROUPS_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES * GROUPS_PAD,), tl.float32)
        acc = tl.zeros((QUERIES * GROUPS_PAD, DIM_PAD), tl.float32)
        seen = tl.minimum(context, past + first_query + QUERIES)
        # All blocks masked: in a second loop for whole blocks the compiler could join other pairs of operations.
        for block in range(((seen + BLOCK_K - 1) // BLOCK_K).to(tl.int32)):
            acc, top, total = attend_block(
                q,
                acc,
                top,
                total,
                head_keys,
                head_values,
                table,
                block,
                context,
                position,
                page_stride,
                scale,
                MASKED=True,
                DIM=DIM,
                DIM_PAD=DIM_PAD,
                PAGE=PAGE,
                BLOCK_K=BLOCK_K,
                PRECISION=PRECISION,
            )
        o = acc / total[:, None]
        tl.store(out_ptr + (start + query)[:, None] * out_stride + head_at, o.to(out_ptr.dtype.element_ty), mask=inside)
