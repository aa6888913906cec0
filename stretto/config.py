"""EngineConfig: every option of the engine, its default and its check. The only place that knows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stretto.errors import InvalidRequest
from stretto.observe.faults import Faults
from stretto.typed_fields import check_types

MAX_OVERLAP_DEPTH = 8
DTYPES = ("auto", "float32", "float16", "bfloat16", "int4")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST = {
    "max_num_seqs": 16_384,
    "max_num_batched_tokens": 2**20,
    "max_logprobs": 1_000,
    "tensor_parallel_size": 1_024,
    "num_threads": max(256, os.cpu_count() or 1),
}
"""Beyond these, tables or threads would not fit into any machine."""
DEFAULT_PAGE_SIZE = {"cpu": 64, "cuda": 16}
DEFAULT_OVERLAP_DEPTH = {"cpu": 1, "cuda": 1}

BatchPolicy = Literal["mixed", "prefill-first"]
LoadFormat = Literal["auto", "dummy"]
SyncGuardMode = Literal["off", "count", "raise"]
AttentionBackendName = Literal["auto", "torch", "triton", "flashinfer"]
ControlTransport = Literal["auto", "shared-memory", "zeromq", "gloo"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler needs to know; no model, no device. Lengths are in tokens."""

    max_num_seqs: int = 64
    """Requests that may run at once (that may still produce tokens)."""
    max_num_batched_tokens: int = 512
    """Tokens of one step; longer prompts are computed in chunks of at most this many."""
    max_model_len: int = 2048
    """Longest sequence, prompt and output together."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int = 1024
    """KV pages of the pool, page 0 (padding) included."""
    overlap_depth: int = 1
    """Steps that may be launched and not yet processed; 0 is the normal loop."""
    batch_policy: BatchPolicy = "mixed"
    """`mixed`: decode rows and prefill chunks share a step; `prefill-first`: one kind a step, prefill comes first."""
    max_logprobs: int = 20
    """Largest number of top log-probabilities that a request may ask for."""
    max_stop_ids: int = 16
    """Stop token ids (end-of-sequence ids included) that a request may have."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished requests and share it between requests that begin alike."""
    max_queued_requests: int | None = None
    """Requests that may wait, none of the slots being free for them; None: any number."""
    max_queued_tokens: int | None = None
    """Prompt tokens that the waiting requests may bring together; None: any number."""
    request_timeout_s: float | None = None
    """Seconds from arrival after which a request is ended, unless it says otherwise; None: never."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a sequence unless the request ignores them."""
    vocab_size: int = 0
    """Size of the vocabulary; token ids are below it."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "vocab_size"):
            _at_least(name, getattr(self, name), 1)
        _check_depth(self.overlap_depth)
        if self.page_size not in PAGE_SIZES:
            raise InvalidRequest(f"page_size is {self.page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}")
        if self.batch_policy not in get_args(BatchPolicy):
            raise InvalidRequest(f"batch_policy is {self.batch_policy!r}; allowed: {', '.join(get_args(BatchPolicy))}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not hold one token of every running request; raise the one or lower the other"
            )
        for name in ("max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _check_timeout(self.request_timeout_s)
        usable = (self.num_pages - 1) * self.page_size
        if usable < self.max_model_len:
            raise InvalidRequest(
                f"the KV cache holds {usable} tokens ({self.num_pages - 1} pages of {self.page_size}), fewer than "
                f"max_model_len ({self.max_model_len}): lower max_model_len or give the cache more memory"
            )
        if len(self.eos_ids) > self.max_stop_ids:
            raise InvalidRequest(f"{len(self.eos_ids)} end-of-sequence ids; max_stop_ids is {self.max_stop_ids}")

    @property
    def num_slots(self) -> int:
        """Rows of the request tables: slot 0 is padding, and finishing requests must not keep new ones out."""
        return 2 * self.max_num_seqs + 1

    @property
    def max_pages_per_request(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return self.max_num_seqs


def _sync_guard_of_environment() -> Any:
    return os.environ.get("STRETTO_SYNC_GUARD") or "off"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine as the user gives them; `None` means: chosen from the model and the machine."""

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: needs no tokenizer."""
    revision: str | None = None
    hf_token: str | None = field(default=None, repr=False)
    load_format: LoadFormat = "auto"
    dtype: str = "auto"
    """`auto` on a GPU: the checkpoint's, if of 16 bits, or bfloat16; on a CPU: what it computes fast."""
    device: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    """None: the model's context length, but at most 8192."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """None: 8192 on a GPU, 512 on a CPU, and at least `max_num_seqs`."""
    page_size: int | None = None
    """None: 16 on a GPU, 64 on a CPU."""
    kv_cache_memory_bytes: int | None = None
    """None: on a GPU what `gpu_memory_utilization` leaves; on a CPU the least of 4 GiB, half of what is free and
    what `max_num_seqs` requests could use. Without prefix caching never more than that last."""
    num_pages: int | None = None
    """KV pages that requests can hold, instead of a size in bytes."""
    overlap_depth: int | None = None
    batch_policy: BatchPolicy = "mixed"
    max_logprobs: int = 20
    enable_prefix_caching: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    request_timeout_s: float | None = None
    seed: int = 0
    attention_backend: AttentionBackendName = "auto"
    """`triton` on a GPU, `torch` elsewhere; `flashinfer` (optional) and `torch` (slow) on a GPU are for comparison."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, workspace, graphs and KV cache may take together."""
    enforce_eager: bool = False
    """On a GPU: no CUDA graphs."""
    deterministic: bool = False
    """On a GPU: logits of a request are equal to the bit whatever runs beside it and however its prompt is cut."""
    sync_guard: SyncGuardMode = field(default_factory=_sync_guard_of_environment)
    """Watch for hidden syncs: `count` keeps findings, `raise` ends the run. Default: STRETTO_SYNC_GUARD, or off."""
    inject: str | Sequence[str] = ()
    """Faults on purpose, to see what they do: `sync@sample`, `pageable@stage`, `slow-host=2ms`, `slow-device=5ms`."""
    tensor_parallel_size: int = 1
    """Ranks that share the model: one process and one device each (one GPU, or a share of the CPU's cores)."""
    nnodes: int = 1
    """Hosts that the ranks are spread over, evenly."""
    node_rank: int = 0
    """Which of the hosts this one is; 0 leads."""
    dist_init_addr: str | None = None
    """`host:port` of host 0, where the ranks meet; None: a free port of this host (needs `nnodes` 1)."""
    control_transport: ControlTransport = "auto"
    """What carries the leader's turns to the other ranks; `auto` chooses by topology."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequest(
                f"model is {self.model!r}; give a directory, a .gguf file, a hub id or the alias smollm2-135m"
            )
        if self.dtype not in DTYPES:
            raise InvalidRequest(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        check_types(self)
        Faults.parse(self.inject)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidRequest(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; allowed: above 0, up to 1"
            )
        if self.device != "auto" and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise InvalidRequest(f"device is {self.device!r}; allowed: auto, cpu, cuda, cuda:N")
        if self.page_size is not None and self.page_size not in PAGE_SIZES:
            raise InvalidRequest(f"page_size is {self.page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}")
        at_least_one = ("num_threads", "max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_pages")
        for name in (*at_least_one, "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_logprobs", self.max_logprobs, 0)
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InvalidRequest(f"{name} is {value}; allowed: up to {most}")
        if self.overlap_depth is not None:
            _check_depth(self.overlap_depth)
        _check_timeout(self.request_timeout_s)
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise InvalidRequest("num_pages and kv_cache_memory_bytes both given; give one of them")
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise InvalidRequest unless the ranks can be spread over the hosts, and the hosts can meet."""
        size, nodes = self.tensor_parallel_size, self.nnodes
        _at_least("tensor_parallel_size", size, 1)
        _at_least("nnodes", nodes, 1)
        _at_least("node_rank", self.node_rank, 0)
        if size % nodes:
            raise InvalidRequest(
                f"tensor_parallel_size is {size} and nnodes {nodes}: ranks are spread evenly, so the one must be a "
                "multiple of the other"
            )
        if self.node_rank >= nodes:
            raise InvalidRequest(f"node_rank is {self.node_rank}; with nnodes {nodes} allowed are 0 to {nodes - 1}")
        if self.dist_init_addr is not None:
            split_address(self.dist_init_addr)
        elif nodes > 1:
            raise InvalidRequest(f"nnodes is {nodes}: give dist_init_addr, a host:port of host 0 that all hosts reach")
        if nodes > 1 and self.control_transport == "shared-memory":
            raise InvalidRequest(
                f"control_transport is 'shared-memory', which is for one host, and nnodes is {nodes}; allowed: 'auto', "
                "'zeromq', 'gloo'"
            )
        if size > 1 and self.device.startswith("cuda:"):
            raise InvalidRequest(
                f"device is {self.device!r} but tensor_parallel_size {size}: each rank takes a GPU of its own; give "
                "device='cuda' (and CUDA_VISIBLE_DEVICES to choose which)"
            )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each host."""
        return self.tensor_parallel_size // self.nnodes

    def resolved_page_size(self, device_type: str) -> int:
        """Tokens per KV page: as given, or the device's default."""
        return DEFAULT_PAGE_SIZE[device_type] if self.page_size is None else self.page_size

    def resolved_overlap_depth(self, device_type: str) -> int:
        """The overlap depth to use: STRETTO_DISABLE_OVERLAP=1 wins, then the option, then the device's default."""
        if os.environ.get("STRETTO_DISABLE_OVERLAP", "0") not in ("", "0"):
            return 0
        return DEFAULT_OVERLAP_DEPTH[device_type] if self.overlap_depth is None else self.overlap_depth


def split_address(address: object) -> tuple[str, int]:
    """Host and port of `host:port` (an IPv6 address in brackets). Raises InvalidRequest."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit():
        raise InvalidRequest(
            f"dist_init_addr is {address!r}; allowed: host:port, as in 10.0.0.1:29500 or [fd00::1]:29500"
        )
    if not 0 < int(port) < 2**16:
        raise InvalidRequest(f"dist_init_addr is {address!r}; allowed ports: 1 to {2**16 - 1}")
    return bare, int(port)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} is {value!r}; allowed: a whole number of at least {least}")


def _check_depth(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_OVERLAP_DEPTH:
        raise InvalidRequest(f"overlap_depth is {value!r}; allowed: 0 to {MAX_OVERLAP_DEPTH}")


def _check_timeout(value: object) -> None:
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0):
        raise InvalidRequest(f"request_timeout_s is {value!r}; allowed: a number above 0")
