"""How decode attention's work is cut: every token once, and programs that end together whatever the rows are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stretto.bench.decode_state import w1_decode_step
from stretto.kernels import decode_work as decode
from stretto.kernels.decode_attention import decode_attention, decode_attention_reference
from tests.test_kernels import DEVICE, GPU, Paged, assert_close, random

KV_HEADS = 8
MIXES = {
    "one": [1],
    "one long": [5000],
    "few equal": [384] * 8,
    "few mixed": [300, 1, 16, 2000, 17],
    "one long among short": [8000, *[3] * 40],
    "as many short": [1] * 300,
    "mixed": [100 + (i * 7919) % 1500 for i in range(256)],
    "padded": [900 + 7 * i for i in range(35)] + [1] * 5,
    "padding first": [1] * 13 + [2000] * 20,
}


def cut(
    contexts: list[int], multiprocessors: int, tuning: decode.Tuning, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[tuple[int, int, int]]], int]:
    """((row, first unit, end) that each piece takes, as the kernel goes along the line), and the units of a piece."""
    monkeypatch.setattr(decode, "num_multiprocessors", lambda device: multiprocessors)
    rows = len(contexts)
    work = decode.DecodeWork.allocate(rows, 2 * KV_HEADS, KV_HEADS, 128, DEVICE, tuning)
    decode.plan_decode(torch.tensor(contexts, device=DEVICE), rows, KV_HEADS, work)
    per_piece, *starts = work.line_B2.tolist()
    taken = []
    for piece in range(work.num_pieces(KV_HEADS)):
        row, at = int(work.first_row_C[piece]), piece * per_piece
        mine = []
        while starts[row] < at + per_piece:
            units = -(-contexts[row] // work.tuning.unit)
            mine.append((row, max(at - starts[row], 0), min(at + per_piece - starts[row], units)))
            row += 1
        taken.append(mine)
    return taken, per_piece


@pytest.mark.parametrize("contexts", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("max_rows", [1, 32, 256])
def test_pieces_take_every_unit_once_and_none_has_much_more_to_do(
    contexts: list[int], max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = decode.Tuning.of(max_rows, 2 * KV_HEADS, KV_HEADS, 128)
    taken, per_piece = cut(contexts, 66, tuning, monkeypatch)
    seen: list[list[int]] = [[] for _ in contexts]
    for mine in taken:
        assert all(begin < end for _, begin, end in mine)
        for row, begin, end in mine:
            seen[row].extend(range(begin, end))
    assert seen == [list(range(-(-context // tuning.unit))) for context in contexts]
    # A row is looked up before its first unit, which takes about as long as one.
    costs = [sum(end - begin + 1 for _, begin, end in mine) for mine in taken]
    assert max(costs) <= per_piece + 2
    units = sum(-(-context // tuning.unit) for context in contexts)
    even = -(-(units + len(contexts)) // len(taken))
    assert per_piece <= max(1.25 * even + 1, decode.LEAST_TOKENS.value // tuning.unit)


def test_rows_begin_with_pieces_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row each, so that a program looks up one and merges nothing that it need not."""
    taken, _ = cut([384] * 32, 132, decode.Tuning(64, 1, 4, 2, 2), monkeypatch)
    assert [len(mine) for mine in taken] == [1] * 32 + [0]


@pytest.mark.parametrize(
    ("contexts", "tuning"),
    [
        ([1] * 9 + [40, 70], decode.Tuning(16, 1, 1, 2, 4)),
        ([130, 5, 64], decode.Tuning(16, 4, 2, 2, 4)),
        ([33] * 7, decode.Tuning(32, 2, 2, 2, 1)),
        ([200], decode.Tuning(16, 4, 4, 2, 8)),
    ],
    ids=["short", "four heads", "page over units", "one row"],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (12, 4), (8, 8)])
@pytest.mark.parametrize("page_size", [1, 8, 64] if GPU else [8, 64])
def test_attention_of_several_heads_a_unit(
    contexts: list[int], tuning: decode.Tuning, heads: int, kv_heads: int, page_size: int
) -> None:
    torch.manual_seed(0)
    rows, dim = len(contexts), 32
    paged = Paged(contexts, kv_heads, dim, page_size, torch.float32)
    q = random(rows, heads, dim)
    work = decode.DecodeWork.allocate(rows, heads, kv_heads, dim, DEVICE, tuning)
    arguments = (paged.keys, paged.values, paged.table, paged.slots, paged.contexts)
    expected = decode_attention_reference(q, *arguments, 0.3)
    decode.plan_decode(paged.contexts, rows, kv_heads, work)
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.full_like(q, float("nan"))
        decode_attention(q, *arguments, 0.3, work, out)
        assert_close(out, expected)
    assert not work.arrived_BK.any()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "heads"),
    [(16, 8, 8), (32, 8, 4), (64, 8, 2), (40, 10, 2), (6, 3, 1), (16, 16, 8), (64, 2, 1)],
)
def test_heads_of_a_unit_divide_all_and_fit_into_one_product(num_heads: int, num_kv_heads: int, heads: int) -> None:
    assert decode.Tuning.of(1000, num_heads, num_kv_heads, 128).heads == heads


def test_each_step_of_rows_has_its_own_tuning() -> None:
    for max_rows in (1, 16, 17, 32, 33, 256):
        steps = decode.row_steps(max_rows, 8)
        assert steps[-1] == max_rows
        assert len({decode.Tuning.of(rows, 16, 8, 128) for rows in steps}) == len(steps)
        for rows in range(1, max_rows + 1):
            holding = next(most for most in steps if rows <= most)
            assert decode.Tuning.of(rows, 16, 8, 128) == decode.Tuning.of(holding, 16, 8, 128)


def test_a_step_of_w1_is_what_its_requests_have_come_to() -> None:
    state = w1_decode_step(420)
    rows = int((state.slot_B > 0).sum())
    assert state.num_tokens == state.context_B[:rows].sum()
    assert len(np.unique(state.slot_B[:rows])) == rows < len(state.slot_B)
    assert (state.context_B[rows:] == 1).all()
    pages = [
        page
        for slot, context in zip(state.slot_B[:rows], state.context_B[:rows], strict=True)
        for page in state.page_table_RM[slot, : -(-context // 16)]
    ]
    assert 0 not in pages
    assert len(set(pages)) == len(pages)
    with pytest.raises(ValueError, match="step 3 of W1 is none in which all rows decode"):
        w1_decode_step(3)
