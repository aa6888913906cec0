"""Loads a model: its config, then its weights from wherever they are, packed for a device.

Owns the order of things; formats are layers/linear.py's, files sources.py's, parameters weights.py's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Literal

import torch

from stretto.distributed.group import SOLO, TensorGroup
from stretto.errors import InvalidRequest, ModelLoadError
from stretto.layers.formats import resolve_dtype
from stretto.models.config import ModelConfig
from stretto.models.decoder import Decoder
from stretto.models.gguf import GGUFFile, config_from_gguf
from stretto.models.huge_pages import anonymous_areas, back_with_huge_pages
from stretto.models.registry import read_config
from stretto.models.resolve import ResolvedModel
from stretto.models.sources import GGUFSource, RandomSource, SafetensorsSource, WeightSource
from stretto.models.weights import Progress, WeightReader

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]


def load_config(resolved: ResolvedModel) -> ModelConfig:
    """The model's config. Blocks on the disk.

    Raises ModelLoadError naming the file, and in it the architecture or field that is missing, impossible or not
    supported.
    """
    if resolved.kind == "gguf":
        return _gguf_config(GGUFFile(resolved.path))
    path = resolved.path / "config.json"
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: an object is expected")
    return _read_config(fields, str(path))


def load_model(
    resolved: ResolvedModel,
    *,
    dtype: str = "auto",
    device: torch.device,
    max_model_len: int | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    group: TensorGroup = SOLO,
    progress: Progress | None = None,
) -> Decoder:
    """Load a model onto `device`. Blocks on the disk for as long as that takes; call it on the device's own thread.

    `dtype`: a weight format of layers/formats.py, or "auto". `max_model_len`: how many positions to prepare (default:
    the model's context length). `load_format` "dummy" needs a config only and makes up the weights from `seed`.
    `group`: the ranks that share the model; each reads its own part of the weights.

    Peak memory is the finished model plus one unpacked parameter. Raises ModelLoadError naming the tensor or file that
    is missing, unexpected, damaged or of the wrong shape; InvalidRequest for an unknown dtype or load format, or a
    model that cannot be split over so many ranks; NotSupported for a dtype that cannot work on this device or with
    these weights (int4 needs whole groups of 32 columns on every rank).
    """
    if load_format not in ("auto", "dummy"):
        raise InvalidRequest(f"load format {load_format!r} is not known; use 'auto' or 'dummy'")
    begin = time.perf_counter()
    gguf = GGUFFile(resolved.path) if resolved.kind == "gguf" else None
    config = load_config(resolved) if gguf is None else _gguf_config(gguf)
    weight_format = resolve_dtype(dtype, device, config.checkpoint_dtype)
    if max_model_len is None:
        max_model_len = config.context_length
    areas = anonymous_areas() if device.type == "cpu" else None
    with torch.inference_mode():
        source: WeightSource
        if load_format == "dummy":
            source = RandomSource(seed, device, config.num_parameters)
        elif gguf is not None:
            source = GGUFSource(gguf)
        else:
            source = SafetensorsSource(resolved.path)
        weights = WeightReader(
            source, weight_format=weight_format.format, device=device, group=group, progress=progress
        )
        model = Decoder.load(config, weights, max_model_len, group)
        weights.finish()
    if areas is not None:
        back_with_huge_pages(areas)
    logger.info(
        "loaded %s (%s, %.0fM parameters) as %s (%s) in %.2f s",
        resolved.name,
        config.architecture,
        config.num_parameters / 1e6,
        weight_format.format,
        weight_format.reason,
        time.perf_counter() - begin,
    )
    return model


def _gguf_config(gguf: GGUFFile) -> ModelConfig:
    return _read_config(config_from_gguf(gguf), str(gguf.path))


def _read_config(fields: Mapping[str, object], origin: str) -> ModelConfig:
    try:
        return read_config(fields)
    except ModelLoadError as error:
        raise ModelLoadError(f"{origin}: {error}") from error
