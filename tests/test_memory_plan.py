"""A GPU's memory is divided exactly, all that the engine keeps is in the division, and what cannot fit is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stretto import assembly
from stretto.assembly import MOST_CACHED_PAGES, Parts, assemble
from stretto.attention.base import AttentionBackend, AttentionShape
from stretto.attention.flashinfer_paged import workspace_bytes
from stretto.attention.triton_paged import TritonPagedAttention
from stretto.config import EngineConfig, SchedulerConfig
from stretto.device.cpu import CpuDevice
from stretto.engine.adjustment import penalty_bytes
from stretto.engine.engine import Engine
from stretto.engine.fused_runner import FusedRunner, fused_runner
from stretto.engine.memory import GIB, MIB, MemoryPlan, buffer_bytes, plan_memory
from stretto.engine.runner import EagerRunner, MakeRunner
from stretto.engine.staging import ResultBuffers, StagingRing
from stretto.errors import InvalidRequest
from stretto.kernels import decode_work, invariant_attention
from stretto.kernels.invariant_attention import PartScratch
from stretto.models.decoder import Decoder
from stretto.models.fused import FusedDecoder
from stretto.models.registry import read_config

CONFIG = read_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
    }
)


def limits(**options: int) -> SchedulerConfig:
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 4096, **options}
    return SchedulerConfig(**sizes, num_pages=-(-sizes["max_model_len"] // 16) + 1, vocab_size=CONFIG.vocab_size)  # type: ignore[arg-type]


def plan(
    total_gib: float = 80, free_gib: float = 78, graphs: bool = True, buffers: int = 0, **options: int
) -> MemoryPlan:
    return plan_memory(
        CONFIG,
        limits(**options),
        total=int(total_gib * GIB),
        free=int(free_gib * GIB),
        utilization=0.9,
        element_bytes=2,
        graphs=graphs,
        buffers=buffers,
    )


def test_the_parts_add_up_to_what_is_allowed() -> None:
    divided = plan()
    assert divided.allowed == divided.in_use + divided.workspace + divided.graphs + divided.cache
    assert divided.in_use == 2 * GIB


def test_less_for_the_rest_is_more_for_the_cache() -> None:
    assert plan(graphs=False).cache > plan().cache
    assert plan(max_num_seqs=32).cache > plan().cache
    assert plan(max_num_batched_tokens=1024).cache > plan().cache
    assert plan(buffers=MIB).cache == plan().cache - MIB


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"3\.60 of 4\.00 GiB allowed, 3\.00 in use .* workspace, .* graphs"):
        plan(total_gib=4, free_gib=1)


def test_graphs_of_steps_with_prompts_are_counted() -> None:
    """More of them, and more room for each, the more tokens a step may have, as far as such steps are captured."""
    sizes = (16, 64, 8192, 16_384)
    few, some, most, none = (plan(max_num_seqs=8, max_num_batched_tokens=tokens).graphs for tokens in sizes)
    assert few < some < none < most


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Parts]]:
    """Assembles a tiny model, on weights that are not packed for a CPU."""
    from tests.helpers.tiny_models import save, tiny_config, tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    save(tiny_model(tiny_config("qwen3")), folder)
    made: list[Parts] = []

    def make(**options: object) -> Parts:
        sizes: dict[str, object] = {"max_num_seqs": 5, "max_num_batched_tokens": 48, "page_size": 16, **options}
        config = EngineConfig(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu",
            attention_backend="triton",
            max_logprobs=7,
            **sizes,  # type: ignore[arg-type]
        )
        made.append(assemble(config))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.layers.linear.onednn_available", lambda: False)
        yield make
    for parts in made:
        parts.device.close()


@pytest.fixture(scope="module")
def parts(tiny: Callable[..., Parts]) -> Parts:
    return tiny(num_pages=40)


@pytest.mark.parametrize("depth", [0, 1, 8])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_all_that_an_engine_keeps_is_counted(parts: Parts, depth: int, graphs: bool, invariant: bool) -> None:
    """Every tensor that can be reached from an engine, but for weights, cache and pinned memory."""
    config = replace(parts.config, overlap_depth=depth, max_model_len=600)
    device = parts.device.torch_device

    def make() -> tuple[TritonPagedAttention, MakeRunner]:
        shape = AttentionShape.of(
            parts.model.config, page_size=16, num_pages=config.num_pages, dtype=torch.float32, device=device
        )
        attention = TritonPagedAttention(shape, config.max_rows, invariant_up_to=600 if invariant else None)
        return attention, fused_runner(FusedDecoder(parts.model), graphs=graphs)

    attention, make_runner = make()
    engine = Engine(config, parts.device, parts.model, attention, checked=True, make_runner=make_runner)
    assert isinstance(engine.runner, FusedRunner)
    assert (len(engine.runner.prompt_graphs.graphs.sizes) > 0) == graphs
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(engine, set())}
    for_a_moment = config.max_rows * 2 * 4  # asked of by the choice of tokens whether ranks can exchange it
    counted = buffer_bytes(config, parts.model, make)
    assert counted == sum(kept.values()) - attention.cache_bytes + for_a_moment


def tensors_of(x: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All on the device that can be reached through Stretto's objects and containers."""
    if isinstance(x, torch.Tensor):
        yield x
    if id(x) in seen or isinstance(x, torch.Tensor | Decoder | FusedDecoder | ResultBuffers):
        return
    seen.add(id(x))
    inside: list[object] = []
    if isinstance(x, dict):
        inside = list(x.values())
    elif isinstance(x, list | tuple | set):
        inside = list(x)
    elif type(x).__module__.startswith("stretto."):
        inside = [getattr(x, field.name) for field in fields(x)] if is_dataclass(x) else []
        inside = [*(getattr(x, "__dict__", None) or {}).values(), *inside]
        if hasattr(x, "array"):  # pinned memory
            return
    for part in inside:
        yield from tensors_of(part, seen)


def test_counting_takes_no_memory_and_leaves_no_trace(parts: Parts) -> None:
    made: list[torch.Tensor] = []

    def make() -> tuple[AttentionBackend, MakeRunner]:
        made.append(torch.zeros(2**40, dtype=torch.uint8, device="cpu"))
        return parts.attention, EagerRunner

    assert 2**40 < buffer_bytes(parts.config, parts.model, make) + parts.attention.cache_bytes < 2**40 + 2**20
    assert torch.zeros(3, device="cpu").tolist() == [0, 0, 0]


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_the_ring_of_staged_plans_is_counted_for_what_it_takes(depth: int) -> None:
    config = replace(limits(max_num_seqs=24), overlap_depth=depth)
    device = CpuDevice()
    ring = StagingRing(device, config, depth + 1)
    entries = {entry.index: entry for entry in (ring.next() for _ in range(depth + 1))}
    assert StagingRing.device_bytes(config, depth + 1) == sum(entry.device.nbytes for entry in entries.values())
    device.close()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows", "context"),
    [(32, 8, 128, 256, 131_072), (16, 8, 128, 8, 4096), (14, 2, 64, 512, 32_768), (5, 5, 80, 1, 100)],
)
def test_room_for_parts_of_contexts_is_counted_for_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, rows: int, context: int
) -> None:
    """As on an H200. It used to be counted once for each kv head."""
    for module in (invariant_attention, decode_work):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    cpu = torch.device("cpu")
    shape = AttentionShape(1, heads, kv_heads, dim, 16, 1, torch.bfloat16, cpu, 1.0)
    config = limits(max_num_seqs=rows, max_model_len=context)

    def counted(up_to: int | None) -> int:
        make: Callable[[], tuple[AttentionBackend, MakeRunner]] = lambda: (  # noqa: E731
            TritonPagedAttention(shape, rows, invariant_up_to=up_to),
            EagerRunner,
        )
        return buffer_bytes(config, None, make)  # type: ignore[arg-type]

    room = PartScratch.allocate(rows, heads, kv_heads, dim, context, cpu)
    taken = room.partial_BKZGH.nbytes + room.state_BKZG2.nbytes + room.arrived_BK.nbytes
    assert counted(context) - counted(None) == taken


def test_penalties_of_long_sequences_are_counted() -> None:
    """However small the vocabulary is beside them; of all rows at once they would be many times the memory."""
    long = plan(max_model_len=200_000).workspace - plan(max_model_len=1).workspace
    assert long == penalty_bytes(256, 200_000) - penalty_bytes(256, 1)
    assert 32 * MIB <= penalty_bytes(256, 200_000) <= 40 * MIB


def test_the_division_is_made_with_what_is_kept(tiny: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of which the CPU has but the size: more steps in flight, and deterministic, cost what they take."""
    monkeypatch.setattr("stretto.assembly.is_gpu", lambda device: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    plain, deep, exact = (
        tiny(enable_prefix_caching=False, **options)  # with it the cache would take all of the GPU's size
        for options in ({"overlap_depth": 0}, {"overlap_depth": 8}, {"overlap_depth": 0, "deterministic": True})
    )
    assert plain.memory is not None
    assert deep.memory is not None
    assert exact.memory is not None
    assert deep.memory.workspace - plain.memory.workspace == StagingRing.device_bytes(plain.config, 8)
    model, device = plain.model.config, plain.device.torch_device
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    room = PartScratch.allocate(5, *heads, plain.config.max_model_len, device)
    taken = room.partial_BKZGH.nbytes + room.state_BKZG2.nbytes + room.arrived_BK.nbytes
    assert exact.memory.workspace - plain.memory.workspace == taken
    assert plain.config.num_pages == 5 * -(-plain.config.max_model_len // 16) + 1


PAGE_BYTES = 16 * 2 * 28 * 8 * 128 * 2
"""Of 16 tokens of the 0.6B."""
USEFUL = 8 * 4096 // 16
"""Pages that 8 requests of 4,096 tokens could use."""


def num_pages(device: str, plan: MemoryPlan | None = None, layers: int = 28, **options: Any) -> int:
    """Pages that the cache of a 0.6B gets, for 8 requests of 4,096 tokens."""
    config = EngineConfig("any", max_num_seqs=8, page_size=16, **options)
    model = SimpleNamespace(config=replace(CONFIG, num_layers=layers), kv_dtype=torch.bfloat16)
    place = SimpleNamespace(torch_device=torch.device(device))
    return assembly._num_pages(config, model, 4096, place, plan) - 1  # type: ignore[arg-type]


def test_on_a_gpu_cached_prefixes_get_all_that_is_left() -> None:
    """It used to be no more than the requests could use at once: 3.5 of 119 GiB, the rest idle."""
    left = MemoryPlan(total=126 * GIB, allowed=119 * GIB, in_use=0, workspace=0, graphs=0)
    assert num_pages("cuda", left) == 119 * GIB // PAGE_BYTES > 30 * USEFUL
    assert num_pages("cuda", left, enable_prefix_caching=False) == USEFUL
    assert num_pages("cuda", kv_cache_memory_bytes=30 * GIB) == 30 * GIB // PAGE_BYTES


def test_the_host_keeps_books_of_no_more_cached_pages_than_it_can() -> None:
    """A model this small has room for many times more."""
    left = MemoryPlan(total=126 * GIB, allowed=119 * GIB, in_use=0, workspace=0, graphs=0)
    assert num_pages("cuda", left, layers=1) < MOST_CACHED_PAGES
    wide = replace(left, allowed=1190 * GIB)
    assert num_pages("cuda", wide, layers=1) == MOST_CACHED_PAGES


def test_on_a_cpu_only_memory_that_was_asked_for_goes_to_cached_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.assembly._default_cache_bytes", lambda: 4 * GIB)
    assert num_pages("cpu") == USEFUL < 4 * GIB // PAGE_BYTES
    assert num_pages("cpu", kv_cache_memory_bytes=6 * GIB) == 6 * GIB // PAGE_BYTES
    assert num_pages("cpu", kv_cache_memory_bytes=6 * GIB, enable_prefix_caching=False) == USEFUL


def test_flashinfer_keeps_workspaces_beside_what_the_triton_backend_does(
    parts: Parts,
) -> None:
    """It is counted without being made, so that it need not be installed here."""

    def counted(backend: str) -> int:
        config = EngineConfig("any", attention_backend=backend, enforce_eager=True)  # type: ignore[arg-type]
        return assembly._buffer_bytes(config, parts.config, parts.model, parts.device)

    assert counted("flashinfer") == counted("triton") + workspace_bytes(parts.config.overlap_depth)
