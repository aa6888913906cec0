"""What cannot work is refused before anything is loaded, with what was found, what is allowed and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from stretto import assembly
from stretto.assembly import assemble
from stretto.config import EngineConfig
from stretto.device.base import Device
from stretto.engine.filters import MAX_VOCABULARY
from stretto.errors import ModelLoadError, NotSupported
from stretto.support import check_options, uses_kernels
from tests.helpers.dummy_model import write_dummy_model

GPU = cast(Device, SimpleNamespace(torch_device=torch.device("cuda", 1), close=lambda: None))
CPU = cast(Device, SimpleNamespace(torch_device=torch.device("cpu"), close=lambda: None))
FakeGPU = Callable[[str, tuple[int, int]], None]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """Makes the machine's second GPU one of a name and a compute capability, as far as checks can see."""

    def make(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr(assembly, "_device", lambda config, place: GPU)

    return make


def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100-SXM2-16GB", (7, 0))])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_gpu_before_ampere_is_refused_before_the_model_is_looked_for(
    fake_gpu: FakeGPU, name: str, capability: tuple[int, int], backend: str
) -> None:
    fake_gpu(name, capability)
    found = r"\.".join(map(str, capability))
    message = rf"cuda:1 is '{name}', of compute capability {found}; allowed: 8\.0 .*CUDA_VISIBLE_DEVICES.*device='cpu'"
    with pytest.raises(NotSupported, match=message):
        assemble(EngineConfig("no/such/model", attention_backend=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_later_gpus_are_taken(fake_gpu: FakeGPU, capability: tuple[int, int]) -> None:
    fake_gpu("any", capability)
    with pytest.raises(ModelLoadError, match="no/such/model"):
        assemble(EngineConfig("no/such/model"))


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer"])
def test_a_gpu_without_triton_is_refused_before_the_model_is_looked_for(
    fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    fake_gpu("NVIDIA H200", (9, 0))
    _without_triton(monkeypatch)
    message = rf"'{backend}', which on a GPU needs the package triton.*pip install 'triton>=3\.6'.*backend torch"
    with pytest.raises(NotSupported, match=message):
        assemble(EngineConfig("no/such/model", attention_backend=backend))  # type: ignore[arg-type]


def test_plain_torch_needs_no_triton(fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu("NVIDIA H200", (9, 0))
    _without_triton(monkeypatch)
    check_options(EngineConfig("any", attention_backend="torch"), GPU)
    check_options(EngineConfig("any"), CPU)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_vocabulary_beyond_the_kernels_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, more: int
) -> None:
    directory = write_dummy_model(tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": MAX_VOCABULARY + more}))

    def load_model(*arguments: object, **options: object) -> None:
        raise ModelLoadError("now it would be loaded")

    monkeypatch.setattr(assembly, "load_model", load_model)
    monkeypatch.setattr("stretto.support.interpreted", lambda: True)
    config = EngineConfig(str(directory), device="cpu", skip_tokenizer_init=True, attention_backend=backend)  # type: ignore[arg-type]
    if more and backend == "triton":
        with pytest.raises(NotSupported, match=r"vocabulary of 262145 tokens; .* up to 262144: .*backend torch"):
            assemble(config)
    else:
        with pytest.raises(ModelLoadError, match="now it would be loaded"):
            assemble(config)


def test_the_vocabulary_allowed_is_what_the_kernels_allow() -> None:
    sampling_filters = pytest.importorskip("stretto.kernels.sampling_filters")
    assert sampling_filters._MAX_VOCABULARY == MAX_VOCABULARY


def test_which_backends_run_on_the_kernels() -> None:
    def kernels(backend: str, device: Device) -> bool:
        return uses_kernels(EngineConfig("any", attention_backend=backend), device)  # type: ignore[arg-type]

    assert [kernels(backend, GPU) for backend in ("auto", "triton", "flashinfer", "torch")] == [True, True, True, False]
    assert [kernels(backend, CPU) for backend in ("auto", "triton", "torch")] == [False, True, False]
