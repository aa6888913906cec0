"""`deterministic`: a request's logits are the same bits alone, in any batch, chunking, with cached prefixes.

Interpreted on a CPU with a tiny model; `tests/gpu/test_deterministic_gpu.py` has a real shape, graphs and overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.errors import NotSupported
from stretto.kernels.invariant_attention import PartScratch, invariant_attention
from stretto.kernels.invariant_matmul import SMALLEST_TILE, TILES, invariant_matmul, invariant_matmul_reference
from stretto.kernels.prefill_attention import prefill_attention_reference
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.logits_record import Recorded, record_logits
from tests.helpers.tiny_models import save, tiny_config, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
PROMPTS = [[5, 17, 99, 3], list(range(20, 57))]
OTHER = [7] * 9
TOKENS = 2
PARAMS = SamplingParams(temperature=0.9, max_tokens=TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def _weights_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the fused layers run on weights that are not packed for it."""
    monkeypatch.setattr("stretto.layers.linear.onednn_available", lambda: False)
    if not GPU:  # the interpreter is slow: parts of a context that short prompts have several of
        monkeypatch.setattr("stretto.kernels.invariant_attention.PART_TOKENS", 32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(tiny_config("qwen3", num_hidden_layers=2)), tmp_path_factory.mktemp("qwen3")).path


@contextmanager
def started(model: Path, **options: object) -> Iterator[Runtime]:
    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "attention_backend": "triton",
        "num_pages": 100,
        "page_size": 16,
        "max_num_seqs": 4,
        "deterministic": True,
    }
    parts = assemble(EngineConfig(model=str(model), **{**defaults, **options}))  # type: ignore[arg-type]
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=parts.make_runner)
    try:
        yield runtime
    finally:
        runtime.close()


def run(runtime: Runtime, prompts: dict[int, list[int]], params: SamplingParams = PARAMS) -> dict[int, list[int]]:
    """Output ids by seed."""
    requests = {seed: runtime.add(prompt, params, seed=seed) for seed, prompt in prompts.items()}
    with runtime.running():
        while runtime.has_work:
            runtime.step()
    return {seed: runtime.output_ids(request).tolist() for seed, request in requests.items()}


def assert_same(actual: Recorded, expected: Recorded) -> None:
    assert actual.keys() == expected.keys()
    for key, logits_V in expected.items():
        assert torch.equal(actual[key], logits_V), key


@pytest.fixture(scope="module")
def alone(tiny: Path) -> tuple[Recorded, dict[int, list[int]]]:
    """Each request in an engine of its own."""
    recorded: Recorded = {}
    tokens: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.layers.linear.onednn_available", lambda: False)
        if not GPU:
            patch.setattr("stretto.kernels.invariant_attention.PART_TOKENS", 32)
        for seed, prompt in enumerate(PROMPTS):
            with started(tiny, max_num_batched_tokens=64) as runtime:
                own = record_logits(runtime)
                tokens |= run(runtime, {seed: prompt})
                recorded |= own
    assert len(recorded) == TOKENS * len(PROMPTS)
    return recorded, tokens


@pytest.mark.parametrize(("chunk", "depth"), [(64, 1), (12, 2)])
def test_batch_and_chunking_change_no_bit(
    tiny: Path, alone: tuple[Recorded, dict[int, list[int]]], chunk: int, depth: int
) -> None:
    with started(tiny, max_num_batched_tokens=chunk, overlap_depth=depth) as runtime:
        together = record_logits(runtime)
        tokens = run(runtime, {**dict(enumerate(PROMPTS)), 9: OTHER})
    assert {seed: tokens[seed] for seed in alone[1]} == alone[1]
    assert_same({key: logits_V for key, logits_V in together.items() if key[0] != 9}, alone[0])


def test_a_cached_prefix_changes_no_bit(tiny: Path, alone: tuple[Recorded, dict[int, list[int]]]) -> None:
    """`record_logits` compares the second run with the first."""
    with started(tiny) as runtime:
        twice = record_logits(runtime)
        for _ in range(2):
            assert run(runtime, {1: PROMPTS[1]}) == {1: alone[1][1]}
        assert runtime.stats().cached_tokens >= 32
    assert_same(twice, {key: logits for key, logits in alone[0].items() if key[0] == 1})


def test_a_prompt_of_what_was_generated_gives_the_bits_of_the_generation(tiny: Path) -> None:
    """Decode rows and prompts compute the same."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    prompt = PROMPTS[0]
    with started(tiny, enable_prefix_caching=False) as runtime:
        recorded = record_logits(runtime)
        answer = run(runtime, {1: prompt}, params)[1]
        generated = dict(recorded)
        for length in (1, 3):
            run(runtime, {1: prompt + answer[:length]}, SamplingParams(temperature=0, max_tokens=1, logprobs=1))
        assert recorded.keys() == generated.keys(), "the same positions, compared by the recorder"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attention_backend": "torch"}, "attention_backend 'triton'"),
        ({"attention_backend": "auto", "device": "cpu"}, "on a GPU"),
        ({"tensor_parallel_size": 2}, "one rank"),
    ],
    ids=["torch", "cpu", "ranks"],
)
def test_what_could_not_be_kept_is_refused(tiny: Path, options: dict[str, object], why: str) -> None:
    with pytest.raises(NotSupported, match=why), started(tiny, **options):
        pass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "width"), [(96, 64), (130, 200), *([(4096, 1024), (9000, 1000)] if GPU else [])])
def test_a_row_of_a_product_is_the_same_among_any_others(outputs: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(300 if GPU else 70, width, device=DEVICE).to(dtype)
    weight, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((outputs, width), (outputs,)))
    whole = invariant_matmul(x, weight, bias)
    expected = invariant_matmul_reference(x, weight, bias)
    assert float((whole.float() - expected.float()).norm() / expected.float().norm()) < (
        1e-5 if dtype == torch.float32 else 1e-2
    )
    for count in (1, 2, 7, 31, 33, 65):
        assert torch.equal(invariant_matmul(x[5 : 5 + count].clone(), weight, bias), whole[5 : 5 + count]), count
    assert invariant_matmul(x[:0], weight).shape == (0, outputs)
    if GPU and dtype == torch.bfloat16:
        for tile in (*TILES, SMALLEST_TILE):
            assert torch.equal(invariant_matmul(x, weight, bias, tile), whole), tile


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (6, 2, 64, torch.float32),
        (4, 4, 96, torch.float32),
        *([(6, 2, 64, torch.bfloat16), (16, 8, 128, torch.bfloat16), (32, 2, 256, torch.bfloat16)] if GPU else []),
    ],
)
def test_attention_of_a_token_is_the_same_in_any_chunk(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    length, page_size = 1300 if GPU else 45, 16
    pages = -(-length // page_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    q, cache = random(length, heads, dim), random(2, pages + 2, kv_heads, page_size, dim)
    cache[:, 0] = float("nan")
    table = torch.zeros(3, pages, dtype=torch.int64, device=DEVICE)
    table[2] = torch.randperm(pages) + 1
    table[1, 0] = pages + 1

    def attend(chunks: list[tuple[int, int, int]], scratch: PartScratch | None = None) -> torch.Tensor:
        """Rows of (slot, past, new tokens); those of slot 2 are the queries of their positions."""
        q_TNH = torch.cat([q[past : past + new] for _, past, new in chunks])
        rows = torch.tensor(chunks, device=DEVICE)
        out = torch.full_like(q_TNH, float("nan"))
        invariant_attention(
            q_TNH, cache[0], cache[1], table, rows[:, 0].contiguous(), rows[:, 1] + rows[:, 2], rows[:, 2].cumsum(0),
            len(chunks), 0.1, out, scratch,
        )  # fmt: skip
        return out

    whole = attend([(2, 0, length)])
    ends = torch.tensor([length], device=DEVICE)
    expected = prefill_attention_reference(q, cache[0], cache[1], table, ends * 0 + 2, ends, ends, 0, 0.1)
    assert float((whole.float() - expected.float()).norm() / expected.float().norm()) < (
        1e-5 if dtype == torch.float32 else 1e-2
    )
    for past, new in ((0, 1), (length - 1, 1), (17, 20), (3, 40)):
        among = attend([(1, 2, 1), (1, 0, 9), (2, past, new), (1, 4, 3)])[10 : 10 + new]
        assert torch.equal(among, whole[past : past + new]), (past, new)
    scratch = PartScratch.allocate(8, heads, kv_heads, dim, length, DEVICE)
    for pasts in ([length - 1], [0, length - 2, 40, 31, 32]):
        rows = [(2, past, 1) for past in pasts]
        for side_by_side in (scratch if scratch.serves(len(rows)) else None, None):
            assert torch.equal(attend(rows, side_by_side), whole[pasts]), (pasts, side_by_side is None)
        assert not scratch.arrived_BK.any()
