"""The FlashInfer backend tells FlashInfer what a step is: with a stand-in for it that computes in plain torch.

The real one is compared on a GPU (`tests/gpu/test_flashinfer_gpu.py`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stretto import LLM
from stretto.attention.base import AttentionInputs, AttentionShape
from stretto.attention.flashinfer_paged import FlashInferAttention, wrappers_for
from stretto.attention.paged_torch import PagedTorchAttention
from stretto.errors import InvalidRequest, NotSupported
from stretto.kernels.launch import INTERPRETED
from tests.helpers.dummy_model import write_dummy_model

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 64, 16


class _Wrapper:
    """What both wrappers have in common: pages by row, causal attention in float32."""

    made: list[_Wrapper] = []  # noqa: RUF012 - the fixture empties it

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "HND"
        self.plans = 0
        self.made.append(self)

    def _take(
        self, query_B1: Tensor, first_B1: Tensor, pages_X: Tensor, last_B: Tensor, *sizes: int, **kwargs: Any
    ) -> None:
        assert sizes == (HEADS, KV_HEADS, DIM, SIZE)
        assert all(x.dtype == torch.int32 for x in (query_B1, first_B1, pages_X, last_B))
        assert int(first_B1[-1]) == len(pages_X)
        self.plans += 1
        self._step = (query_B1, first_B1, pages_X, last_B, kwargs["sm_scale"])

    def run(self, q_TNH: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        query_B1, first_B1, pages_X, last_B, scale = self._step
        assert q_TNH.is_contiguous()
        assert len(q_TNH) == int(query_B1[-1])
        for row, last in enumerate(last_B.tolist()):
            begin, end = query_B1[row : row + 2].tolist()
            pages = pages_X[int(first_B1[row]) : int(first_B1[row + 1])]
            context = (len(pages) - 1) * SIZE + last
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(2, 0) for x in cache)
            seen = torch.arange(context)[None, :] <= torch.arange(context - (end - begin), context)[:, None]
            scores = torch.einsum("tnh,nch->ntc", q_TNH[begin:end].float(), k) * scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("ntc,nch->tnh", weights, v).to(out.dtype)


class _Decode(_Wrapper):
    def plan(self, first_B1: Tensor, pages_X: Tensor, last_B: Tensor, *sizes: int, **kwargs: Any) -> None:
        self._take(torch.arange(len(last_B) + 1, dtype=torch.int32), first_B1, pages_X, last_B, *sizes, **kwargs)


class _Prefill(_Wrapper):
    def plan(self, query_B1: Tensor, *rest: Any, causal: bool, **kwargs: Any) -> None:
        assert causal
        self._take(query_B1, *rest, **kwargs)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[_Wrapper]:
    library: Any = ModuleType("flashinfer")
    library.__spec__ = object()
    library.BatchDecodeWithPagedKVCacheWrapper = _Decode
    library.BatchPrefillWithPagedKVCacheWrapper = _Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(_Wrapper, "made", [])
    return _Wrapper


def shape_of(**changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "page_size": SIZE,
        "num_pages": 20,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scale": 0.2,
    }
    return AttentionShape(**{**sizes, **changes})


@pytest.mark.skipif(not INTERPRETED, reason="the cut of the decode rows' work is a kernel")
@pytest.mark.parametrize(
    "steps",
    [
        [[(1, 37)], [(1, 1)], [(1, 1)]],
        [[(1, 20), (2, 5)], [(1, 1), (2, 1)], [(1, 1), (2, 1), (3, 30)], [(2, 1), (3, 1)]],
        [[(1, 16)], [(1, 16), (2, 9)], [(1, 1), (2, 9)]],
    ],
    ids=["one row", "rows come and go", "chunks"],
)
def test_steps_are_those_of_the_plain_backend(steps: list[list[tuple[int, int]]], stand_in: type[_Wrapper]) -> None:
    """Rows of (slot, new tokens), each with pages of its own."""
    torch.manual_seed(0)
    flash, plain = FlashInferAttention(shape_of(), 4, overlap_depth=1), PagedTorchAttention(shape_of())
    lengths = dict.fromkeys(range(5), 0)
    for step in steps:
        news = np.array([new for _, new in step])
        contexts = np.array([lengths[slot] + new for slot, new in step])
        lengths.update((slot, int(context)) for (slot, _), context in zip(step, contexts, strict=True))
        table = torch.tensor([[slot * 4 + 3 - page for page in range(4)] for slot, _ in step])
        locations = [
            int(table[row, position // SIZE]) * SIZE + position % SIZE
            for row, ((_, new), context) in enumerate(zip(step, contexts.tolist(), strict=True))
            for position in range(context - new, context)
        ]
        inputs = AttentionInputs(
            page_table_BM=table,
            kv_location_T=torch.tensor(locations),
            query_start_B1=torch.tensor([0, *news.cumsum().tolist()]),
            context_B=torch.tensor(contexts),
            num_new_B_host=news,
            context_B_host=contexts,
            page_table_BM_host=table.numpy(),
        )
        tokens = int(news.sum())
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).to(torch.bfloat16)
        outs = []
        for backend in (flash, plain):
            backend.begin_step(inputs)
            parts = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
            outs.append(torch.stack([backend.attend(layer, *parts).float() for layer in range(2)]))
        assert torch.allclose(outs[0], outs[1], atol=0.02, rtol=0.02)


@pytest.mark.skipif(not INTERPRETED, reason="the cut of the decode rows' work is a kernel")
def test_no_plan_overwrites_one_that_may_still_be_on_its_way(stand_in: type[_Wrapper]) -> None:
    """With depth 2 three steps may be in flight while a fourth is planned: plans go round four wrappers."""
    backend = FlashInferAttention(shape_of(), 4, overlap_depth=2)
    assert wrappers_for(2) == 4
    decoders = [wrapper for wrapper in stand_in.made if isinstance(wrapper, _Decode)]
    assert len(decoders) == 4
    before = [wrapper.plans for wrapper in decoders]
    used = []
    for context in range(1, 9):
        backend.begin_step(
            AttentionInputs(
                torch.ones(1, 1, dtype=torch.int64), torch.tensor([SIZE + context]), torch.tensor([0, 1]),
                torch.tensor([context]), np.array([1]), np.array([context]), None,
            )
        )  # fmt: skip
        after = [wrapper.plans for wrapper in decoders]
        used.append([old != new for old, new in zip(before, after, strict=True)].index(True))
        before = after
    assert used == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("changes", [{"head_dim": 96}, {"dtype": torch.float32}], ids=["heads of 96", "float32"])
def test_shapes_without_a_kernel_are_refused(changes: dict[str, Any], stand_in: type[_Wrapper]) -> None:
    with pytest.raises(NotSupported, match="use 'triton'"):
        FlashInferAttention(shape_of(**changes), 4, overlap_depth=1)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=r"pip install 'stretto\[flashinfer\]'"):
        FlashInferAttention(shape_of(), 4, overlap_depth=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU gets")
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_a_cpu_is_refused(backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.support.interpreted", lambda: False)
    with pytest.raises(InvalidRequest, match="needs a GPU"):
        LLM(str(write_dummy_model(tmp_path)), load_format="dummy", attention_backend=backend)
