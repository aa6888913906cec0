"""How the work of `decode_attention` is cut: evenly over the GPU, on the device, from the rows' lengths.

The rows, cut into blocks of tokens, lie end to end on a line, one line for each group of kv heads; the line is cut into
equal pieces, one a program ("stream-K", Osama et al., 2023). `derive_decode` and `derive_mixed` write the cut with the
rest of a step's inputs, `plan_decode` alone.

Where rows begin on the line is chosen so that programs end together. A row costs more than its tokens: before its
first key come its place, its slot and its page, each a trip to memory. So each row begins one unit after the end of
the one before: without that, a piece of nothing but short rows (the padding of a captured step) took longer than all
others. And if there are more pieces than rows, rows begin where pieces do, so that a program has one row to look up.

Legend: B rows, K groups of kv heads, H head dim, C programs, Q query heads of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.jit import kernel
from stretto.kernels.launch import H200, cdiv, gpu_of, next_power_of_2, num_multiprocessors

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
    def of(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        shared_memory: int = H200.shared_memory,
    ) -> Tuning:
        """For steps of up to `max_rows` rows, on a GPU whose programs may have so many bytes of shared memory."""
        tuning = fitting = cls._on_h200(max_rows, num_heads, num_kv_heads, head_dim)
        if shared_memory >= H200.shared_memory:
            return tuning
        while fitting.bytes_needed(head_dim) > shared_memory and (fitting.heads > 1 or fitting.unit > 16):
            if fitting.heads > 1:
                fitting = replace(fitting, heads=fitting.heads // 2, warps=max(1, fitting.warps // 2))
            else:
                fitting = replace(fitting, unit=fitting.unit // 2)
        at_once = max(1, shared_memory // fitting.bytes_needed(head_dim))
        if fitting == tuning:
            at_once = min(at_once, tuning.programs_per_multiprocessor)
        return replace(fitting, programs_per_multiprocessor=at_once)

    @classmethod
    def _on_h200(cls, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Tuning:
        """Measured for heads of 128; others follow from them."""
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

    def bytes_needed(self, head_dim: int) -> int:
        """About how many bytes of shared memory a program takes: keys and values of 16 bits, and a quarter for what
        they are multiplied with. Of 32 bits it is as much, as one unit is in flight."""
        return 2 * self.buffers * self.heads * self.unit * next_power_of_2(head_dim) * 2 * 5 // 4


def row_steps(max_rows: int, num_kv_heads: int) -> tuple[int, ...]:
    """Numbers of rows, up to `max_rows`, up to which one `Tuning` is best: each wants a `DecodeWork` of its own."""
    few = (max(1, pairs // num_kv_heads) for pairs in _FEW_PAIRS)
    return tuple(sorted({max_rows, *(rows for rows in few if rows < max_rows)}))


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
        """Room for steps of up to `max_rows` rows; `tuning` None chooses it for so many on the device."""
        tuning = tuning or Tuning.of(max_rows, num_heads, num_kv_heads, head_dim, gpu_of(device).shared_memory)
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
