"""What options, device and model ask of each other: refused here, in words, before any weight is read.

Owns the checks that need no weights. What a model's shape alone must fulfil is its config's to check.
"""

from __future__ import annotations

import importlib.util

import torch

from stretto.config import EngineConfig
from stretto.device.base import Device
from stretto.engine.filters import MAX_VOCABULARY
from stretto.errors import InvalidRequest, NotSupported
from stretto.models.config import ModelConfig

LEAST_CAPABILITY = (8, 0)
"""Compute capability (Ampere) from which a GPU computes in bfloat16 and runs the kernels."""


def check_options(config: EngineConfig, device: Device) -> None:
    """Raise InvalidRequest or NotSupported if the device cannot do what is asked for."""
    on_gpu, backend = is_gpu(device), config.attention_backend
    if on_gpu:
        _check_capability(device.torch_device)
    if backend in ("triton", "flashinfer") and not (on_gpu or interpreted()):
        raise InvalidRequest(f"attention_backend is {backend!r}, which needs a GPU; use 'torch' on a CPU")
    if on_gpu and backend != "torch" and importlib.util.find_spec("triton") is None:
        raise NotSupported(
            f"attention_backend is {backend!r}, which on a GPU needs the package triton, and it is not installed: "
            "pip install 'triton>=3.6', or give attention_backend='torch' (--attention-backend torch), which is slow"
        )
    if backend == "flashinfer":
        from stretto.attention.flashinfer_paged import require_flashinfer

        require_flashinfer()
    _check_deterministic(config, on_gpu)


def check_model(config: EngineConfig, model: ModelConfig, device: Device) -> None:
    """Raise NotSupported if the model is too large for what computes it."""
    if not uses_kernels(config, device) or model.vocab_size <= MAX_VOCABULARY:
        return
    raise NotSupported(
        f"the model has a vocabulary of {model.vocab_size} tokens; the sampling kernels of a GPU are exact up to "
        f"{MAX_VOCABULARY}: give attention_backend='torch' (--attention-backend torch), which samples without them and "
        "is slow"
    )


def uses_kernels(config: EngineConfig, device: Device) -> bool:
    """Whether the engine runs on the Triton kernels, not on plain torch."""
    return config.attention_backend != "torch" and (config.attention_backend != "auto" or is_gpu(device))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    from stretto.kernels.launch import INTERPRETED

    return INTERPRETED


def _check_capability(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        raise NotSupported(
            f"{device} is {name!r}, of compute capability {found}; allowed: {least} (Ampere) and later, which have "
            "bfloat16 and run the kernels; choose another GPU with CUDA_VISIBLE_DEVICES, or give device='cpu'"
        )


def _check_deterministic(config: EngineConfig, on_gpu: bool) -> None:
    """Raise NotSupported where `deterministic` is asked for and could not be kept."""
    if not config.deterministic:
        return
    backend = config.attention_backend
    if backend not in ("auto", "triton") or (backend == "auto" and not on_gpu):
        raise NotSupported(
            "deterministic is built for a GPU with attention_backend 'triton': in others, and on a CPU, how "
            "a prompt is cut into chunks changes last bits; leave it off, or run on a GPU"
        )
    if config.tensor_parallel_size > 1:
        raise NotSupported(
            f"deterministic with tensor_parallel_size {config.tensor_parallel_size} is not built: sums over ranks take "
            "different ways by the size of the step; use one rank"
        )


def is_gpu(device: Device) -> bool:
    """Whether the model is computed by a GPU."""
    return device.torch_device.type == "cuda"
