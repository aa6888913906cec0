"""Compiles every kernel for Hopper, without a GPU: `python -m tests.helpers.compile_kernels bfloat16` (or float32).

Triton's interpreter accepts programs that its compiler does not (a name with two types, say). The kernels' own launch
functions are called on CPU tensors, with the launch replaced by a compilation. `--others`: for other GPUs, the kernels
that fill shared memory or registers. `--shapes`: for real models, only as far as blocks must be powers of two.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.kernels import launch

OTHERS = {
    "A100": launch.Gpu((8, 0), 163 * 1024, 108),
    "RTX 4090": launch.Gpu((8, 9), 99 * 1024, 128),
    "RTX 5090": launch.Gpu((12, 0), 99 * 1024, 170),
}
LARGE_KERNELS = ("_decode_attention", "_prefill_attention", "_resident", "_streamed", "_gated_matmul")
"""Those whose tiles are as large as a GPU allows."""
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
compiled: dict[str, Any] = {}
stack_bytes: dict[str, int] = {}
"""Of each kernel, the most that a thread of one of its binaries needs beside its registers."""
shared_bytes: dict[str, int] = {}
"""Of each kernel, the most shared memory that a program of one of its binaries needs."""
parsed: set[str] = set()
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def _target(gpu: launch.Gpu) -> GPUTarget:
    major, minor = gpu.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def compile_for(gpu: launch.Gpu, only: Collection[str] | None = None) -> Callable[..., None]:
    """What stands in for `Kernel.run`; each binary once. `only`: the names of kernels."""
    done: set[str] = set()

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = self.__name__
        arguments, options = _arguments(self, args, kwargs)
        key = f"{name} {arguments} {options}"
        if key in done or (only is not None and name not in only):
            return
        done.add(key)
        binary = triton.compile(ASTSource(fn=self, **arguments), target=_target(gpu), options=options)
        compiled[name] = binary
        stack_bytes[name] = max(_stack_bytes(binary.asm["cubin"]), stack_bytes.get(name, 0))
        shared_bytes[name] = max(binary.metadata.shared, shared_bytes.get(name, 0))

    return compile_instead


class _Parsed(Exception):
    """As far as it should go."""


class _ParsedSource(ASTSource):
    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        super().make_ir(*args, **kwargs)
        raise _Parsed


def parse_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for `Kernel.run`; each binary once."""
    arguments, options = _arguments(self, args, kwargs)
    key = f"{self.__name__} {arguments} {options}"
    if key not in parsed:
        parsed.add(key)
        with suppress(_Parsed):
            triton.compile(_ParsedSource(fn=self, **arguments), target=_target(launch.H200), options=options)


def _arguments(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an ASTSource: types, constants and attributes of a launch; and the compiler's options."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names and name != "launch_pdl"}
    given.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_POINTERS[value.base.dtype][1:]}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
    return {"signature": signature, "constexprs": constants, "attrs": attributes}, options


def _stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", used))


@dataclass(frozen=True)
class Shape:
    """Of a model, or of one rank's part of it."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int


SHAPES = {
    "SmolLM2-135M": Shape(576, 1536, 9, 3, 64, 49_152),
    "Qwen2.5-0.5B": Shape(896, 4864, 14, 2, 64, 151_936),
    "SmolLM2-360M": Shape(960, 2560, 15, 5, 64, 49_152),
    "Qwen3-0.6B": Shape(1024, 3072, 16, 8, 128, 151_936),
    "Qwen2.5-1.5B": Shape(1536, 8960, 12, 2, 128, 151_936),
    "Qwen2.5-1.5B, one of two ranks": Shape(1536, 4480, 6, 1, 128, 75_968),
    "Llama-3.2-1B": Shape(2048, 8192, 32, 8, 64, 128_256),
    "Qwen3-4B": Shape(2560, 9728, 32, 8, 128, 151_936),
    "Llama-3.2-3B": Shape(3072, 8192, 24, 8, 128, 128_256),
    "Qwen2.5-7B": Shape(3584, 18_944, 28, 4, 128, 152_064),
    "Qwen3-8B": Shape(4096, 12_288, 32, 8, 128, 151_936),
    "Llama-3.1-8B": Shape(4096, 14_336, 32, 8, 128, 128_256),
    "Qwen3-14B": Shape(5120, 17_408, 40, 8, 128, 151_936),
    "Qwen2.5-32B": Shape(5120, 27_648, 40, 8, 128, 152_064),
    "Llama-3.1-70B": Shape(8192, 28_672, 64, 8, 128, 128_256),
}
"""Real models that fit into a GPU or two."""
LLAMA_2_7B = Shape(4096, 11_008, 32, 32, 128, 32_000)


def _zeros(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


longs = partial(_zeros, torch.int64)


def launch_model(dtype: torch.dtype, shape: Shape) -> None:
    """What decode steps and prompts of a model of this shape launch, for one row, few and many."""
    from stretto.kernels import (
        elementwise,
        exchange,
        few_rows,
        gated_matmul,
        peer_buffers,
        rope_write,
        sampling,
    )
    from stretto.kernels import small_matmul as products

    cpu = torch.device("cpu")
    hidden, ffn, heads, kv_heads, dim = shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.dim
    width = (heads + 2 * kv_heads) * dim
    low = partial(_zeros, dtype)

    weights = {
        "qkv": low(width, hidden),
        "o": low(hidden, heads * dim),
        "gate_up": low(2 * ffn, hidden),
        "down": low(hidden, ffn),
        "head": low(shape.vocabulary, hidden),
    }
    norm = products.Norm(low(hidden), 1e-6)
    row, o_row, f_row = low(1, hidden), low(1, heads * dim), low(1, ffn)
    products.small_matmul(row, weights["qkv"], low(width), norm=norm)
    products.small_matmul(o_row, weights["o"], add_to=row)
    products.small_matmul(o_row, weights["o"])
    products.small_matmul(row, weights["gate_up"], norm=norm, gate=True)
    products.small_matmul(f_row, weights["down"], add_to=row)
    products.small_matmul(row, weights["head"], norm=norm)
    for count in (8, 64):
        for name, given, bias in (("qkv", hidden, low(width)), ("o", heads * dim, None), ("down", ffn, None)):
            few_rows.few_rows_matmul(low(count, given), weights[name], bias)
        few_rows.few_rows_matmul(low(count, hidden), weights["qkv"], low(width), whole=True)
        few_rows.few_rows_gated(low(count, hidden), weights["gate_up"])
        few_rows.few_rows_matmul(low(count, hidden), weights["head"], whole=True)
    if dtype.itemsize == 2 and ffn % 128 == 0 and hidden % 64 == 0 and gated_matmul.runs_on(launch.gpu_of(cpu)):
        gated_matmul.gated_matmul(low(1100, hidden), weights["gate_up"])
    elementwise.add_rms_norm(low(2, hidden), low(2, hidden), norm.weight, 1e-6)
    elementwise.add_rms_norm(low(2, hidden), torch.zeros(4, 2, hidden), norm.weight, 1e-6)
    elementwise.silu_and_mul(low(2, 2 * ffn))
    if dtype != torch.float16:
        peers = peer_buffers.PeerBuffers(longs(2), torch.zeros(4, dtype=torch.int32), 0, 2, 2**17, 2**23)
        for count in (2, 2048):
            exchange.sum_ranks(low(count, hidden), peers)
            exchange.add_sum(low(count, hidden), low(count, hidden), peers)
            exchange.add_sum_rms_norm(low(count, hidden), low(count, hidden), norm.weight, 1e-6, peers)
    transform = rope_write.HeadTransform(heads, kv_heads, low(heads + kv_heads, dim), 1e-6, torch.zeros(64, dim))
    keys, values = low(8, kv_heads, 16, dim), low(8, kv_heads, 16, dim)
    for qkv in (torch.zeros(2, 2, heads + 2 * kv_heads, dim), low(2, heads + 2 * kv_heads, dim)):
        rope_write.rope_write(qkv, longs(2), longs(2), transform, keys, values)
    launch_attention(dtype, shape)
    logits, room = low(3, shape.vocabulary), sampling.SampleScratch.allocate(3, shape.vocabulary, cpu)
    sampling.sample_rows(logits, longs(3), longs(3), torch.zeros(9), longs(9), longs(9, 64), longs(9), longs(3), room)


def launch_attention(dtype: torch.dtype, shape: Shape) -> None:
    """What of it a model of this shape launches: for decode rows, few and many, and for prompts."""
    from stretto.kernels import decode_attention, decode_work, invariant_attention, prefill_attention, prefill_work

    cpu = torch.device("cpu")
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    low = partial(_zeros, dtype)
    keys, values = low(8, kv_heads, 16, dim), low(8, kv_heads, 16, dim)
    tables = (longs(9, 4), longs(4), longs(4))
    for most in (4, *decode_work.row_steps(256, kv_heads)):
        work = decode_work.DecodeWork.allocate(most, heads, kv_heads, dim, cpu)
        q = low(4, heads, dim)
        decode_attention.decode_attention(q, keys, values, *tables, 0.1, work, low(4, heads, dim))
    decode_work.plan_decode(tables[2], 4, kv_heads, work)
    q = low(99, heads, dim)
    for block_q in prefill_attention.query_blocks(dim, heads // kv_heads):
        blocks = prefill_work.PrefillWork.allocate(99, 4, block_q, cpu)
        prefill_work.plan_prefill(tables[1], tables[2], longs(4), 4, 1, blocks)
        prefill_attention.prefill_attention(q, keys, values, tables[0], blocks, 5, 0.1, torch.empty_like(q))
    scratch = invariant_attention.PartScratch.allocate(4, heads, kv_heads, dim, 4096, cpu)
    for count, parts in ((99, None), (4, scratch)):
        q = low(count, heads, dim)
        invariant_attention.invariant_attention(
            q, keys, values, *tables, longs(4), 4, 0.1, torch.empty_like(q), *(() if parts is None else (parts,))
        )


def prepare(gpu: launch.Gpu = launch.stand_in) -> None:
    """Let kernels be launched as on such a GPU, by whatever stands in for `Kernel.run`."""
    launch.stand_in = gpu
    launch.gpu_of.cache_clear()
    launch.dependent_launch = lambda device: gpu.capability >= (9, 0)  # type: ignore[assignment]


def compile_all(dtype: torch.dtype) -> None:
    """Every kernel that models of `dtype` use, with shapes that take every branch of the launch functions."""
    from stretto.kernels import (
        decode_work,
        elementwise,
        exchange,
        invariant_matmul,
        jit,
        peer_buffers,
        plan,
        plan_mixed,
        prefill_work,
        sampling,
        sampling_filters,
        split_sampling,
    )
    from stretto.kernels import small_matmul as products

    jit.Kernel.run = compile_for(launch.H200)  # type: ignore[method-assign]
    prepare()
    cpu = torch.device("cpu")
    launch_model(dtype, Shape(1024, 256, 16, 8, 128, 512))
    low = partial(_zeros, dtype)

    elementwise.sum_parts(torch.zeros(4, 2, 1024), dtype)
    for count, outputs in ((9, 1024), (9, 9000), (300, 5000), (3000, 9000)):
        invariant_matmul.invariant_matmul(low(count, 1024), low(outputs, 1024), low(outputs))
    products.small_matmul(low(1, 4096), low(512, 4096), low(512), norm=products.Norm(low(4096), 1e-6), gate=True)
    logits, scratch = low(3, 9001), sampling.SampleScratch.allocate(3, 9001, cpu)
    floats = torch.zeros(9)
    rows = (longs(3), longs(3), floats, longs(9), longs(9, 64), longs(9), longs(3), scratch)
    if dtype != torch.float16:
        peers = peer_buffers.PeerBuffers(longs(2), torch.zeros(4, dtype=torch.int32), 0, 2, 2**11, 2**19)
        exchange.add_sum(torch.zeros(3, 1024), torch.zeros(3, 1024), peers)
        agreed = split_sampling.AgreedMaxima.allocate(3, cpu)
        split_sampling.sample_split_rows(logits, range(8000, 16_000), *rows, agreed, peers)
    found = sampling_filters.FilterScratch.allocate(3, cpu)
    filters = sampling_filters.RowFilters(longs(9), floats, floats, found)
    sampling.sample_rows(logits, *rows, filters=filters)
    sampling.mask_stop_ids(logits, longs(3), longs(3), longs(9), longs(9, 16))
    work = decode_work.DecodeWork.allocate(4, 16, 8, 128, cpu)
    blocks = prefill_work.PrefillWork.allocate(99, 4, 64, cpu)
    for most in (4, 1024):
        _compile_plan(most, plan, plan_mixed, work, blocks, dtype)


def parse_all(dtype: torch.dtype) -> None:
    """What models of `SHAPES` launch, as far as Triton's intermediate code: a hundred times as fast as compiling it."""
    from stretto.kernels import jit

    jit.Kernel.run = parse_instead  # type: ignore[method-assign]
    prepare()
    for name, shape in SHAPES.items():
        try:
            launch_model(dtype, shape)
        except Exception as error:
            raise AssertionError(f"{name}: {shape}") from error


def compile_others(dtype: torch.dtype) -> dict[str, dict[str, dict[str, int]]]:
    """What models launch on `OTHERS`: of each GPU, the shared memory and stack that its kernels need."""
    from stretto.kernels import jit

    needs = {}
    for name, gpu in OTHERS.items():
        jit.Kernel.run = compile_for(gpu, LARGE_KERNELS)  # type: ignore[method-assign]
        prepare(gpu)
        launch_model(dtype, SHAPES["Qwen3-0.6B"])
        if name == "RTX 4090":  # the tightest; these group their heads in other ways
            launch_attention(dtype, SHAPES["Qwen3-8B"])
            launch_attention(dtype, LLAMA_2_7B)
        needs[name] = {"shared": dict(shared_bytes), "stack": dict(stack_bytes)}
        shared_bytes.clear()
        stack_bytes.clear()
    return needs


def _compile_plan(rows: int, plan: Any, plan_mixed: Any, work: Any, blocks: Any, dtype: torch.dtype) -> None:
    from stretto.config import SchedulerConfig
    from stretto.engine.staging import PlanLayout
    from stretto.engine.tables import DeviceTables

    config = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=2048, max_model_len=64, num_pages=64, vocab_size=9
    )
    tables = DeviceTables(config, torch.device("cpu"))
    inputs = plan.StepInputs.allocate(rows, 64, torch.device("cpu"))
    layout = PlanLayout(3, 2, 1, 1, 20, config.max_stop_ids)
    staged = torch.zeros(layout.num_words, dtype=torch.int32)
    plan.apply_plan(staged, layout, tables, inputs)
    plan_mixed.derive_mixed(staged, layout, 1, 32, 16, tables, inputs, work, 8, blocks)
    table = torch.zeros(9, 1024, dtype=dtype)
    for first_id in (9, None):  # a rank's part of the table, and all of it
        plan.derive_decode(rows, 16, tables, inputs, work, 8, table, table.new_zeros(rows, 1024), first_id)


if __name__ == "__main__":
    if sys.argv[2:] == ["--shapes"]:
        parse_all(getattr(torch, sys.argv[1]))
        print(len(parsed), "launches of", len(SHAPES), "shapes")
    elif sys.argv[2:] == ["--others"]:
        print(json.dumps(compile_others(getattr(torch, sys.argv[1]))))
    else:
        compile_all(getattr(torch, sys.argv[1]))
        for name in sys.argv[2:]:
            print(compiled[name].asm["ttgir"])
        print(len(compiled), "kernels:", ", ".join(sorted(compiled)))
        print("needs:", json.dumps({"shared": shared_bytes, "stack": stack_bytes}))
