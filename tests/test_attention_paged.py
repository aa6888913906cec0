"""The plain-torch paged backend gives dense attention, whatever the pages, the batch and the stale memory hold."""

from __future__ import annotations

import itertools
import math
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.attention.base import AttentionShape
from stretto.attention.page_work import plan_page_work
from stretto.attention.paged_torch import PagedTorchAttention
from stretto.errors import NotSupported
from tests.helpers.paged_attention import Row, dense_reference, random_row, run_step, step_inputs

LAYERS = 2
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def make_backend(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    poisoned: bool = True,
) -> PagedTorchAttention:
    """A backend whose pages all hold NaN, as under a checking device."""
    scale = 1 / math.sqrt(head_dim)
    backend = PagedTorchAttention(
        AttentionShape(LAYERS, heads, kv_heads, head_dim, page_size, num_pages, dtype, torch.device("cpu"), scale)
    )
    if poisoned:
        for page in range(num_pages):
            backend.poison_page(page)
    return backend


def check_steps(
    backend: PagedTorchAttention, rows: list[Row], steps: list[list[int]], seed: int = 0, tolerance: float = 2e-6
) -> None:
    """Run the steps (new tokens per row, 0 = not in this step) and compare each with the reference."""
    shape, generator = backend.shape, torch.Generator().manual_seed(seed)
    for number, new in enumerate(steps):
        present = [row for row, n in zip(rows, new, strict=True) if n]
        counts = [n for n in new if n]
        q_LTNH = torch.randn(LAYERS, sum(counts), shape.num_heads, shape.head_dim, generator=generator)
        o_LTNH = run_step(backend, present, counts, shape.page_size, q_LTNH, fused=number % 2 == 0)
        torch.testing.assert_close(
            o_LTNH.double(), dense_reference(present, counts, q_LTNH, shape.scale), rtol=tolerance, atol=tolerance
        )


def rows_of(backend: PagedTorchAttention, lengths: list[int], seed: int = 0, *, shuffled: bool = True) -> list[Row]:
    """Rows for up to `lengths` tokens, their pages drawn from the whole pool (or handed out lowest first)."""
    shape = backend.shape
    pages = np.arange(1, shape.num_pages)
    if shuffled:
        np.random.default_rng(seed).shuffle(pages)
    generator, rows, taken = torch.Generator().manual_seed(seed), [], 0
    for length in lengths:
        count = -(-length // shape.page_size)
        own = [int(page) for page in pages[taken : taken + count]]
        taken += count
        rows.append(random_row(own, length, LAYERS, shape.num_kv_heads, shape.head_dim, generator))
    assert taken < shape.num_pages
    return rows


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("shuffled", [False, True])
def test_prompts_then_decode_steps_equal_dense_attention(page_size: int, shuffled: bool) -> None:
    lengths = [40, 1, 7, 70, 130]
    num_pages = 3 + sum(-(-(length + 3) // page_size) for length in lengths) * (2 if shuffled else 1)
    backend = make_backend(page_size=page_size, num_pages=num_pages)
    rows = rows_of(backend, [length + 3 for length in lengths], shuffled=shuffled)
    check_steps(backend, rows, [lengths, [1] * 5, [1] * 5, [1] * 5])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 64), (3, 1, 64), (9, 3, 64), (8, 1, 128), (8, 4, 96), (5, 5, 64), (14, 2, 64), (4, 2, 80), (4, 2, 16)],
)
def test_every_grouping_and_head_dim(heads: int, kv_heads: int, head_dim: int) -> None:
    backend = make_backend(heads, kv_heads, head_dim)
    rows = rows_of(backend, [20, 50, 33])
    check_steps(backend, rows, [[18, 48, 31], [1, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 64, 99])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(chunk: int) -> None:
    backend = make_backend()
    rows = rows_of(backend, [100])
    sizes = [min(chunk, 100 - begin) for begin in range(0, 100, chunk)]
    check_steps(backend, rows, [[size] for size in sizes])


def test_a_long_chunk_after_a_cached_prefix_spans_several_query_blocks() -> None:
    backend = make_backend(heads=2, kv_heads=1, head_dim=16, num_pages=80)
    rows = rows_of(backend, [900])
    check_steps(backend, rows, [[100], [700], [100]])


def test_prefill_and_decode_rows_mix_in_one_step_in_any_order() -> None:
    backend = make_backend()
    rows = rows_of(backend, [60, 60, 60, 60])
    check_steps(backend, rows, [[10, 0, 30, 5], [1, 20, 1, 9], [7, 1, 1, 1], [0, 3, 1, 17], [1, 1, 1, 1]])


def test_rows_share_the_pages_of_a_common_prefix() -> None:
    backend = make_backend(num_pages=64)
    first, *others = rows = rows_of(backend, [100] * 5)
    shared = 48  # three full pages
    for row in others:
        row.pages[:3] = first.pages[:3]
        row.keys_LCKH[:, :shared] = first.keys_LCKH[:, :shared]
        row.values_LCKH[:, :shared] = first.values_LCKH[:, :shared]
    check_steps(backend, [first], [[60]])
    for row in others:
        row.context = shared
    check_steps(backend, rows, [[0, 1, 2, 9, 30], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])


def test_stale_and_released_pages_never_leak_into_a_row() -> None:
    """A failed row's NaN keys and values stay in its page, which the next row begins and does not fill."""
    backend = make_backend(num_pages=4)
    (bad,) = rows_of(backend, [20])
    bad.keys_LCKH[:] = math.nan
    bad.values_LCKH[:] = math.nan
    run_step(backend, [bad], [20], 16, torch.randn(LAYERS, 20, 4, 64))
    (good,) = rows_of(backend, [40], seed=1)
    good.pages = [bad.pages[1], bad.pages[0], ({1, 2, 3} - {*bad.pages}).pop()]
    check_steps(backend, [good], [[19], [1], [1], [15], [1]])


@pytest.mark.parametrize("chunks", [[20], [1, 19], [12, 8]])
def test_a_prompt_shows_nan_in_a_query_or_the_first_key(chunks: list[int]) -> None:
    """Where every score is NaN, torch's attention gives zeros: nothing of the fault would be left to see."""
    for part in ("query", "key"):
        backend = make_backend()
        (row,) = rows_of(backend, [20])
        q_LTNH = torch.randn(LAYERS, 20, 4, 64)
        bad = 15 if part == "query" else 0
        if part == "query":
            q_LTNH[:, bad, 0] = math.nan
        else:
            row.keys_LCKH[:, bad] = math.nan
        begin = 0
        for count in chunks:
            o_LTNH = run_step(backend, [row], [count], 16, q_LTNH[:, begin : begin + count])
            for token in range(begin, begin + count):
                faulty = token == bad if part == "query" else True
                assert bool(o_LTNH[:, token - begin, 0].isnan().all()) == faulty, (part, token)
            if part == "query":
                assert not o_LTNH[:, :, 1].isnan().any()
            begin += count


def test_a_row_of_nan_fails_alone() -> None:
    backend = make_backend()
    rows = rows_of(backend, [40, 40, 40])
    rows[1].values_LCKH[:] = math.nan
    q_LTNH = torch.randn(LAYERS, 60, 4, 64)
    run_step(backend, rows, [20, 20, 20], 16, q_LTNH)
    q_LTNH = torch.randn(LAYERS, 3, 4, 64)
    o_LTNH = run_step(backend, rows, [1, 1, 1], 16, q_LTNH)
    assert o_LTNH[:, 1].isnan().all()
    healthy = [rows[0], rows[2]]
    expected = dense_reference(healthy, [1, 1], q_LTNH[:, [0, 2]], backend.shape.scale)
    torch.testing.assert_close(o_LTNH[:, [0, 2]].double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_decode_row_is_bit_equal_alone_and_in_every_batch(page_size: int, dtype: torch.dtype) -> None:
    lengths = [100, 17, 64, 3, 129, 65, 40, 90]

    def decode(members: list[int], seed: int) -> dict[int, torch.Tensor]:
        backend = make_backend(9, 3, 64, page_size, 80, dtype)
        rows = rows_of(backend, lengths)
        # Where a row's pages lie depends on the batch; what they hold does not.
        pages = np.random.default_rng(seed).permutation(np.arange(1, 80))
        for row in rows:
            row.pages, pages = [int(page) for page in pages[: len(row.pages)]], pages[len(row.pages) :]
        for i, row in enumerate(rows):
            q_LTNH = torch.randn(LAYERS, lengths[i] - 1, 9, 64, generator=torch.Generator().manual_seed(i))
            run_step(backend, [row], [lengths[i] - 1], page_size, q_LTNH, dtype=dtype)
        q_LBNH = torch.stack(
            [torch.randn(LAYERS, 9, 64, generator=torch.Generator().manual_seed(i)) for i in members], 1
        )
        o_LBNH = run_step(backend, [rows[i] for i in members], [1] * len(members), page_size, q_LBNH, dtype=dtype)
        return {member: o_LBNH[:, b] for b, member in enumerate(members)}

    everyone = decode(list(range(8)), seed=0)
    for seed, members in enumerate([[0], [3], [4], [6, 1], [7, 5, 2, 0], [4, 3, 2, 1, 0]], start=1):
        for member, o_LNH in decode(members, seed).items():
            assert torch.equal(o_LNH, everyone[member]), (members, member)


def test_bfloat16_cache_is_as_close_as_bfloat16_is() -> None:
    backend = make_backend(9, 3, 64, 64, 20, torch.bfloat16)
    rows = rows_of(backend, [200, 90, 130])
    for row in rows:
        row.keys_LCKH, row.values_LCKH = row.keys_LCKH.bfloat16().float(), row.values_LCKH.bfloat16().float()
    check_steps(backend, rows, [[190, 88, 100], [1, 1, 20], [1, 1, 1]], tolerance=3e-2)


def test_padding_tokens_after_the_last_row_get_zeros_and_write_to_page_0() -> None:
    backend = make_backend()
    rows = rows_of(backend, [10, 20])
    inputs = step_inputs(rows, [3, 5], 16)
    padded = torch.cat((inputs.kv_location_T, torch.zeros(4, dtype=torch.int64)))
    backend.begin_step(
        type(inputs)(
            inputs.page_table_BM,
            padded,
            inputs.query_start_B1,
            inputs.context_B,
            inputs.num_new_B_host,
            inputs.context_B_host,
            inputs.page_table_BM_host,
        )
    )
    o_TNH = backend.attend(0, torch.randn(12, 4, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 64))
    assert o_TNH[:8].isfinite().all()
    assert (o_TNH[8:] == 0).all()


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(NotSupported, match="9 query heads cannot share 2 kv heads"):
        make_backend(heads=9, kv_heads=2)


def test_the_cache_says_what_it_holds() -> None:
    assert (
        make_backend(kv_heads=2, head_dim=64, page_size=16, num_pages=10).cache_bytes
        == LAYERS * 2 * 10 * 2 * 16 * 64 * 4
    )


@pytest.mark.skipif(not STATM.exists(), reason="reads what is resident from Linux's /proc")
def test_a_cache_takes_memory_only_as_it_is_used() -> None:
    before = resident_bytes()
    backend = make_backend(num_pages=1 << 15, poisoned=False)
    assert backend.cache_bytes == 1 << 30
    assert resident_bytes() - before < 1 << 28
    assert not backend._cache_L2PKSH[:, :, ::1000].any()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_history_of_chunks_decodes_and_sharing(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    backend = make_backend(4, 2, 8, page_size, num_pages=1 + 4 * -(-24 // page_size) * 2)
    rows = rows_of(backend, [24] * 4, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):  # a prefix of 8 tokens, or half a page of 16: only full pages are shared
        full = 8 // page_size
        shared = full * page_size
        check_steps(backend, rows[:1], [[8]], tolerance=1e-5)
        rows[1].pages[:full] = rows[0].pages[:full]
        rows[1].keys_LCKH[:, :shared] = rows[0].keys_LCKH[:, :shared]
        rows[1].values_LCKH[:, :shared] = rows[0].values_LCKH[:, :shared]
        rows[1].context = shared
    for _ in range(data.draw(st.integers(1, 5))):
        new = [data.draw(st.integers(0, min(6, 24 - row.context))) for row in rows]
        if any(new):
            check_steps(backend, rows, [new], tolerance=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    tables=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True), min_size=1, max_size=6),
    page_bytes=st.sampled_from([2_000, 100_000, 1_000_000]),
)
def test_page_work_covers_every_page_of_every_row_exactly_once(tables: list[list[int]], page_bytes: int) -> None:
    num_pages_B = np.array([len(pages) for pages in tables])
    pages_BM = np.zeros((len(tables), 10), dtype=np.int64)
    for b, pages in enumerate(tables):
        pages_BM[b, : len(pages)] = pages
    work = plan_page_work(num_pages_B, pages_BM, page_bytes)
    page_of_slot = list(itertools.chain(*(range(first, first + count) for first, count in work.runs)))
    page_of_slot += work.gathered_pages.tolist()
    assert len(page_of_slot) == work.num_slots
    assert 0 not in page_of_slot
    assert len(set(work.slot_X.tolist())) == num_pages_B.sum()
    for b, pages in enumerate(tables):
        assert [page_of_slot[slot] for slot in work.slot_BM[b, : len(pages)]] == pages
        assert (work.slot_BM[b, len(pages) :] == work.slot_BM[b, 0]).all()
    assert work.covers(num_pages_B, pages_BM)
    changed = pages_BM.copy()
    changed[0, 0] += 1
    assert not work.covers(num_pages_B, changed)
