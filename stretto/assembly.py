"""Assembly: from options to the parts of a running engine. Owns every choice that depends on model and machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from stretto.attention.base import AttentionBackend, AttentionShape
from stretto.attention.paged_torch import PagedTorchAttention
from stretto.config import EngineConfig, SchedulerConfig
from stretto.device.base import Device
from stretto.device.cpu import CpuDevice
from stretto.distributed.children import threads_of_rank
from stretto.distributed.member import ALONE, Member
from stretto.distributed.place import Place
from stretto.engine.memory import MemoryPlan, buffer_bytes, plan_memory
from stretto.engine.runner import EagerRunner, MakeRunner
from stretto.errors import InvalidRequest, ModelLoadError
from stretto.models.config import ModelConfig
from stretto.models.decoder import Decoder
from stretto.models.gguf import GGUFFile
from stretto.models.loader import load_config, load_model
from stretto.models.resolve import ResolvedModel, resolve_model
from stretto.models.shard import check_size
from stretto.support import check_model, check_options, is_gpu, uses_kernels
from stretto.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is (0 to 1)."""

GIB = 2**30
DEFAULT_CONTEXT = 8192
"""`max_model_len` unless given: the model's context length, but at most this."""
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192
MOST_CACHED_PAGES = 2**22
"""More than all requests could use are not kept for cached prefixes: a model so small has room for more, but the host
keeps books of each page."""


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
    make_runner: MakeRunner = EagerRunner
    memory: MemoryPlan | None = None
    """How the GPU's memory was divided; None on a CPU, or where the cache's size was given."""


def assemble(config: EngineConfig, progress: Progress | None = None, member: Member = ALONE) -> Parts:
    """Find the model, load it and size everything. Blocks on network and disk, and with other ranks on those.

    `member`: this rank among those that share the model. Raises ModelLoadError or InvalidRequest; then nothing of it
    is left running.
    """
    tell = progress or (lambda what, share: None)

    def say(what: str, share: float) -> None:
        tell(what, member.loading(what, share))

    device = _device(config, member.place)
    try:
        check_options(config, device)
        resolved = resolve_model(
            config.model, revision=config.revision, token=config.hf_token, progress=lambda text: say(text, 0.0)
        )
        model_config = load_config(resolved)
        tokenizer = _tokenizer(config, resolved)
        max_model_len = _max_model_len(config, model_config)
        check_model(config, model_config, device)
        check_size(model_config, member.place.size)  # before anybody waits for others
        group = member.join(resolved, model_config, device)
        model = device.call(
            lambda: load_model(
                resolved,
                dtype=config.dtype,
                load_format=config.load_format,
                max_model_len=max_model_len,
                device=device.torch_device,
                seed=config.seed,
                group=group,
                progress=lambda done, total: say("loading weights", done / max(total, 1)),
            ),
        )
        limits = _limits(config, model, max_model_len, tokenizer, device)
        memory = _memory(config, limits, model, device)
        num_pages = _num_pages(config, model, max_model_len, device, memory)
        scheduler_config = member.agree_on_sizes(replace(limits, num_pages=num_pages))
        attention, make_runner = device.call(lambda: _attention(config, scheduler_config, model, device))
        say("ready", 1.0)
        return Parts(scheduler_config, device, model, attention, model_config, tokenizer, make_runner, memory)
    except BaseException:
        device.close()
        raise


def _device(config: EngineConfig, place: Place) -> Device:
    """The device of this rank: with others on its host, a GPU of its own or a share of the cores."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(config.num_threads if place.size == 1 else threads_of_rank(config, place))
    from stretto.device.cuda import CudaDevice

    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise InvalidRequest(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    return CudaDevice(int(index) if index else place.local_rank if place.size > 1 else 0)


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


def _limits(
    config: EngineConfig, model: Decoder, max_model_len: int, tokenizer: Tokenizer | None, device: Device
) -> SchedulerConfig:
    """All but the number of pages, which is the least that there may be: it follows from the rest."""
    page_size = config.resolved_page_size(device.torch_device.type)
    eos_ids = dict.fromkeys((*model.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())))
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_batched_tokens(config, device),
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=-(-max_model_len // page_size) + 1,
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


def _batched_tokens(config: EngineConfig, device: Device) -> int:
    """Tokens of the largest step: as given, or the device's default."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    default = CPU_BATCHED_TOKENS if device.torch_device.type == "cpu" else CUDA_BATCHED_TOKENS
    return max(default, config.max_num_seqs)


def _memory(config: EngineConfig, limits: SchedulerConfig, model: Decoder, device: Device) -> MemoryPlan | None:
    """How a GPU's memory is divided, unless the size of the cache was given. Raises InvalidRequest with numbers."""
    if not is_gpu(device) or config.num_pages or config.kv_cache_memory_bytes:
        return None
    buffers = _buffer_bytes(config, limits, model, device)
    gc.collect()  # an engine that was closed before may still hold its cache in a cycle
    torch.cuda.empty_cache()  # what loading left in the allocator is free
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return plan_memory(
        model.config,
        limits,
        total=total,
        free=free,
        utilization=config.gpu_memory_utilization,
        element_bytes=model.kv_dtype.itemsize,
        graphs=not config.enforce_eager and config.attention_backend != "flashinfer",
        buffers=buffers,
    )


def _buffer_bytes(config: EngineConfig, limits: SchedulerConfig, model: Decoder, device: Device) -> int:
    """What the engine keeps on a device between steps, beside weights and cache."""
    workspace = 0
    if config.attention_backend == "flashinfer":
        from stretto.attention.flashinfer_paged import workspace_bytes

        # It keeps what the Triton backend does, and its workspaces; to make it would build its kernels.
        workspace = workspace_bytes(limits.overlap_depth)
        config = replace(config, attention_backend="triton", enforce_eager=True)
    return workspace + buffer_bytes(limits, model, lambda: _attention(config, limits, model, device))


def _num_pages(
    config: EngineConfig, model: Decoder, max_model_len: int, device: Device, memory_plan: MemoryPlan | None
) -> int:
    """KV pages, page 0 included: as given, or as many as the memory holds.

    No more than the requests could use all together, where more would be of no use (without prefix caching), or where
    nobody asked for the memory: a CPU's is taken as the cache fills, and belongs to the program around the engine, too.
    """
    if config.num_pages is not None:
        return config.num_pages + 1
    shape = model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.kv_dtype.itemsize
    page_size = config.resolved_page_size(device.torch_device.type)
    memory = config.kv_cache_memory_bytes or (memory_plan.cache if memory_plan else _default_cache_bytes())
    affordable = memory // (token_bytes * page_size)
    needed = -(-max_model_len // page_size)
    if affordable < needed:
        raise InvalidRequest(
            f"a KV cache of {memory / GIB:.2f} GiB holds {affordable * page_size} tokens of this model "
            f"({token_bytes} bytes each), fewer than max_model_len ({max_model_len}): lower max_model_len or raise "
            "kv_cache_memory_bytes" + (f" ({memory_plan.describe()})" if memory_plan else "")
        )
    useful = needed * config.max_num_seqs
    if config.enable_prefix_caching and (is_gpu(device) or config.kv_cache_memory_bytes):
        useful = max(useful, MOST_CACHED_PAGES)
    return min(affordable, useful) + 1


def _default_cache_bytes() -> int:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(4 * GIB, available // 2)


def _attention(
    options: EngineConfig, config: SchedulerConfig, model: Decoder, device: Device
) -> tuple[AttentionBackend, MakeRunner]:
    """The attention backend, and the runner that goes with it."""
    shape = AttentionShape.of(
        model.config,
        page_size=config.page_size,
        num_pages=config.num_pages,
        dtype=model.kv_dtype,
        device=device.torch_device,
    )
    backend, on_gpu = options.attention_backend, is_gpu(device)
    if not uses_kernels(options, device):
        whole = model.group.size == 1
        return PagedTorchAttention(shape), EagerRunner if whole else partial(EagerRunner, split=model)
    # Triton is an optional dependency on a machine without a GPU.
    from stretto.attention.triton_paged import TritonPagedAttention
    from stretto.engine.fused_runner import fused_runner
    from stretto.models.fused import FusedDecoder

    if backend == "flashinfer":
        from stretto.attention.flashinfer_paged import FlashInferAttention

        return FlashInferAttention(shape, config.max_rows, config.overlap_depth), fused_runner(
            FusedDecoder(model), graphs=False
        )
    graphs = on_gpu and not options.enforce_eager
    invariant_up_to = config.max_model_len if options.deterministic else None
    attention = TritonPagedAttention(shape, config.max_rows, invariant_up_to=invariant_up_to)
    if not options.deterministic:
        return attention, fused_runner(FusedDecoder(model), graphs=graphs)
    from stretto.kernels.invariant_matmul import invariant_matmul

    return attention, fused_runner(FusedDecoder(model, small_rows=0, product=invariant_matmul), graphs=graphs)
