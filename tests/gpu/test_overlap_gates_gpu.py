"""On a GPU: the guard sees every kind of hidden sync, no mix of features has one, and the device stays busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto import LLM, SamplingParams
from stretto.bench import workloads
from stretto.observe import HiddenSync, SyncGuard, profile
from stretto.observe.trace import Severity, analyze

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """Numbers on the GPU."""
    return torch.arange(6, device="cuda")


LOOKS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "item": ("item", lambda x: x[0].item()),
    "int": ("item", lambda x: int(x[1])),
    "tolist": ("tolist", lambda x: x.tolist()),
    "cpu": ("to-host", lambda x: x.cpu()),
    "to cpu": ("to-host", lambda x: x.to("cpu")),
    "copy into pageable memory": ("to-host", lambda x: torch.empty(6, dtype=torch.int64).copy_(x, non_blocking=True)),
    "truth": ("truth-value", lambda x: bool((x >= 0).all())),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "mask": ("nonzero", lambda x: x[x > 2]),
    "unique": ("nonzero", lambda x: x.unique()),
    "repeats on the device": ("repeat-interleave", lambda x: x.repeat_interleave(x)),
    "equal": ("compare", lambda x: torch.equal(x, x)),
    "tensor of a list": ("pageable-upload", lambda x: torch.tensor([1, 2], device=x.device)),
    "pageable copy": ("pageable-upload", lambda x: torch.arange(6).to(x.device)),
    "pageable copy that shall not block": (
        "pageable-upload",
        lambda x: torch.arange(6).to(x.device, non_blocking=True),
    ),
    "pinned copy that blocks": ("upload", lambda x: torch.arange(6).pin_memory().to(x.device)),
    "stream": ("sync", lambda x: torch.cuda.current_stream().synchronize()),
    "device": ("device-sync", lambda x: torch.cuda.synchronize()),
}
WORK: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: torch.where(x > 2, x * 2, 0),
    "gather": lambda x: x[x.flip(0)],
    "host tensors": lambda x: (torch.arange(3).tolist(), bool(torch.ones(()).all()), torch.tensor([1, 2])),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_raises_and_is_counted(name: str, x: torch.Tensor) -> None:
    kind, look = LOOKS[name]
    look(x)
    with SyncGuard("count") as counting:
        look(x)
    assert [(one.kind, one.count, one.file) for one in counting.findings()] == [(kind, 1, __file__)]
    uploads = ("pageable-upload", "upload")
    assert counting.findings()[0].severity is (Severity.SHORTENED if kind in uploads else Severity.LOST)
    with pytest.raises(HiddenSync), SyncGuard("raise"):
        look(x)


@pytest.mark.parametrize("name", WORK)
def test_work_that_waits_for_nothing_passes(name: str, x: torch.Tensor) -> None:
    WORK[name](x)
    with SyncGuard("raise"):
        WORK[name](x)


def test_without_looking_at_every_call_syncs_are_heard_of(x: torch.Tensor) -> None:
    guard = SyncGuard("count")
    with guard.watch(inspect=False):
        x.tolist()
        x[x > 2]
    guard.close()
    assert [(one.kind, one.file) for one in guard.findings()] == [("sync", __file__)] * 2
    with SyncGuard("raise"):
        pass
    x.tolist()  # nothing listens any more


def test_allow_lets_through(x: torch.Tensor) -> None:
    with SyncGuard("raise") as guard, guard.allow("a test"):
        x.tolist()
        torch.cuda.synchronize()
    assert guard.findings() == []
    assert sum(guard.allowed.values()) == 2


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "ignore_eos": True, "detokenize": False, **options})


MIXES = {
    "greedy": _params(temperature=0),
    "plain": _params(temperature=0.8),
    "top-k": _params(top_k=5),
    "top-p": _params(top_p=0.8),
    "min-p": _params(min_p=0.1),
    "min tokens": _params(min_tokens=5, stop_token_ids=[3, 4], ignore_eos=False),
    "log-probabilities": _params(logprobs=3),
    "penalties": _params(presence_penalty=1.0, repetition_penalty=1.2),
    "logit bias": _params(logit_bias={3: 5.0}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-0.6B's shape with eight layers."""
    directory = workloads.write_model("qwen3-0.6b", tmp_path_factory.mktemp("models"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    return directory


def _llm(model: Path, **options: object) -> LLM:
    defaults = {
        "load_format": "dummy",
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**30,
        "overlap_depth": 1,
    }
    return LLM(str(model), **{**defaults, **options})


def _run(llm: LLM, params: SamplingParams, prompts: int = 8, length: int = 100) -> None:
    ids = [{"prompt_token_ids": [7 + i] * length} for i in range(prompts)]
    llm.generate(ids, params, use_tqdm=False)


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[LLM]:
    """An engine in which any hidden sync raises."""
    with _llm(model, sync_guard="raise", max_num_batched_tokens=256) as llm:
        yield llm


@pytest.mark.parametrize("name", MIXES)
def test_no_mix_has_a_hidden_sync(name: str, guarded: LLM) -> None:
    _run(guarded, MIXES[name])
    assert guarded.hidden_syncs() == []


def test_all_mixes_together_in_chunks_and_with_cache_hits_have_none(guarded: LLM) -> None:
    for _ in range(2):
        prompts = [{"prompt_token_ids": [5] * 500} for _ in MIXES]
        guarded.generate(prompts, list(MIXES.values()), use_tqdm=False)
    assert guarded.hidden_syncs() == []


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    """An engine that nobody watches, whose steps are 2 ms longer than they need be."""
    with _llm(model, inject="slow-device=2ms", enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize("name", MIXES)
def test_the_device_stays_busy_in_every_mix(name: str, plain: LLM) -> None:
    """With steps that are longer than the host's turn, whatever the host has to do for the mix is hidden."""
    _run(plain, MIXES[name])
    _run(plain, MIXES[name])
    steps = plain.recent_steps(60)
    busy_s = np.median(steps.column("device_end") - steps.column("device_begin"))
    # In nine of ten steps: a machine has other things to do at times, but whatever a mix needs it needs in every step.
    assert np.quantile(steps.column("bubble_s"), 0.9) < 0.01 * busy_s
    assert steps.bubble_share < 0.1


@pytest.mark.parametrize(
    ("inject", "kind", "severity"),
    [("sync@sample", "truth-value", Severity.LOST), ("pageable@stage", "pageable-upload", Severity.SHORTENED)],
)
def test_an_injected_sync_is_found_by_the_guard_and_in_the_trace(
    model: Path, tmp_path: Path, inject: str, kind: str, severity: Severity
) -> None:
    with _llm(model, sync_guard="count", inject=[inject, "slow-device=2ms"]) as llm:
        _run(llm, MIXES["greedy"])
        inspected = [one for one in llm.hidden_syncs() if one.kind == kind]
        assert [(one.severity, Path(one.file).name) for one in inspected] == [(severity, "inject.py")]
        assert {Path(one.file).name for one in llm.hidden_syncs()} == {"inject.py"}
        assert llm.stats().hidden_syncs == llm.stats().steps
    with _llm(model, inject=[inject, "slow-device=2ms"]) as llm:
        _run(llm, MIXES["greedy"])
        with profile(tmp_path / "trace.json"):
            _run(llm, MIXES["greedy"])
    found = [one for one in analyze(tmp_path / "trace.json").devices[0].findings if one.is_hidden_sync]
    assert [(one.kind, one.severity) for one in found] == [(kind, severity)]
    assert "inject.py" in found[0].location
    assert found[0].exact_line
