"""What all ranks must agree on before they may run together, as text that can be compared and shown.

Owns which facts those are and how a difference is told. Knows nothing about who carries them.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.config import EngineConfig, SchedulerConfig
from stretto.distributed.fingerprint import fingerprint_gguf, fingerprint_safetensors
from stretto.distributed.link import PROTOCOL
from stretto.version import __version__

if TYPE_CHECKING:
    import torch

    from stretto.models.config import ModelConfig
    from stretto.models.resolve import ResolvedModel

Facts = dict[str, str]

_OWN_AFFAIR = {
    "model": "compared by content: it may lie elsewhere on each host",
    "tokenizer": "only the leader reads text",
    "skip_tokenizer_init": "only the leader reads text",
    "revision": "compared by content",
    "hf_token": "a secret, and no part of the model",
    "num_threads": "a host's own cores",
    "node_rank": "differs by definition",
    "dist_init_addr": "who came here has it right",
    "kv_cache_memory_bytes": "a host's own memory; the number of pages is agreed on",
    "sync_guard": "each rank watches itself",
    "max_queued_requests": "judged by the leader alone",
    "max_queued_tokens": "judged by the leader alone",
    "request_timeout_s": "judged by the leader alone",
}
"""Options that may differ, and why."""
MINIMUM = "num_pages"
"""The one size that is decided, not compared: every rank takes what the smallest has room for."""
SHOWN = 200


def version_facts() -> Facts:
    """Versions of what computes and what talks. Imports no torch."""
    return {
        "stretto version": __version__,
        "torch version": importlib.metadata.version("torch"),
        "protocol version": str(PROTOCOL),
    }


def option_facts(config: EngineConfig) -> Facts:
    """Every option that changes what is computed or when."""
    return {f.name: repr(_plain(getattr(config, f.name))) for f in fields(config) if f.name not in _OWN_AFFAIR}


def environment_facts() -> Facts:
    """Variables that change the schedule, the checks, or how ranks exchange tensors."""
    names = ("STRETTO_DISABLE_OVERLAP", "STRETTO_CHECK", "STRETTO_DISABLE_PEER_MEMORY")
    return {name: repr(_is_set(name)) for name in names}


def checks() -> bool:
    """Whether the ranks are to prove that they do the same."""
    return _is_set("STRETTO_CHECK")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def model_facts(options: EngineConfig, resolved: ResolvedModel, config: ModelConfig, device: torch.device) -> Facts:
    """Which model it is: its shape, names, sizes and fingerprints of the files with its weights; and how it is held.

    Reads little of the files. Blocks on the disk. Raises ModelLoadError.
    """
    from stretto.layers.formats import resolve_dtype

    facts = {f"model's {name}": repr(_plain(value)) for name, value in asdict(config).items()}
    weight_format = resolve_dtype(options.dtype, device, config.checkpoint_dtype).format
    facts |= {"device": device.type, "weight format": weight_format}
    if resolved.kind == "gguf":
        facts["weight files"] = f"{resolved.path.stat().st_size} bytes, fingerprint {fingerprint_gguf(resolved.path)}"
        return facts
    files = sorted(Path(resolved.path).glob("*.safetensors"))
    facts["weight files"] = ", ".join(
        f"{file.name} ({file.stat().st_size} bytes, fingerprint {fingerprint_safetensors(file)})" for file in files
    )
    return facts


def size_facts(sizes: SchedulerConfig) -> Facts:
    """Everything that the scheduler decides by."""
    return {f"{f.name}": repr(_plain(getattr(sizes, f.name))) for f in fields(sizes) if f.name not in _OWN_AFFAIR}


def difference(rank: int, theirs: Facts, ours: Facts) -> str | None:
    """How rank `rank` differs from the leader, in one sentence; None if it does not."""
    for name in dict.fromkeys((*ours, *theirs)):
        if name != MINIMUM and theirs.get(name) != ours.get(name):
            return (
                f"rank {rank} does not fit to the leader: {name} is {_shown(theirs, name)} on rank {rank}, but "
                f"{_shown(ours, name)} on rank 0; start all ranks alike"
            )
    return None


def _plain(value: object) -> object:
    """The same text for the same value, whatever it went through: a list and a tuple are alike."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(entry) for entry in value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in sorted(value.items(), key=str)}
    return value


def _shown(facts: Facts, name: str) -> str:
    text = facts.get(name, "unknown")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
