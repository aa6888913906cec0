"""A packed plan on the device: entered into the request tables, and turned into the inputs of a forward pass.

`apply_plan` enters what a plan says; `derive_decode` makes the inputs of a step whose rows all decode, from the tables
alone, so it can be captured in a graph (`plan_mixed.py` those of a step with prompt chunks). What the kernels compute
is what `engine/runner.py` does in plain torch, which is their reference.

Legend: B rows, T tokens of the step, S sampled rows, U new pages, A admitted requests, E stop ids, R slots, L longest
sequence, M pages per request, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.kernels.decode_work import DecodeWork, plan_decode_work
from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2, options

if TYPE_CHECKING:  # only what they are made of matters here; the engine is above the kernels
    from stretto.engine.staging import PlanLayout
    from stretto.engine.tables import DeviceTables

PIECES = 64
"""Pieces of decode attention's line that one program cuts."""
_CHUNK: tl.constexpr = tl.constexpr(256)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Buffers that one step's kernels hand on to the next, at fixed addresses for the life of the engine."""

    slot_B: Tensor
    """int64: the slot of each row; 0 beyond the last."""
    context_B: Tensor
    """int64: tokens of each row once this step's are written."""
    query_end_B: Tensor
    """int64: end of each row's new tokens in T."""
    slot_S: Tensor
    position_S: Tensor
    """int64: index in its sequence of the token being sampled."""
    last_token_S: Tensor
    """int64: index in T of each sampled row's last token."""
    input_ids_T: Tensor
    positions_T: Tensor
    location_T: Tensor
    """int64: page * page size + offset of each new token."""

    @classmethod
    def allocate(cls, max_rows: int, max_tokens: int, device: torch.device) -> StepInputs:
        """Zeros: every row is padding."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return cls(*(zeros(max_rows) for _ in range(6)), *(zeros(max_tokens) for _ in range(3)))


# hot path
def apply_plan(staged: Tensor, layout: PlanLayout, tables: DeviceTables, inputs: StepInputs) -> None:
    """Enter rows, new pages and admitted requests of the packed int32 plan `staged` into tables and inputs."""
    rows_blocks = cdiv(inputs.slot_B.shape[0], 256)
    pages_blocks = cdiv(layout.num_pages, 256)
    _apply_plan[(rows_blocks + pages_blocks + layout.num_admitted,)](
        staged,
        inputs.slot_B,
        tables.page_table_RM,
        tables.length_R,
        tables.temperature_R,
        tables.top_k_R,
        tables.top_p_R,
        tables.min_p_R,
        tables.seed_R,
        tables.min_position_R,
        tables.stop_ids_RE,
        inputs.slot_B.shape[0],
        layout.num_rows,
        2 * layout.num_rows + layout.num_sampled,
        layout.num_pages,
        tables.page_table_RM.stride(0),
        STOPS=layout.stop_width,
        STOPS_PAD=next_power_of_2(max(1, layout.stop_width)),
        num_warps=4,
    )


@kernel(do_not_specialize=["max_rows", "num_rows", "pages_at", "num_pages"])
def _apply_plan(
    staged_ptr,
    slot_ptr,
    page_table_ptr,
    length_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    min_position_ptr,
    stop_ids_ptr,
    max_rows,
    num_rows,
    pages_at,
    num_pages,
    table_stride,
    STOPS: tl.constexpr,
    STOPS_PAD: tl.constexpr,
):
    part = tl.program_id(0)
    rows_blocks = (max_rows + _CHUNK - 1) // _CHUNK
    pages_blocks = (num_pages + _CHUNK - 1) // _CHUNK
    i = tl.arange(0, _CHUNK)
    if part < rows_blocks:
        row = part * _CHUNK + i
        row_slot = tl.load(staged_ptr + row, mask=row < num_rows, other=0)
        tl.store(slot_ptr + row, row_slot.to(tl.int64), mask=row < max_rows)
    elif part < rows_blocks + pages_blocks:
        u = (part - rows_blocks) * _CHUNK + i
        inside = u < num_pages
        page_slot = tl.load(staged_ptr + pages_at + u, mask=inside, other=0).to(tl.int64)
        index = tl.load(staged_ptr + pages_at + num_pages + u, mask=inside, other=0)
        page = tl.load(staged_ptr + pages_at + 2 * num_pages + u, mask=inside, other=0)
        tl.store(page_table_ptr + page_slot * table_stride + index, page.to(tl.int64), mask=inside)
    else:
        words = staged_ptr + pages_at + 3 * num_pages + (part - rows_blocks - pages_blocks) * (9 + STOPS)
        slot = tl.load(words).to(tl.int64)
        tl.store(length_ptr + slot, tl.load(words + 1).to(tl.int64))
        tl.store(top_k_ptr + slot, tl.load(words + 2).to(tl.int64))
        low = tl.load(words + 3).to(tl.int64) & 0xFFFFFFFF
        tl.store(seed_ptr + slot, low | (tl.load(words + 4).to(tl.int64) << 32))
        tl.store(min_position_ptr + slot, tl.load(words + 5).to(tl.int64))
        tl.store(temperature_ptr + slot, tl.load(words + 6).to(tl.float32, bitcast=True))
        tl.store(top_p_ptr + slot, tl.load(words + 7).to(tl.float32, bitcast=True))
        tl.store(min_p_ptr + slot, tl.load(words + 8).to(tl.float32, bitcast=True))
        e = tl.arange(0, STOPS_PAD)
        stop = tl.load(words + 9 + e, mask=e < STOPS, other=0)
        tl.store(stop_ids_ptr + slot * STOPS + e, stop.to(tl.int64), mask=e < STOPS)


# hot path
def derive_decode(
    num_rows: int,
    page_size: int,
    tables: DeviceTables,
    inputs: StepInputs,
    work: DecodeWork,
    num_kv_heads: int,
    table_VD: Tensor,
    out_BD: Tensor,
    first_id: int | None = None,
) -> None:
    """Inputs of `num_rows` rows (padding included) that decode: ids, positions, locations, contexts, the cut of the
    attention's work, and the embedded tokens. Reads `inputs.slot_B`; captured in graphs.

    `first_id`: `table_VD` is a part of the table that begins with this id; tokens that it does not have give zeros.
    """
    width = table_VD.shape[1]
    pieces = work.num_pieces(num_kv_heads)
    _derive_decode[(num_rows + cdiv(pieces, PIECES),)](
        inputs.slot_B,
        tables.token_ids_RL,
        tables.page_table_RM,
        tables.length_R,
        inputs.context_B,
        inputs.input_ids_T,
        inputs.positions_T,
        inputs.location_T,
        table_VD,
        out_BD,
        work.line_B2,
        work.first_row_C,
        num_rows,
        pieces,
        tables.token_ids_RL.stride(0),
        tables.page_table_RM.stride(0),
        PAGE=page_size,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        SPLIT=first_id is not None,
        FIRST_ID=first_id or 0,
        TABLE_ROWS=table_VD.shape[0],
        ROWS=next_power_of_2(max(2, num_rows)),
        UNIT=work.tuning.unit,
        PART=PIECES,
        num_warps=4,
        **options(out_BD.device),
    )


@triton.jit
def cache_location(page_table_ptr, slot, position, inside, table_stride, PAGE: tl.constexpr):
    """page * page size + offset of the token at `position` of the request in `slot`; 0 where not `inside`."""
    page = tl.load(page_table_ptr + slot * table_stride + position // PAGE, mask=inside, other=0)
    return tl.where(inside, page * PAGE + position % PAGE, 0)


@kernel(do_not_specialize=["num_rows", "num_pieces", "token_stride", "table_stride"])
def _derive_decode(
    slot_ptr,
    token_ids_ptr,
    page_table_ptr,
    length_ptr,
    context_ptr,
    input_ids_ptr,
    positions_ptr,
    location_ptr,
    embedding_ptr,
    out_ptr,
    line_ptr,
    first_row_ptr,
    num_rows,
    num_pieces,
    token_stride,
    table_stride,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST_ID: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < num_rows:
        slot = tl.load(slot_ptr + program)
        position = tl.load(length_ptr + slot)
        token = tl.load(token_ids_ptr + slot * token_stride + position)
        location = cache_location(page_table_ptr, slot, position, True, table_stride, PAGE)
        tl.store(context_ptr + program, position + 1)
        tl.store(input_ids_ptr + program, token)
        tl.store(positions_ptr + program, position)
        tl.store(location_ptr + program, location)
        d = tl.arange(0, BLOCK)
        if SPLIT:
            index = token - FIRST_ID
            own_width = tl.where((index >= 0) & (index < TABLE_ROWS), WIDTH, 0)
            row = tl.load(embedding_ptr + index * WIDTH + d, mask=d < own_width, other=0.0)
        else:
            row = tl.load(embedding_ptr + token * WIDTH + d, mask=d < WIDTH)
        tl.store(out_ptr + program.to(tl.int64) * WIDTH + d, row, mask=d < WIDTH)
    else:
        b = tl.arange(0, ROWS)
        slot_B = tl.load(slot_ptr + b, mask=b < num_rows, other=0)
        length = tl.load(length_ptr + slot_B, mask=b < num_rows, other=-1)
        plan_decode_work(
            (length + 1).to(tl.int32),
            num_rows,
            program - num_rows,
            line_ptr,
            first_row_ptr,
            num_pieces,
            ROWS=ROWS,
            UNIT=UNIT,
            PART=PART,
        )
