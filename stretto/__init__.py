"""Stretto: an LLM inference and serving engine whose heart is an overlap scheduler.

`from stretto import LLM, SamplingParams`. Names are imported when first used, so that `stretto --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stretto.version import __version__

if TYPE_CHECKING:
    from stretto.config import EngineConfig
    from stretto.errors import InvalidRequest, ModelLoadError, NotSupported, StrettoError
    from stretto.llm import LLM
    from stretto.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

_HOMES = {
    "EngineConfig": "stretto.config",
    "InvalidRequest": "stretto.errors",
    "ModelLoadError": "stretto.errors",
    "NotSupported": "stretto.errors",
    "StrettoError": "stretto.errors",
    "LLM": "stretto.llm",
    "CompletionOutput": "stretto.request",
    "Logprob": "stretto.request",
    "RequestOutput": "stretto.request",
    "SamplingParams": "stretto.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "InvalidRequest",
    "Logprob",
    "ModelLoadError",
    "NotSupported",
    "RequestOutput",
    "SamplingParams",
    "StrettoError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
