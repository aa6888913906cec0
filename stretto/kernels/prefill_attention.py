"""Causal attention of prompt chunks over paged keys and values, cached prefixes included.

The online softmax of FlashAttention-2 (Dao, 2023). All query heads of a kv head are in one block, so that its keys and
values are read once for them, and short chunks fill it. Legend: B rows, T tokens of the step, N query heads, K kv
heads, H head dim, P pages, S page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import dot_precision, next_power_of_2, options
from stretto.kernels.prefill_work import PrefillWork

_FEW_TOKENS = 512


def prefill_attention_reference(
    q_TNH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    page_table_RM: Tensor,
    slot_B: Tensor,
    context_B: Tensor,
    query_end_B: Tensor,
    first_row: int,
    scale: float,
) -> Tensor:
    """Each new token of the rows from `first_row` on sees its row's tokens up to itself; float32, o_TNH in q's dtype.

    Tokens of the rows before get zeros.
    """
    out_TNH = torch.zeros_like(q_TNH)
    ends = [0, *query_end_B.tolist()]
    for row in range(first_row, len(ends) - 1):
        begin, end = ends[row], ends[row + 1]
        context = int(context_B[row])
        pages = page_table_RM[slot_B[row], : -(-context // keys_PKSH.shape[2])]
        groups = q_TNH.shape[1] // keys_PKSH.shape[1]
        keys_NCH = keys_PKSH[pages].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(groups, 0)
        values_NCH = values_PKSH[pages].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(groups, 0)
        scores_NtC = torch.einsum("tnh,nch->ntc", q_TNH[begin:end].float(), keys_NCH) * scale
        position_t = torch.arange(context - (end - begin), context, device=q_TNH.device)
        hidden_tC = torch.arange(context, device=q_TNH.device)[None, :] > position_t[:, None]
        weights = scores_NtC.masked_fill(hidden_tC, float("-inf")).softmax(-1)
        out_TNH[begin:end] = torch.einsum("ntc,nch->tnh", weights, values_NCH).to(q_TNH.dtype)
    return out_TNH


def query_blocks(head_dim: int, groups: int) -> tuple[int, ...]:
    """What `query_block` may be."""
    return tuple(max(1, rows // groups) for rows in ((64, 128) if head_dim <= 128 else (64,)))


def query_block(head_dim: int, groups: int, num_tokens: int) -> int:
    """Queries of a block, each of `groups` heads, that suit a step of so many tokens: with few, small blocks keep more
    of the GPU busy."""
    return query_blocks(head_dim, groups)[-1 if num_tokens > _FEW_TOKENS else 0]


def _keys_at_once(rows: int, head_dim: int, element_bytes: int) -> tuple[int, int]:
    """(keys of a block, blocks of keys in shared memory): the fastest of some on an H200, in bf16.

    In float32, whose products take registers, more than fit into them would cost gigabytes: see `count_up_to`.
    """
    if element_bytes > 2:
        return 16, 2
    if head_dim > 128:
        return 32, 2
    return (64, 3) if rows > 64 else (128, 2)


# hot path
def prefill_attention(
    q_TNH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    page_table_RM: Tensor,
    work: PrefillWork,
    programs: int,
    scale: float,
    out_TNH: Tensor,
) -> None:
    """`prefill_attention_reference` of the blocks in `work` into `out_TNH`; all else there is left. Never blocks.

    Keys and values of the new tokens must be in their pages. `programs`, for each kv head, take the blocks in turn:
    best as many as there are.
    """
    heads, dim = q_TNH.shape[1:]
    kv_heads = keys_PKSH.shape[1]
    groups = heads // kv_heads
    rows = max(16, next_power_of_2(work.block_q * groups))
    block_k, stages = _keys_at_once(rows, dim, keys_PKSH.element_size())
    _prefill_attention[(programs, kv_heads)](
        q_TNH,
        keys_PKSH,
        values_PKSH,
        page_table_RM,
        work.num_blocks_1,
        work.block_W4,
        out_TNH,
        q_TNH.stride(0),
        keys_PKSH.stride(0),
        page_table_RM.stride(0),
        out_TNH.stride(0),
        scale * 1.4426950408889634,
        GROUPS=groups,
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        PAGE=keys_PKSH.shape[2],
        ROWS=rows,
        BLOCK_K=block_k,
        PRECISION=dot_precision(q_TNH.dtype),
        num_warps=8 if rows > 64 else 4,
        num_stages=stages,
        **options(q_TNH.device),
    )


@triton.jit
def pages_of_block(table, block, context, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The page of each key of block `block`; 0 from token `context` on."""
    token = block * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(table + token // PAGE, mask=token < context, other=0)


@triton.jit
def attend_blocks(
    q,
    top,
    total,
    acc,
    page,
    first,
    last,
    context,
    position,
    head_keys,
    head_values,
    table,
    page_stride,
    scale,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The softmax's state (maximum, sum, results not normalised yet) after blocks `first` to `last` - 1 of the keys.

    `page`: `pages_of_block` of block `first`; those of block `last` are returned behind the state. Tokens from
    `context` on do not count, where MASKED, nor those behind a query's `position`.
    """
    d = tl.arange(0, q.shape[1])
    for block in range(first, last):
        # Pages are looked up a block ahead. Within a block, keys would be asked for once their pages have come, and
        # then waited for at once.
        next_page = pages_of_block(table, block + 1, context, PAGE, BLOCK_K)
        token = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (d < DIM)[None, :] & (token >= 0)[:, None]
        if MASKED:
            inside = (token < context)[:, None] & (d < DIM)[None, :]
        place = (page.to(tl.int64) * page_stride + (token % PAGE) * DIM)[:, None] + d[None, :]
        k = tl.load(head_keys + place, mask=inside, other=0.0)
        v = tl.load(head_values + place, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        page = next_page
    return top, total, acc, page


@kernel
def _prefill_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    num_blocks_ptr,
    block_ptr,
    out_ptr,
    q_stride,
    page_stride,
    table_stride,
    out_stride,
    scale,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    head_keys = keys_ptr + kv_head * (PAGE * DIM)
    head_values = values_ptr + kv_head * (PAGE * DIM)
    row = tl.arange(0, ROWS)
    query, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_blocks = tl.load(num_blocks_ptr)
    for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        # A chunk's last blocks see the most keys: they come first, or all would wait for them in the end.
        line = block_ptr + (num_blocks - 1 - index) * 4
        first_token = tl.load(line).to(tl.int64)
        count = tl.load(line + 1)
        first_position = tl.load(line + 2)
        slot = tl.load(line + 3).to(tl.int64)
        inside = (query < count)[:, None] & (d < DIM)[None, :]
        token = first_token + query
        q = tl.load(q_ptr + (token * q_stride + head * DIM)[:, None] + d[None, :], mask=inside, other=0.0)
        position = first_position + query
        table = page_table_ptr + slot * table_stride
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
        whole = (first_position + 1) // BLOCK_K
        seen = first_position + count
        last = (seen + BLOCK_K - 1) // BLOCK_K
        page = pages_of_block(table, 0, seen, PAGE, BLOCK_K)
        top, total, acc, page = attend_blocks(
            q,
            top,
            total,
            acc,
            page,
            0,
            whole,
            seen,
            position,
            head_keys,
            head_values,
            table,
            page_stride,
            scale,
            MASKED=False,
            DIM=DIM,
            PAGE=PAGE,
            BLOCK_K=BLOCK_K,
            PRECISION=PRECISION,
        )
        top, total, acc, _ = attend_blocks(
            q,
            top,
            total,
            acc,
            page,
            whole,
            last,
            seen,
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
        o = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        place = (token * out_stride + head * DIM)[:, None] + d[None, :]
        tl.store(out_ptr + place, o.to(out_ptr.dtype.element_ty), mask=inside)
