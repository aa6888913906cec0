"""Loads a model: config, weights from wherever they are, packed for the device.

Owns the order of things; formats are layers/linear.py's, files sources.py's, parameters weights.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from stretto.errors import ModelLoadError
from stretto.models.decoder import Decoder
from stretto.models.registry import read_config
from stretto.models.sources import GGUFSource, RandomSource, SafetensorsSource, WeightSource
from stretto.models.weights import Progress, WeightReader


def load_model(
    path: Path,
    fields: Mapping[str, object],
    *,
    dtype: str,
    load_format: Literal["auto", "dummy"] = "auto",
    max_model_len: int,
    device: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    config = read_config(fields)
    with torch.inference_mode():
        source: WeightSource
        if load_format == "dummy":
            source = RandomSource(seed, device, torch.float32, config.num_parameters)
        elif path.suffix == ".gguf":
            from stretto.models.gguf import GGUFFile
            source = GGUFSource(GGUFFile(path))
        else:
            source = SafetensorsSource(path)
        weights = WeightReader(source, weight_format=dtype, device=device, progress=progress)
        model = Decoder.load(config, weights, max_model_len=max_model_len, device=device)
        weights.finish()
    return model
