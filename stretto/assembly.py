"""Assembly: from options to the parts of a running engine. Owns every choice that depends on model and machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from stretto.attention.base import AttentionBackend, AttentionShape
from stretto.attention.paged_torch import PagedTorchAttention
from stretto.config import EngineConfig, SchedulerConfig
from stretto.device.base import Device
from stretto.device.cpu import CpuDevice
from stretto.errors import InvalidRequest, ModelLoadError
from stretto.models.config import ModelConfig
from stretto.models.decoder import Decoder
from stretto.models.gguf import GGUFFile
from stretto.models.loader import load_config, load_model
from stretto.models.resolve import ResolvedModel, resolve_model
from stretto.tokenizer import Tokenizer

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is (0 to 1)."""

GIB = 2**30
DEFAULT_CONTEXT = 8192
"""`max_model_len` unless given: the model's context length, but at most this."""
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a Runtime is made of."""

    config: SchedulerConfig
    device: Device
    model: Decoder
    attention: AttentionBackend
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    """None where the model comes without one (random weights from a bare config)."""


def assemble(config: EngineConfig, progress: Progress | None = None) -> Parts:
    """Find the model, load it and size everything. Blocks on network and disk.

    Raises ModelLoadError or InvalidRequest; then nothing is left running.
    """
    say = progress or (lambda what, share: None)
    device = _device(config)
    try:
        resolved = resolve_model(
            config.model, revision=config.revision, token=config.hf_token, progress=lambda text: say(text, 0.0)
        )
        model_config = load_config(resolved)
        tokenizer = _tokenizer(config, resolved)
        max_model_len = _max_model_len(config, model_config)
        model = _on_device(
            device,
            lambda: load_model(
                resolved,
                dtype=config.dtype,
                load_format=config.load_format,
                max_model_len=max_model_len,
                device=device.torch_device,
                seed=config.seed,
                progress=lambda done, total: say("loading weights", done / max(total, 1)),
            ),
        )
        scheduler_config = _scheduler_config(config, model, max_model_len, tokenizer, device)
        attention = _on_device(device, lambda: _attention(scheduler_config, model, device))
        say("ready", 1.0)
        return Parts(scheduler_config, device, model, attention, model_config, tokenizer)
    except BaseException:
        device.close()
        raise


def _device(config: EngineConfig) -> Device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(config.num_threads)
    from stretto.device.cuda import CudaDevice

    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise InvalidRequest(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    return CudaDevice(int(index or 0))


def _on_device(device: Device, make: Callable[[], T]) -> T:
    """Run `make` as work of the device: on a CPU one thread must own all torch work. Blocks; re-raises its error."""
    made: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    stream = device.stream("start-up")
    stream.run(work)
    stream.synchronize()
    if failed:
        raise failed[0]
    return made[0]


def _tokenizer(config: EngineConfig, resolved: ResolvedModel) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    source = resolved if config.tokenizer is None else resolve_model(config.tokenizer, token=config.hf_token)
    try:
        if source.kind == "gguf":
            return Tokenizer.from_gguf(GGUFFile(source.path).metadata)
        return Tokenizer.from_directory(source.path)
    except ModelLoadError:
        if config.tokenizer is None and config.load_format == "dummy":
            return None
        raise


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return min(model.context_length, DEFAULT_CONTEXT)
    if config.max_model_len > model.context_length:
        raise InvalidRequest(
            f"max_model_len is {config.max_model_len}, but the model was made for {model.context_length} tokens: "
            "lower it"
        )
    return config.max_model_len


def _scheduler_config(
    config: EngineConfig, model: Decoder, max_model_len: int, tokenizer: Tokenizer | None, device: Device
) -> SchedulerConfig:
    batched = config.max_num_batched_tokens
    if batched is None:
        default = CPU_BATCHED_TOKENS if device.torch_device.type == "cpu" else CUDA_BATCHED_TOKENS
        batched = max(default, config.max_num_seqs)
    eos_ids = dict.fromkeys((*model.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())))
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=max_model_len,
        page_size=config.resolved_page_size(device.torch_device.type),
        num_pages=_num_pages(config, model, max_model_len, device),
        overlap_depth=config.resolved_overlap_depth(device.torch_device.type),
        batch_policy=config.batch_policy,
        max_logprobs=config.max_logprobs,
        enable_prefix_caching=config.enable_prefix_caching,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        request_timeout_s=config.request_timeout_s,
        eos_ids=tuple(eos_ids),
        vocab_size=model.config.vocab_size,
    )


def _num_pages(config: EngineConfig, model: Decoder, max_model_len: int, device: Device) -> int:
    """KV pages, page 0 included: as given, or as many as the memory holds and the requests could use."""
    if config.num_pages is not None:
        return config.num_pages + 1
    shape = model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.kv_dtype.itemsize
    page_size = config.resolved_page_size(device.torch_device.type)
    memory = config.kv_cache_memory_bytes or _default_cache_bytes(device)
    affordable = memory // (token_bytes * page_size)
    needed = -(-max_model_len // page_size)
    if affordable < needed:
        raise InvalidRequest(
            f"a KV cache of {memory / GIB:.2f} GiB holds {affordable * page_size} tokens of this model "
            f"({token_bytes} bytes each), fewer than max_model_len ({max_model_len}): lower max_model_len or raise "
            "kv_cache_memory_bytes"
        )
    return min(affordable, needed * config.max_num_seqs) + 1


def _default_cache_bytes(device: Device) -> int:
    if device.torch_device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device.torch_device)
        return int(0.8 * free)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(4 * GIB, available // 2)


def _attention(config: SchedulerConfig, model: Decoder, device: Device) -> AttentionBackend:
    shape = model.config
    return PagedTorchAttention(
        AttentionShape(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=config.page_size,
            num_pages=config.num_pages,
            dtype=model.kv_dtype,
            device=device.torch_device,
            scale=shape.attention_scale,
        )
    )
