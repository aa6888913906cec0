"""What `derive_mixed` makes of a packed plan, value by value, in buffers that hold what the step before left there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from stretto.config import SchedulerConfig
from stretto.engine.staging import PlanLayout
from stretto.engine.tables import DeviceTables
from stretto.kernels.decode_work import DecodeWork, plan_decode
from stretto.kernels.plan import StepInputs
from stretto.kernels.plan_mixed import derive_mixed
from stretto.kernels.prefill_work import PrefillWork, plan_prefill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = SchedulerConfig(
    max_num_seqs=6, max_num_batched_tokens=200, max_model_len=300, page_size=16, num_pages=500, vocab_size=1000
)
BLOCK_Q = 16


@dataclass(frozen=True)
class Case:
    """The rows of a step: new tokens and tokens before them, decode rows first."""

    news: list[int]
    pasts: list[int]
    num_decode: int
    padded: int
    sampled: list[int]


CASES = [
    Case([1, 1, 70, 3, 1, 17], [9, 0, 130, 0, 299, 16], 2, 128, [0, 1, 2, 5]),
    Case([5], [0], 0, 5, [0]),
    Case([16], [40], 0, 32, []),  # a block just full; no row is sampled
    Case([1, 1, 1, 1, 1], [3, 4, 5, 6, 7], 4, 64, [0, 1, 2, 3, 4]),
    Case([1, 199], [250, 0], 1, 200, [0]),
]


def test_every_value_is_that_of_the_plan_and_all_else_is_padding() -> None:
    tables = DeviceTables(CONFIG, DEVICE)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(CONFIG.num_pages - 1, generator=generator)[: tables.page_table_RM[1:].numel()] + 1
    tables.page_table_RM[1:] = pages.view(tables.page_table_RM[1:].shape).to(DEVICE)
    known = torch.randint(0, 1000, tables.token_ids_RL.shape, generator=generator)
    inputs = StepInputs.allocate(CONFIG.max_rows, CONFIG.max_num_batched_tokens, DEVICE)
    work, alone = (DecodeWork.allocate(CONFIG.max_rows, 4, 2, 32, DEVICE) for _ in range(2))
    prefill, prefill_alone = (PrefillWork.allocate(200, CONFIG.max_rows, BLOCK_Q, DEVICE) for _ in range(2))
    for case in (*CASES, CASES[0]):
        tables.token_ids_RL.copy_(known)
        rows, tokens, first = len(case.news), sum(case.news), case.num_decode
        slots = [3, 12, 1, 7, 9, 4][:rows]
        tables.length_R[slots] = torch.tensor(case.pasts, device=DEVICE)
        chunks = [1000 + t for t in range(tokens - first)]
        layout = PlanLayout(rows, len(case.sampled), 0, 0, len(chunks), CONFIG.max_stop_ids)
        words = torch.tensor([*slots, *case.news, *case.sampled, *chunks], dtype=torch.int32, device=DEVICE)
        assert len(words) == layout.num_words
        derive_mixed(words, layout, first, case.padded, 16, tables, inputs, work, 2, prefill)

        ends = torch.tensor(case.news).cumsum(0).tolist()
        contexts = [new + past for new, past in zip(case.news, case.pasts, strict=True)]
        none = [0] * (CONFIG.max_rows - rows)
        assert inputs.context_B.tolist() == contexts + none
        assert inputs.query_end_B.tolist() == ends + [tokens] * (CONFIG.max_rows - rows)
        count = len(case.sampled)
        none = [0] * (CONFIG.max_rows - count)
        assert inputs.slot_S.tolist() == [slots[row] for row in case.sampled] + none
        assert inputs.position_S.tolist() == [contexts[row] for row in case.sampled] + none
        assert inputs.last_token_S.tolist() == [ends[row] - 1 for row in case.sampled] + none
        place = [
            (row, past + i) for row, (n, past) in enumerate(zip(case.news, case.pasts, strict=True)) for i in range(n)
        ]
        unused = [0] * (case.padded - tokens)
        table = tables.page_table_RM.tolist()
        ids = [int(known[slots[row], position]) for row, position in place[:first]] + chunks
        assert inputs.positions_T[: case.padded].tolist() == [position for _, position in place] + unused
        assert (
            inputs.location_T[: case.padded].tolist()
            == [table[slots[row]][position // 16] * 16 + position % 16 for row, position in place] + unused
        )
        assert inputs.input_ids_T[: case.padded].tolist() == ids + unused
        expected = known.clone()
        for (row, position), token in zip(place, ids, strict=True):
            expected[slots[row], position] = token
        assert torch.equal(tables.token_ids_RL.cpu(), expected)

        blocks = [
            [ends[row] - new + begin, min(BLOCK_Q, new - begin), past + begin, slots[row]]
            for row, (new, past) in enumerate(zip(case.news, case.pasts, strict=True))
            for begin in range(0, new, BLOCK_Q)
            if row >= first
        ]
        assert prefill.block_W4[: int(prefill.num_blocks_1)].tolist() == blocks
        assert len(blocks) <= prefill.most_blocks(layout.num_prefill, rows - first)
        on_device = [torch.tensor(values, device=DEVICE) for values in (slots, contexts, ends)]
        plan_prefill(*on_device, rows, first, prefill_alone)
        assert prefill_alone.block_W4[: int(prefill_alone.num_blocks_1)].tolist() == blocks
        if first:
            plan_decode(on_device[1], first, 2, alone)
            assert torch.equal(work.line_B2[: first + 2], alone.line_B2[: first + 2])
            assert torch.equal(work.first_row_C, alone.first_row_C)
