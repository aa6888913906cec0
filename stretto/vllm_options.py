"""What becomes of options of vLLM's `LLM` that Stretto's does not have under that name.

Owns the list: another name for one of ours, without effect here, or not built. Nothing is ignored silently that would
change what the user gets.
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
    "attention_backend": (None,),
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
    "gpu_memory_utilization": (0.9, 0.92),
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
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (None,),
}

# Any value is fine: they allow or tune what does not exist here (graphs, log lines, code from a model's repository).
_WITHOUT_EFFECT = {
    "disable_custom_all_reduce",
    "disable_log_requests",
    "disable_log_stats",
    "enforce_eager",
    "swap_space",
    "trust_remote_code",
    "use_tqdm_on_load",
}

_INSTEAD = {
    "gpu_memory_utilization": "use kv_cache_memory_bytes",
    "quantization": "for 4-bit weights on a CPU use dtype='int4'; quantised GGUF files are read as they are",
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options as fields of EngineConfig. Raises NotSupported (not built) or TypeError (unknown name)."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in _ALIASES:
            if value is not None:
                translated[_ALIASES[name]] = value
        elif name == "async_scheduling":
            translated.update(_overlap(value))
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


def _overlap(value: object) -> dict[str, int]:
    if value is None or value is True:
        return {}
    if value is False:
        return {"overlap_depth": 0}
    raise InvalidRequest(f"async_scheduling is {value!r}; allowed: True, False or None")


def _did_you_mean(name: str) -> str:
    known = [*(field.name for field in fields(EngineConfig)), *_ALIASES, *_MEANS_NOTHING_ELSE, *_WITHOUT_EFFECT]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
