"""How the queries of a step's prompt chunks are cut into blocks for `prefill_attention`: a list, on the device.

A launch that is captured in a graph cannot depend on where chunks begin and end. So its programs look that up: the list
has a record for each block of queries, in order, and programs take blocks until there are none. `derive_mixed` writes
it with the rest of a step's inputs, `plan_prefill` alone. Legend: B rows, T tokens of the step, W blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2

BLOCKS_PER_PROGRAM = 32
"""Records that one program writes."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The blocks of one step, written and read on the device."""

    block_q: int
    """Most queries of a block."""
    num_blocks_1: Tensor
    """int32 [1]."""
    block_W4: Tensor
    """int32: index in T of the first query, number of queries, position of the first in its sequence, slot."""

    @classmethod
    def allocate(cls, max_tokens: int, max_rows: int, block_q: int, device: torch.device) -> PrefillWork:
        """Room for steps of `max_tokens` tokens in `max_rows` rows; no blocks."""
        most = max_tokens // block_q + max_rows
        return cls(
            block_q,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(most, 4, dtype=torch.int32, device=device),
        )

    def most_blocks(self, num_tokens: int, num_chunks: int) -> int:
        """How many blocks `num_chunks` chunks of `num_tokens` tokens together may have."""
        return num_tokens // self.block_q + num_chunks


@triton.jit
def count_up_to(ascending, x, COUNT: tl.constexpr):
    """How many of `ascending` [COUNT], a power of two, are at most `x`, for every x; COUNT - 1 where all are.

    By bisection: to compare each with each takes thousands of registers, and what does not fit into them costs a GPU
    gigabytes, as the driver sets it aside for every thread that could run.
    """
    found = x * 0
    for level in tl.static_range(1, 32):
        if COUNT >> level > 0:
            further = found + (COUNT >> level)
            found = tl.where(tl.gather(ascending, further - 1, 0) <= x, further, found)
    return found


@triton.jit
def find_blocks(num_new, first_chunk, num_rows, part, block_q, ROWS: tl.constexpr, PART: tl.constexpr):
    """(record, whether there is such a block, its row, its first query in the row, where the row begins in T), each
    [PART], of program `part` = 0, 1, ...; and the number of all blocks.

    `num_new`: int32 [ROWS], 0 beyond `num_rows`. The rows from `first_chunk` on are chunks.
    """
    b = tl.arange(0, ROWS)
    blocks = (tl.where(b < first_chunk, 0, num_new) + block_q - 1) // block_q
    end = tl.cumsum(blocks, 0)
    record = part * PART + tl.arange(0, PART)
    row = tl.minimum(count_up_to(end, record, ROWS), num_rows - 1)
    first = (record - tl.gather(end - blocks, row, 0)) * block_q
    start = tl.gather(tl.cumsum(num_new, 0) - num_new, row, 0)
    total = tl.sum(blocks, 0)
    return record, record < total, row, first, start, total


@triton.jit
def write_blocks(
    record, there, first, start, num_new, past, slot, total, part, block_q, num_blocks_ptr, block_ptr
):  # all but the last five: [PART], of `find_blocks` and of its rows
    """Write the records that `find_blocks` found."""
    line = block_ptr + record * 4
    tl.store(line, (start + first).to(tl.int32), mask=there)
    tl.store(line + 1, tl.minimum(num_new - first, block_q).to(tl.int32), mask=there)
    tl.store(line + 2, (past + first).to(tl.int32), mask=there)
    tl.store(line + 3, slot.to(tl.int32), mask=there)
    if part == 0:
        tl.store(num_blocks_ptr, total)


# hot path
def plan_prefill(
    slot_B: Tensor, context_B: Tensor, query_end_B: Tensor, num_rows: int, first_chunk: int, work: PrefillWork
) -> None:
    """Fill `work` from int64 tensors on the device, as a kernel of its own. Never blocks.

    Row b's new tokens end at `query_end[b]` of T, and are the last of its `context[b]` tokens. Those of the rows before
    `first_chunk` are no chunks.
    """
    _plan_prefill[(cdiv(work.block_W4.shape[0], BLOCKS_PER_PROGRAM),)](
        slot_B,
        context_B,
        query_end_B,
        work.num_blocks_1,
        work.block_W4,
        num_rows,
        first_chunk,
        work.block_q,
        ROWS=next_power_of_2(max(2, num_rows)),
        PART=BLOCKS_PER_PROGRAM,
        num_warps=4,
    )


@kernel(do_not_specialize=["num_rows", "first_chunk", "block_q"])
def _plan_prefill(
    slot_ptr,
    context_ptr,
    query_end_ptr,
    num_blocks_ptr,
    block_ptr,
    num_rows,
    first_chunk,
    block_q,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    part = tl.program_id(0)
    b = tl.arange(0, ROWS)
    end = tl.load(query_end_ptr + b, mask=b < num_rows, other=0)
    begin = tl.load(query_end_ptr + b - 1, mask=(b > 0) & (b < num_rows), other=0)
    num_new = (end - begin).to(tl.int32)
    record, there, row, first, start, total = find_blocks(num_new, first_chunk, num_rows, part, block_q, ROWS, PART)
    row_new = (tl.load(query_end_ptr + row, mask=there, other=0) - start).to(tl.int32)
    past = tl.load(context_ptr + row, mask=there, other=0) - row_new
    slot = tl.load(slot_ptr + row, mask=there, other=0)
    write_blocks(record, there, first, start, row_new, past, slot, total, part, block_q, num_blocks_ptr, block_ptr)
