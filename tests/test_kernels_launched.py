"""What requests launch, starting has compiled: acted on a CPU, where launches are noted and no kernel runs.

`tests/gpu/test_compiled_gpu.py` asks the same of a GPU, whose Triton says what it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.engine import fused_runner
from stretto.kernels.invariant_matmul import invariant_matmul
from stretto.models.fused import FusedDecoder
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.tiny_models import save, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is asked itself")

MIXES = {
    "greedy": SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    "filtered": SamplingParams(top_k=5, top_p=0.8, min_p=0.1, logprobs=2, max_tokens=3, ignore_eos=True),
    "adjusted": SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0}, logprobs=2, max_tokens=3, ignore_eos=True),
    "guarded": SamplingParams(min_tokens=2, stop_token_ids=[3, 4], max_tokens=3),
    "scored": SamplingParams(prompt_logprobs=2, max_tokens=2, ignore_eos=True),
}
LOADS = ((1, 1), (1, 2), (1, 7), (1, 18), (1, 40), (1, 150), (5, 30), (20, 9))
"""(requests, tokens of each prompt); they arrive one by one while others decode."""


class Recorder:
    """Records "graphs" that run their work again."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def __call__(self, work: Callable[[], None]) -> Recorder:
        work()
        return self

    def replay(self) -> None:
        """The work's launches are known."""

    def reset(self) -> None:
        """Nothing is held."""


def kind_of_launch(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[object, ...]:
    """What tells the binaries of Triton's compiler apart."""
    kinds: list[object] = [kernel.__name__, *sorted(constants.items())]
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, torch.Tensor):
            kinds.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, TensorDescriptor):
            kinds.append((name, value.base.dtype, tuple(value.block_shape)))
        elif type(value) is int:
            if name not in (kernel.kwargs["do_not_specialize"] or ()):
                kinds.append((name, value == 1, value % 16 == 0))
        elif type(value) is not float:
            kinds.append((name, value))
    return tuple(kinds)


@pytest.mark.parametrize(("max_num_seqs", "deterministic"), [(1, False), (3, False), (16, False), (1, True)])
def test_nothing_new_is_launched_once_an_engine_has_started(
    max_num_seqs: int, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[object, ...]] = set()

    def note(kernel: Any, *args: Any, grid: object, warmup: bool, **constants: Any) -> None:
        launched.add(kind_of_launch(kernel, args, constants))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    monkeypatch.setattr(fused_runner, "CudaRecorder", Recorder)
    monkeypatch.setattr("stretto.layers.linear.onednn_available", lambda: False)  # weights as on a GPU
    save(tiny_model(tiny_config("qwen3", num_hidden_layers=2, max_position_embeddings=512)), tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        device="cpu",
        num_pages=400,
        page_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        max_model_len=200,
        deterministic=deterministic,
    )
    parts = assemble(config)
    product = {"small_rows": 0, "product": invariant_matmul} if deterministic else {}
    model = FusedDecoder(parts.model, **product)  # type: ignore[arg-type]
    make_runner = fused_runner.fused_runner(model, graphs=True)
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=make_runner)
    try:
        started_with = set(launched)
        assert len(started_with) > 10
        for name, params in MIXES.items():
            for count, length in LOADS:
                for index in range(count):
                    runtime.add([7 + index] * length, params, seed=index)
                    runtime.step()
                while runtime.has_work:
                    runtime.step()
                later = sorted(str(kind) for kind in launched - started_with)
                assert not later, f"{count} prompts of {length} tokens, {name}"
    finally:
        runtime.close()
