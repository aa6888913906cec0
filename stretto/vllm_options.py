"""Options of `LLM` as given, turned into fields of EngineConfig: its own names, and those of vLLM's `LLM`.

Owns the list of the latter: another name for one of ours, without effect here, or not built. Nothing is ignored
silently that would change what the user gets. What EngineConfig has under the same name is never looked up here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stretto.config import EngineConfig
from stretto.errors import InvalidRequest, NotSupported

_ALIASES = {"block_size": "page_size", "num_gpu_blocks_override": "num_pages"}

# Values that mean what Stretto does anyway.
_MEANS_NOTHING_ELSE: dict[str, tuple[object, ...]] = {
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "attention_config": (None,),
    "compilation_config": (None, 0),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None,),
    "download_dir": (None,),
    "enable_chunked_prefill": (True, None),
    "enable_expert_parallel": (False,),
    "enable_lora": (False, None),
    "hf_overrides": (None,),
    "kv_cache_dtype": ("auto",),
    "limit_mm_per_prompt": (None,),
    "logits_processors": (None,),
    "mm_processor_kwargs": (None,),
    "model_impl": ("auto", "vllm"),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "quantization": (None,),
    "runner": ("auto", "generate"),
    "speculative_config": (None,),
    "structured_outputs_config": (None,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (None,),
}

# Any value is fine: they allow or tune what does not exist here (graphs, log lines, code from a model's repository).
_WITHOUT_EFFECT = {
    "disable_custom_all_reduce",
    "disable_log_requests",
    "disable_log_stats",
    "swap_space",
    "trust_remote_code",
    "use_tqdm_on_load",
}

_INSTEAD = {
    "quantization": "for 4-bit weights on a CPU use dtype='int4'; quantised GGUF files are read as they are",
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of EngineConfig; None is its default, as in vLLM.

    Raises NotSupported (not built) or TypeError (unknown name, or given under two names).
    """
    own = {field.name for field in fields(EngineConfig)}
    translated = {name: value for name, value in options.items() if name in own and value is not None}
    for name, value in options.items():
        if name in own:
            continue
        if name in _ALIASES:
            if value is not None:
                _set_once(translated, _ALIASES[name], value, name)
        elif name == "async_scheduling":
            if not _as_flag(name, value):
                _set_once(translated, "overlap_depth", 0, name)
        elif name in _WITHOUT_EFFECT:
            continue
        elif name in _MEANS_NOTHING_ELSE:
            allowed = _MEANS_NOTHING_ELSE[name]
            if not any(value == other and type(value) is type(other) for other in allowed):
                hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
                raise NotSupported(f"{name}={value!r}: not built yet; leave it at {allowed[0]!r}{hint}")
        else:
            raise TypeError(f"LLM() has no option {name!r}{_did_you_mean(name)}")
    return translated


def _set_once(translated: dict[str, Any], name: str, value: object, alias: str) -> None:
    if name in translated:
        raise TypeError(f"LLM() got both {name!r} and {alias!r}, which is vLLM's name for it; give one of them")
    translated[name] = value


def _as_flag(name: str, value: object) -> bool:
    if value not in (True, False, None):
        raise InvalidRequest(f"{name} is {value!r}; allowed: True, False or None")
    return value is not False


def _did_you_mean(name: str) -> str:
    known = [*(field.name for field in fields(EngineConfig)), *_ALIASES, *_MEANS_NOTHING_ELSE, *_WITHOUT_EFFECT]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
