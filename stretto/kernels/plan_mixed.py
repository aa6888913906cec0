"""The inputs of a step with prompt chunks, from its packed plan and the request tables, on the device.

One kernel for all of it, whose reference is what `engine/runner.py` does in plain torch. It makes padding too, so that
what follows can be a graph that knows no numbers of rows, chunks and tokens.

Legend: B rows, T tokens of the step, S sampled rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl
from torch import Tensor

from stretto.kernels.decode_work import DecodeWork, plan_decode_work
from stretto.kernels.jit import kernel
from stretto.kernels.launch import cdiv, next_power_of_2
from stretto.kernels.plan import PIECES, StepInputs, cache_location
from stretto.kernels.prefill_work import BLOCKS_PER_PROGRAM, PrefillWork, count_up_to, find_blocks, write_blocks

if TYPE_CHECKING:  # only what they are made of matters here; the engine is above the kernels
    from stretto.engine.staging import PlanLayout
    from stretto.engine.tables import DeviceTables

_TOKENS = 64


# hot path
def derive_mixed(
    staged: Tensor,
    layout: PlanLayout,
    num_decode: int,
    padded: int,
    page_size: int,
    tables: DeviceTables,
    inputs: StepInputs,
    work: DecodeWork,
    num_kv_heads: int,
    prefill: PrefillWork,
) -> None:
    """Inputs of a step whose first `num_decode` rows decode and whose others are prompt chunks, from the packed plan.

    The chunks' tokens go into the token table too. Tokens up to `padded` are padding: id 0 at position 0, written to
    page 0. Rows and sampled rows that there are not are slot 0's, of 0 tokens. Also fills what says which tokens are
    sampled from, and where the work of the decode rows' and of the chunks' attention is cut.
    """
    rows = layout.num_rows
    prefill_at = 2 * rows + layout.num_sampled + 3 * layout.num_pages + layout.num_admitted * (9 + layout.stop_width)
    tokens = num_decode + layout.num_prefill
    pieces = work.num_pieces(num_kv_heads)
    plan_programs = cdiv(pieces, PIECES)
    block_programs = cdiv(prefill.most_blocks(layout.num_prefill, rows - num_decode), BLOCKS_PER_PROGRAM)
    _derive_mixed[(cdiv(padded, _TOKENS) + 1 + plan_programs + block_programs,)](
        staged,
        tables.token_ids_RL,
        tables.page_table_RM,
        tables.length_R,
        inputs.context_B,
        inputs.query_end_B,
        inputs.slot_S,
        inputs.position_S,
        inputs.last_token_S,
        inputs.input_ids_T,
        inputs.positions_T,
        inputs.location_T,
        work.line_B2,
        work.first_row_C,
        prefill.num_blocks_1,
        prefill.block_W4,
        inputs.slot_B.shape[0],
        rows,
        layout.num_sampled,
        num_decode,
        tokens,
        padded,
        prefill_at,
        pieces,
        prefill.block_q,
        tables.token_ids_RL.stride(0),
        tables.page_table_RM.stride(0),
        PAGE=page_size,
        ROWS=next_power_of_2(max(2, inputs.slot_B.shape[0])),
        TOKENS=_TOKENS,
        UNIT=work.tuning.unit,
        PART=PIECES,
        BLOCKS=BLOCKS_PER_PROGRAM,
        num_warps=4,
    )


@kernel(
    do_not_specialize=[
        "max_rows",
        "num_rows",
        "num_sampled",
        "num_decode",
        "num_tokens",
        "padded",
        "prefill_at",
        "num_pieces",
        "block_q",
        "token_stride",
        "table_stride",
    ]
)
def _derive_mixed(
    staged_ptr,
    token_ids_ptr,
    page_table_ptr,
    length_ptr,
    context_ptr,
    query_end_ptr,
    slot_S_ptr,
    position_S_ptr,
    last_token_ptr,
    input_ids_ptr,
    positions_ptr,
    location_ptr,
    line_ptr,
    first_row_ptr,
    num_blocks_ptr,
    block_ptr,
    max_rows,
    num_rows,
    num_sampled,
    num_decode,
    num_tokens,
    padded,
    prefill_at,
    num_pieces,
    block_q,
    token_stride,
    table_stride,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    token_programs = (padded + TOKENS - 1) // TOKENS
    plan_programs = (num_pieces + PART - 1) // PART
    b = tl.arange(0, ROWS)
    in_rows = b < num_rows
    num_new = tl.load(staged_ptr + num_rows + b, mask=in_rows, other=0)
    slot_B = tl.load(staged_ptr + b, mask=in_rows, other=0).to(tl.int64)
    end = tl.cumsum(num_new, 0)
    if program < token_programs:
        t = program * TOKENS + tl.arange(0, TOKENS)
        inside = t < num_tokens
        row = tl.minimum(count_up_to(end, t, ROWS), num_rows - 1)
        start = tl.gather(end - num_new, row, 0)
        slot = tl.load(staged_ptr + row, mask=inside, other=0).to(tl.int64)
        position = tl.load(length_ptr + slot, mask=inside, other=0) + (t - start)
        decodes = t < num_decode
        known = token_ids_ptr + slot * token_stride + position
        given = tl.load(staged_ptr + prefill_at + t - num_decode, mask=inside & (t >= num_decode), other=0).to(tl.int64)
        token = tl.where(decodes, tl.load(known, mask=inside & decodes, other=0), given)
        tl.store(known, given, mask=inside & (t >= num_decode))
        location = cache_location(page_table_ptr, slot, position, inside, table_stride, PAGE)
        tl.store(input_ids_ptr + t, token, mask=t < padded)
        tl.store(positions_ptr + t, tl.where(inside, position, 0), mask=t < padded)
        tl.store(location_ptr + t, location, mask=t < padded)
    elif program > token_programs + plan_programs:
        part = program - token_programs - 1 - plan_programs
        record, there, block_row, first, begin, total = find_blocks(
            num_new, num_decode, num_rows, part, block_q, ROWS, BLOCKS
        )
        row_new = tl.load(staged_ptr + num_rows + block_row, mask=there, other=0)
        row_slot = tl.load(staged_ptr + block_row, mask=there, other=0)
        past = tl.load(length_ptr + row_slot, mask=there, other=0)
        write_blocks(
            record, there, first, begin, row_new, past, row_slot, total, part, block_q, num_blocks_ptr, block_ptr
        )
    else:
        length = tl.load(length_ptr + slot_B, mask=in_rows, other=0)
        context = length + num_new
        if program == token_programs:
            tl.store(context_ptr + b, context, mask=b < max_rows)
            tl.store(query_end_ptr + b, end.to(tl.int64), mask=b < max_rows)
            s_inside = b < num_sampled
            row_S = tl.load(staged_ptr + 2 * num_rows + b, mask=s_inside, other=0)
            slot_S = tl.load(staged_ptr + row_S, mask=s_inside, other=0).to(tl.int64)
            grown = tl.load(length_ptr + slot_S, mask=s_inside, other=0)
            grown += tl.load(staged_ptr + num_rows + row_S, mask=s_inside, other=0)
            last = tl.where(s_inside, tl.gather(end, row_S, 0) - 1, 0)
            tl.store(slot_S_ptr + b, slot_S, mask=b < max_rows)
            tl.store(position_S_ptr + b, grown, mask=b < max_rows)
            tl.store(last_token_ptr + b, last.to(tl.int64), mask=b < max_rows)
        else:
            plan_decode_work(
                tl.where(b < num_decode, context, 0).to(tl.int32),
                num_decode,
                program - token_programs - 1,
                line_ptr,
                first_row_ptr,
                num_pieces,
                ROWS=ROWS,
                UNIT=UNIT,
                PART=PART,
            )
