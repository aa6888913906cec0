"""Each Triton kernel computes what its plain-torch reference says: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stretto.kernels import launch, sampling
from stretto.kernels import prefill_attention as prefill
from stretto.kernels.decode_attention import decode_attention, decode_attention_reference
from stretto.kernels.decode_work import DecodeWork, Tuning, plan_decode
from stretto.kernels.elementwise import (
    add_rms_norm,
    add_rms_norm_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from stretto.kernels.prefill_work import PrefillWork, plan_prefill
from stretto.kernels.rope_write import HeadTransform, rope_write, rope_write_reference
from stretto.kernels.small_matmul import Norm, small_matmul, small_matmul_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Equal up to the rounding of the dtype, measured over the whole tensor; NaN never passes."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    limit = tolerance or (1e-2 if actual.dtype == torch.bfloat16 else 1e-5)
    assert error < limit, f"relative error {error}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 1024), (2, 5120)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm(rows: int, width: int, adds: bool, dtype: torch.dtype) -> None:
    residual, update, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width)
    update = update if adds else None
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(expected_residual, update, weight.to(dtype), 1e-6)
    assert_close(add_rms_norm(residual, update, weight.to(dtype), 1e-6), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1500), (2, 3072)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype)
    assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 64), (8, 1, 96), (20, 10, 128), (2, 2, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    tokens, pages, page_size = 5, 7, 16
    angle = torch.randn(50, dim // 2, device=DEVICE)
    turns = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).flatten(1)
    weight = random(heads + kv_heads, dim, dtype=dtype) if normed else None
    transform = HeadTransform(heads, kv_heads, weight, 1e-6, turns)
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)
    locations = torch.randperm(pages * page_size, device=DEVICE)[:tokens]
    cache = torch.zeros(2, pages, kv_heads, page_size, dim, dtype=dtype, device=DEVICE)
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    rope_write(qkv, positions, locations, transform, cache[0], cache[1])
    rope_write_reference(expected_qkv, positions, locations, transform, expected_cache[0], expected_cache[1])
    assert_close(qkv, expected_qkv)
    assert_close(cache, expected_cache)
    assert torch.equal(cache == 0, expected_cache == 0)  # nothing else was written


class Paged:
    """A cache whose rows' pages lie scattered in it; what no row owns is NaN."""

    def __init__(self, contexts: list[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> None:
        used = [-(-context // page_size) for context in contexts]
        pages = sum(used) + 3
        shape = (pages, kv_heads, page_size, dim)
        self.keys, self.values = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
        order = torch.randperm(pages).tolist()
        self.table = torch.zeros(len(contexts) + 2, max(used), dtype=torch.int64)
        self.slots = torch.randperm(len(contexts) + 2)[: len(contexts)]
        for slot, count in zip(self.slots.tolist(), used, strict=True):
            self.table[slot, :count] = torch.tensor([order.pop() for _ in range(count)])
        for page in order:
            self.keys[page], self.values[page] = float("nan"), float("nan")
        self.table, self.slots = self.table.to(DEVICE), self.slots.to(DEVICE)
        self.contexts = torch.tensor(contexts, device=DEVICE)


HEADS = [(4, 2, 64), (8, 1, 96), (6, 2, 128), *([(3, 3, 32), (16, 8, 128), (16, 2, 256), (32, 8, 128)] if GPU else [])]
CONTEXTS = [[1], [65, 1, 200], *([[3] * 7, [130], [8192], [1] * 512, [100 + 3 * i for i in range(256)]] if GPU else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64] if GPU else [16])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=lambda c: f"{len(c)}x{c[0]}")
@pytest.mark.parametrize("pairs", [1, 200, 1000])
def test_decode_attention(
    heads: int, kv_heads: int, dim: int, page_size: int, contexts: list[int], pairs: int, dtype: torch.dtype
) -> None:
    if sum(contexts) * kv_heads * dim > 5e7:
        pytest.skip("the float32 reference would take long")
    paged = Paged(contexts, kv_heads, dim, page_size, dtype)
    rows = len(contexts)
    q = random(rows, heads + 5, dim, dtype=dtype)[:, :heads]
    tuning = Tuning.of(-(-pairs // kv_heads), heads, kv_heads, dim)
    work = DecodeWork.allocate(rows + 3, heads, kv_heads, dim, DEVICE, tuning)
    expected = decode_attention_reference(q, paged.keys, paged.values, paged.table, paged.slots, paged.contexts, 0.3)
    plan_decode(paged.contexts, rows, kv_heads, work)
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.full((rows, heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        decode_attention(q, paged.keys, paged.values, paged.table, paged.slots, paged.contexts, 0.3, work, out)
        assert_close(out, expected)
    assert not work.arrived_BK.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64] if GPU else [16])
@pytest.mark.parametrize(
    ("news", "pasts", "first"),
    [([5], [0], 0), ([1, 1, 70, 3], [9, 0, 130, 0], 2), ([129, 64, 128], [0, 1, 64], 0)],
)
def test_prefill_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    news: list[int],
    pasts: list[int],
    first: int,
    dtype: torch.dtype,
) -> None:
    paged = Paged([new + past for new, past in zip(news, pasts, strict=True)], kv_heads, dim, page_size, dtype)
    ends = torch.tensor(news, device=DEVICE).cumsum(0)
    q = random(sum(news), heads + 2, dim, dtype=dtype)[:, :heads]
    cache, rows = (paged.keys, paged.values, paged.table), (paged.slots, paged.contexts, ends)
    expected = prefill.prefill_attention_reference(q, *cache, *rows, first, 0.3)
    for block_q in prefill.query_blocks(dim, heads // kv_heads):
        work = PrefillWork.allocate(sum(news) + 99, len(news) + 2, block_q, DEVICE)
        plan_prefill(*rows, len(news), first, work)
        most = work.most_blocks(sum(news[first:]), len(news) - first)
        assert sum(-(-new // block_q) for new in news[first:]) == int(work.num_blocks_1) <= most
        for programs in (most, 1):
            out = torch.zeros(sum(news), heads, dim, dtype=dtype, device=DEVICE)
            prefill.prefill_attention(q, *cache, work, programs, 0.3, out)
            assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "outputs"),
    [(64, 48), (200, 40), (2100, 46), *([(1024, 4096), (12288, 512), (4096, 6144), (4096, 4098)] if GPU else [])],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("behind", ["nothing", "gate", "add"])
@pytest.mark.parametrize("biased", [False, True])
def test_small_matmul(width: int, outputs: int, normed: bool, behind: str, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(1, width, dtype=dtype), random(outputs, width, dtype=dtype) / width**0.5
    bias = random(outputs, dtype=dtype) if biased else None
    norm = Norm(random(width, dtype=dtype), 1e-6) if normed else None
    target = random(1, outputs, dtype=dtype) if behind == "add" else None
    copy = None if target is None else target.clone()
    actual = small_matmul(x, weight, bias, norm=norm, gate=behind == "gate", add_to=target)
    expected = small_matmul_reference(x, weight, bias, norm=norm, gate=behind == "gate", add_to=copy)
    assert_close(actual, expected)


@pytest.mark.skipif(not GPU, reason="takes long, interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [896, 1536, 2560, 3072, 5120])
def test_heads_of_real_widths(width: int, dtype: torch.dtype) -> None:
    """Only they have more than 65,536 outputs."""
    x, weight = random(1, width, dtype=dtype), random(65_600, width, dtype=dtype) / width**0.5
    norm = Norm(random(width, dtype=dtype), 1e-6)
    assert_close(small_matmul(x, weight, norm=norm), small_matmul_reference(x, weight, norm=norm))


def sampled_by_kernels(
    logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, token table, lengths) of rows whose slots are 1, 2, ...; the last row is padding (slot 0)."""
    rows = len(temperatures)
    slots = torch.tensor([*range(1, rows), 0], device=DEVICE)
    by_slot = torch.zeros(rows, device=DEVICE)
    seed_by_slot = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    by_slot[slots] = torch.tensor(temperatures, device=DEVICE)
    seed_by_slot[slots] = torch.tensor(seeds, device=DEVICE)
    table = torch.full((rows, 64), -7, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    tokens = torch.full((rows,), -9, dtype=torch.int64, device=DEVICE)
    scratch = sampling.SampleScratch.allocate(rows, logits.shape[1], DEVICE)
    position = torch.tensor(positions, device=DEVICE)
    sampling.sample_rows(logits, slots, position, by_slot, seed_by_slot, table, lengths, tokens, scratch)
    return tokens, table, lengths


@pytest.mark.parametrize("vocabulary", [11, 4096, 9001])
def test_sampling_chooses_what_the_sampler_chooses(vocabulary: int) -> None:
    from stretto.engine.sampler import SampledOut, sample
    from stretto.engine.sampling_rows import SamplingMix, SamplingRows

    rows = 24
    logits = random(rows, vocabulary) * 3
    temperatures = [(0.0, 0.6, 1.0, 7.0)[i % 4] for i in range(rows)]
    seeds = [(-1) ** i * (i * 0x3E3779B97F4A7C1 + 3) for i in range(rows)]
    positions = [1 + 2 * i for i in range(rows)]
    tokens, table, lengths = sampled_by_kernels(logits, temperatures, seeds, positions)
    off = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    out = SampledOut.allocate(rows, 0, DEVICE)
    sample(
        logits,
        SamplingRows(
            torch.tensor(temperatures, device=DEVICE),
            off,
            torch.ones(rows, device=DEVICE),
            torch.zeros(rows, device=DEVICE),
            torch.tensor(seeds, device=DEVICE),
            torch.tensor(positions, device=DEVICE),
            off,
            off[:, None],
        ),
        SamplingMix(False, False, 0, False, False, False, -1),
        out,
    )
    assert tokens.tolist() == out.tokens_S.tolist()
    for row in range(rows - 1):
        assert table[row + 1, positions[row]] == tokens[row]
        assert lengths[row + 1] == positions[row]
    assert (table[0] == -7).all(), "padding feeds nothing back"
    assert lengths[0] == 0


def test_a_row_whose_logits_are_no_numbers_fails_alone() -> None:
    logits = random(5, 5000)
    logits[0, 4999], logits[1, 17], logits[2] = float("nan"), float("inf"), float("-inf")
    tokens, table, _ = sampled_by_kernels(logits, [0.0, 1.0, 1.0, 0.0, 0.0], [1] * 5, [3] * 5)
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert tokens[3] == logits[3].argmax()
    assert table[1:4, 3].tolist() == [0, 0, 0]


def test_equal_logits_give_the_lowest_id() -> None:
    logits = torch.zeros(2, 9001, device=DEVICE)
    logits[0, [8000, 5000, 9000]] = 1.0
    tokens, _, _ = sampled_by_kernels(logits, [0.0, 0.0], [1, 1], [3, 3])
    assert tokens.tolist() == [5000, 0]


def test_draws_follow_the_distribution() -> None:
    rows = 4000 if GPU else 200
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], device=DEVICE)
    logits = probabilities.log().repeat(rows, 1) * 2  # at temperature 2 these are the probabilities
    tokens, _, _ = sampled_by_kernels(logits, [2.0] * rows, list(range(rows)), [1] * rows)
    counts = torch.bincount(tokens, minlength=4).to(torch.float64)
    expected = probabilities.double() * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees of freedom, 1 in 1000


def test_dependent_launch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setenv("STRETTO_DISABLE_PDL", "1")
    asked = launch.dependent_launch.__wrapped__  # past the cache
    assert not asked(torch.device("cuda", 0))  # would fail without a driver if it looked at the device
