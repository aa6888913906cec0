"""The weight formats: which exist, what activations each computes with, and which one `auto` means on a device.

Owns no tensors; `linear.py` builds layers in these formats.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from stretto.errors import InvalidRequest, NotSupported

WEIGHT_FORMATS = ("float32", "float16", "bfloat16", "int4")
"""What `--dtype` may say besides `auto`."""


@dataclass(frozen=True, slots=True)
class ResolvedDtype:
    """A weight format and, for the log and the user, why it was chosen."""

    format: str
    reason: str


def fbgemm_float16_available() -> bool:
    """True where FBGEMM multiplies float16 weights with float32 activations (x86 with AVX2 or better)."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and "fbgemm" in torch.backends.quantized.supported_engines
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


def onednn_available() -> bool:
    """True where torch was built with oneDNN, which packs weights for a CPU."""
    return bool(torch._C._has_mkldnn)


def onednn_bfloat16_available() -> bool:
    """True where oneDNN multiplies bfloat16 matrices with instructions for it, not by emulation."""
    return bool(onednn_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(requested: str, device: torch.device, checkpoint_dtype: str | None) -> ResolvedDtype:
    """The weight format for `requested` (`auto` or one of `WEIGHT_FORMATS`) on `device`.

    `checkpoint_dtype`: `ModelConfig.checkpoint_dtype`, by which `auto` chooses on a GPU. Raises InvalidRequest for an
    unknown name and NotSupported for a format that cannot work on this machine.
    """
    if requested == "auto":
        return _automatic(device, checkpoint_dtype)
    if requested not in WEIGHT_FORMATS:
        raise InvalidRequest(f"dtype {requested!r} is not known; use one of auto, {', '.join(WEIGHT_FORMATS)}")
    if device.type == "cpu" and requested == "float16" and not fbgemm_float16_available():
        raise NotSupported("dtype float16 on a CPU needs x86 with AVX2 and FBGEMM; use bfloat16 or float32")
    if device.type == "cpu" and requested in ("bfloat16", "int4") and not onednn_available():
        raise NotSupported(f"dtype {requested} on a CPU needs a torch with oneDNN; use float32")
    if device.type != "cpu" and requested == "int4":
        raise NotSupported(f"dtype int4 is built for the CPU only, not for {device.type}; use bfloat16")
    return ResolvedDtype(requested, "as requested")


def activation_dtype(format: str, device: torch.device) -> torch.dtype:
    """Element type of the hidden states between layers whose weights are in `format`."""
    if format == "float32":
        return torch.float32
    if format == "float16":
        return torch.float32 if device.type == "cpu" else torch.float16
    if format in ("bfloat16", "int4"):
        return torch.bfloat16
    raise InvalidRequest(f"weight format {format!r} is not known; use one of {', '.join(WEIGHT_FORMATS)}")


def _automatic(device: torch.device, checkpoint_dtype: str | None) -> ResolvedDtype:
    if device.type != "cpu":
        if checkpoint_dtype in ("float16", "bfloat16"):
            return ResolvedDtype(checkpoint_dtype, "as the checkpoint has them")
        why = f"the checkpoint is {checkpoint_dtype}" if checkpoint_dtype else "the checkpoint has no type of its own"
        return ResolvedDtype("bfloat16", f"{why}; bfloat16 has float32's range")
    if fbgemm_float16_available():
        return ResolvedDtype("float16", "x86 with FBGEMM: float16 weights, float32 activations, batch-invariant")
    if onednn_bfloat16_available():
        return ResolvedDtype("bfloat16", "no FBGEMM here, but bfloat16 instructions")
    return ResolvedDtype("float32", "neither FBGEMM nor bfloat16 instructions here")
