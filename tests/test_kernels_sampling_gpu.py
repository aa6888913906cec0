"""On a GPU, at the sizes of real models: the filters' kernels keep exactly what plain torch keeps, captured or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from stretto.engine.sampler import SampledOut, sample
from tests.helpers.sampling import Row, mix_of, tensors_of
from tests.helpers.sampling_kernels import KernelRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCABULARY = 151_936
KINDS = [
    Row(top_k=20, top_p=0.95, temperature=0.6),
    Row(top_p=0.9),
    Row(temperature=0.0),
    Row(top_p=0.999, temperature=1.5),
    Row(top_k=50),
    Row(),
    Row(min_p=0.05, temperature=1.2),
    Row(top_k=1000, top_p=0.8, min_p=0.001),
    Row(top_k=100_000),
    Row(top_k=60_000, top_p=0.99, temperature=3.0),
    Row(top_p=1e-7),
    Row(top_k=1),
    Row(top_k=VOCABULARY, top_p=0.5),
]


def rows_of_all_kinds(count: int) -> list[Row]:
    return [replace(KINDS[i % len(KINDS)], seed=i * 2**53 - 7, position=i % 60) for i in range(count)]


def logits_of(kind: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, VOCABULARY, generator=generator, device="cuda")
    if kind == "peaked":
        x = x * 2 + 12 * (x > 4)
    elif kind == "equal":
        x = x.mul_(0.0)
    elif kind == "masked":
        x[:, 40:] = -torch.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "masked"])
@pytest.mark.parametrize("count", [1, 2, 13, 64, 512])
def test_kept_tokens_are_exactly_those_of_plain_torch(count: int, kind: str, dtype: torch.dtype) -> None:
    rows = rows_of_all_kinds(count)
    logits = logits_of(kind, count, dtype)
    kernels = KernelRows(rows, VOCABULARY, logits.device)
    tokens = kernels.sample(logits)
    kept = kernels.kept(logits)
    assert torch.equal(kept, kernels.kept_by_reference(logits))
    assert kept[torch.arange(count, device="cuda"), tokens].all()


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_distances_are_divided_as_plain_torch_divides_them(scale: float) -> None:
    """At temperatures and for sets of all sizes."""
    generator = torch.Generator().manual_seed(7)
    count, numbers = 128, torch.rand(128, 2, generator=generator).clamp(min=0.01).tolist()
    rows = [
        Row(temperature=0.05 + 2 * a, top_p=b if i % 3 else 1 - b / 1000, top_k=0 if i % 4 else int(3000 * b), seed=i)
        for i, (a, b) in enumerate(numbers)
    ]
    logits = logits_of("flat", count, torch.bfloat16) * scale
    kernels = KernelRows(rows, VOCABULARY, logits.device)
    tokens = kernels.sample(logits)
    kept = kernels.kept(logits)
    assert torch.equal(kept, kernels.kept_by_reference(logits))
    assert kept[torch.arange(count, device="cuda"), tokens].all()


@pytest.mark.parametrize("count", [1, 64, 256])
def test_tokens_are_those_of_plain_torch(count: int) -> None:
    rows = rows_of_all_kinds(count)
    logits = logits_of("peaked", count, torch.bfloat16)
    tokens = KernelRows(rows, VOCABULARY, logits.device).sample(logits)
    out = SampledOut.allocate(count, 0, logits.device)
    sample(logits.float(), tensors_of(rows).to(logits.device), mix_of(rows, VOCABULARY), out)
    # exp and log differ in their last bits, which seldom decides.
    assert (tokens != out.tokens_S).sum() <= 1


def test_a_row_is_alone_what_it_is_in_any_batch() -> None:
    rows = rows_of_all_kinds(200)
    logits = logits_of("flat", 200, torch.bfloat16)
    together = KernelRows(rows, VOCABULARY, logits.device)
    tokens = together.sample(logits).tolist()
    plain = [row for row in range(200) if rows[row].top_k == 0 and rows[row].top_p == 1 and rows[row].min_p == 0]
    without = KernelRows([rows[row] for row in plain], VOCABULARY, logits.device)
    assert without.sample(logits[plain], filtered=False).tolist() == [tokens[row] for row in plain]
    for row in range(0, 200, 17):
        alone = KernelRows(rows[row : row + 1], VOCABULARY, logits.device)
        assert alone.sample(logits[row : row + 1]).tolist() == tokens[row : row + 1]
        assert alone.filters.scratch.limit_S[0] == together.filters.scratch.limit_S[row]
        assert alone.filters.scratch.last_S[0] == together.filters.scratch.last_S[row]


@pytest.mark.parametrize("count", [1, 40])
def test_a_captured_search_follows_its_inputs_and_waits_for_nothing(count: int) -> None:
    rows = rows_of_all_kinds(count)
    kernels = KernelRows(rows, VOCABULARY, torch.device("cuda"))
    logits = logits_of("flat", count, torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        kernels.sample(logits)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            kernels.sample(logits)
    for kind in ("peaked", "equal", "flat"):
        logits.copy_(logits_of(kind, count, torch.bfloat16))
        kernels.seed_R.add_(1)
        kernels.filters.top_p_R.copy_(kernels.filters.top_p_R.roll(1).clamp(min=0.01))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = kernels.sample(logits).clone()
            kernels.tokens_S.fill_(-9)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.equal(kernels.tokens_S, expected)
