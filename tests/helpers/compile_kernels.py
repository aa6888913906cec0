"""Compiles every kernel for Hopper, without a GPU: `python -m tests.helpers.compile_kernels bfloat16` (or float32).

Triton's interpreter accepts programs that its compiler does not (a name with two types, say). The kernels' own launch
functions are called on CPU tensors, with the launch replaced by a compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
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
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for `Kernel.run`."""
    given = dict(zip(self.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in self.arg_names and name != "launch_pdl"}
    given.update({name: value for name, value in kwargs.items() if name in self.arg_names})
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(self.params):
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
    source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
    binary = compiled[self.__name__] = triton.compile(source, target=TARGET, options=options)
    stack_bytes[self.__name__] = max(_stack_bytes(binary.asm["cubin"]), stack_bytes.get(self.__name__, 0))


def _stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", used))


def compile_all(dtype: torch.dtype) -> None:
    """Every kernel that models of `dtype` use, with shapes that take every branch of the launch functions."""
    from stretto.kernels import (
        decode_attention,
        decode_work,
        elementwise,
        exchange,
        few_rows,
        gated_matmul,
        invariant_attention,
        invariant_matmul,
        jit,
        launch,
        peer_buffers,
        plan,
        plan_mixed,
        prefill_attention,
        prefill_work,
        rope_write,
        sampling,
        sampling_filters,
        split_sampling,
    )
    from stretto.kernels import small_matmul as products

    jit.Kernel.run = compile_instead  # type: ignore[method-assign]
    launch.dependent_launch = lambda device: True  # type: ignore[assignment]
    cpu = torch.device("cpu")

    def low(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def longs(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    elementwise.add_rms_norm(low(2, 1024), low(2, 1024), low(1024), 1e-6)
    elementwise.add_rms_norm(low(2, 1024), torch.zeros(4, 2, 1024), low(1024), 1e-6)
    elementwise.sum_parts(torch.zeros(4, 2, 1024), dtype)
    elementwise.silu_and_mul(low(2, 2048))
    peers = peer_buffers.PeerBuffers(longs(2), torch.zeros(4, dtype=torch.int32), 0, 2, 2**11, 2**19)
    exchange.sum_ranks(low(3, 1024), peers)
    exchange.add_sum(torch.zeros(3, 1024), torch.zeros(3, 1024), peers)
    exchange.add_sum_rms_norm(low(2, 1024), low(2, 1024), low(1024), 1e-6, peers)
    transform = rope_write.HeadTransform(16, 8, low(24, 128), 1e-6, torch.zeros(64, 128))
    cache = low(2, 8, 8, 16, 128)
    rope_write.rope_write(torch.zeros(2, 2, 32, 128), longs(2), longs(2), transform, cache[0], cache[1])
    rope_write.rope_write(low(2, 32, 128), longs(2), longs(2), transform, cache[0], cache[1])
    work = decode_work.DecodeWork.allocate(4, 16, 8, 128, cpu)
    rows = (longs(9, 4), longs(4), longs(4))
    decode_work.plan_decode(rows[2], 4, 8, work)
    decode_attention.decode_attention(low(4, 16, 128), cache[0], cache[1], *rows, 0.1, work, low(4, 16, 128))
    for block_q in prefill_attention.query_blocks(128, groups=2):
        blocks = prefill_work.PrefillWork.allocate(99, 4, block_q, cpu)
        prefill_work.plan_prefill(rows[1], rows[2], longs(4), 4, 1, blocks)
        prefill_attention.prefill_attention(
            low(99, 16, 128), cache[0], cache[1], rows[0], blocks, 5, 0.1, low(99, 16, 128)
        )
    invariant_attention.invariant_attention(
        low(99, 16, 128), cache[0], cache[1], *rows, longs(4), 4, 0.1, low(99, 16, 128)
    )
    scratch = invariant_attention.PartScratch.allocate(4, 16, 8, 128, 4096, cpu)
    invariant_attention.invariant_attention(
        low(4, 16, 128), cache[0], cache[1], *rows, longs(4), 4, 0.1, low(4, 16, 128), scratch
    )
    for count, outputs in ((9, 1024), (9, 9000), (300, 5000), (3000, 9000)):
        invariant_matmul.invariant_matmul(low(count, 1024), low(outputs, 1024), low(outputs))
    for norm, gate in ((products.Norm(low(1024), 1e-6), True), (None, False)):
        products.small_matmul(low(1, 1024), low(512, 1024), low(512), norm=norm, gate=gate)
    products.small_matmul(low(1, 4096), low(512, 4096), low(512), norm=products.Norm(low(4096), 1e-6), gate=True)
    if dtype.itemsize == 2:
        gated_matmul.gated_matmul(low(300, 1024), low(512, 1024))
    for count in (8, 64):
        few_rows.few_rows_matmul(low(count, 1024), low(512, 1024), low(512))
        few_rows.few_rows_matmul(low(count, 1024), low(512, 1024), low(512), whole=True)
        few_rows.few_rows_gated(low(count, 1024), low(512, 1024))
    logits, scratch = low(3, 9001), sampling.SampleScratch.allocate(3, 9001, cpu)
    floats = torch.zeros(9)
    rows = (longs(3), longs(3), floats, longs(9), longs(9, 64), longs(9), longs(3), scratch)
    sampling.sample_rows(logits, *rows)
    agreed = split_sampling.AgreedMaxima.allocate(3, cpu)
    split_sampling.sample_split_rows(logits, range(8000, 16_000), *rows, agreed, peers)
    found = sampling_filters.FilterScratch.allocate(3, cpu)
    filters = sampling_filters.RowFilters(longs(9), floats, floats, found)
    sampling.sample_rows(logits, *rows, filters=filters)
    sampling.mask_stop_ids(logits, longs(3), longs(3), longs(9), longs(9, 16))
    for rows in (4, 1024):
        _compile_plan(rows, plan, plan_mixed, work, blocks, dtype)


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
    compile_all(getattr(torch, sys.argv[1]))
    for name in sys.argv[2:]:
        print(compiled[name].asm["ttgir"])
    print(len(compiled), "kernels:", ", ".join(sorted(compiled)))
    print("stack:", json.dumps(stack_bytes))
