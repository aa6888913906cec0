"""What ranks compare before they run together: a model by its content, wherever it lies."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stretto.config import EngineConfig
from stretto.distributed.agreement import Facts, difference, model_facts
from stretto.models.loader import load_config
from stretto.models.resolve import ResolvedModel

CPU = torch.device("cpu")


def facts_of(dummy_model: Path, directory: Path, weights: dict[str, torch.Tensor]) -> Facts:
    directory.mkdir()
    shutil.copy(dummy_model / "config.json", directory)
    save_file(weights, directory / "model.safetensors")
    resolved = ResolvedModel("directory", directory, "model")
    return model_facts(EngineConfig(str(directory)), resolved, load_config(resolved), CPU)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embedding": (300, 40), "norm": (40,), "scale": (1,), "nothing": (0,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("changed", [None, "embedding", "norm", "scale"])
def test_a_fine_tuned_model_is_another_one(tmp_path: Path, dummy_model: Path, changed: str | None) -> None:
    """Its files have the same names, sizes and headers; each tensor's bytes count."""
    ours, theirs = weights(), weights()
    if changed is not None:
        theirs[changed] += 1e-3
    problem = difference(
        1, facts_of(dummy_model, tmp_path / "theirs", theirs), facts_of(dummy_model, tmp_path / "ours", ours)
    )
    if changed is None:
        assert problem is None
    else:
        assert problem is not None
        assert "weight files is model.safetensors (" in problem


def test_ranks_on_gpus_choose_the_weight_format_by_the_checkpoint(tmp_path: Path, dummy_model: Path) -> None:
    config = load_config(ResolvedModel("directory", dummy_model, "model"))
    resolved, gpu = ResolvedModel("directory", tmp_path, "model"), torch.device("cuda")
    ours, theirs = (
        model_facts(EngineConfig("any"), resolved, replace(config, checkpoint_dtype=dtype), gpu)
        for dtype in ("bfloat16", "float16")
    )
    assert (ours["weight format"], theirs["weight format"]) == ("bfloat16", "float16")
    assert difference(1, theirs, ours) is not None


@pytest.mark.parametrize("changed", [None, 2_000_000])
def test_a_gguf_file_is_known_by_its_tensors_too(tmp_path: Path, dummy_model: Path, changed: int | None) -> None:
    config = load_config(ResolvedModel("directory", dummy_model, "model"))
    facts = []
    for number in (0, 1):
        data = bytearray(3 << 20)
        if number and changed is not None:
            data[changed:] = b"x" * (len(data) - changed)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        facts.append(model_facts(EngineConfig(str(path)), ResolvedModel("gguf", path, "model"), config, CPU))
    assert (difference(1, *facts) is None) == (changed is None)
