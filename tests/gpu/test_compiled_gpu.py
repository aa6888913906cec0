"""Once an engine has started nothing is compiled, neither for a first batch of some size nor for any kind of sampling.

It would hold up everybody for a second. In a process of its own, as kernels that another test compiled would not count.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stretto.bench.gpu import engine_config
from stretto.runtime import Runtime
from tests.gpu.test_cuda_engine import ADJUSTED, MIXES, SCORED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LOADS = ((1, 1), (1, 1000), (1, 3500), (5, 30), (64, 9), (20, 200), (40, 100))
"""(requests, tokens of each prompt); they arrive one by one while others decode if there are less than 64."""
SCORED_LOADS = ((1, 1), (1, 2), (1, 7), (1, 18), (1, 40), (1, 1000), (5, 30))
"""Prompts are scored by up to 64 tokens at once, also where fewer requests may run."""


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_compiled_once_an_engine_has_started(tmp_path: Path, deterministic: bool) -> None:
    assert_nothing_is_compiled_later(tmp_path, deterministic, 1)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
def test_nothing_is_compiled_where_few_may_run(tmp_path: Path, max_num_seqs: int) -> None:
    assert_nothing_is_compiled_later(tmp_path, False, 1, max_num_seqs)


def assert_nothing_is_compiled_later(folder: Path, deterministic: bool, ranks: int, max_num_seqs: int = 64) -> None:
    """By the first of `ranks` ranks. Fewer than 64 requests at once are only asked what differs for them."""
    options = (str(int(deterministic)), str(ranks), str(max_num_seqs))
    command = [sys.executable, "-m", "tests.gpu.test_compiled_gpu", str(folder), *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    started_with, *later = found.stdout.splitlines()
    assert int(started_with) > 10
    assert later == []


def main(folder: Path, deterministic: bool, ranks: int, max_num_seqs: int) -> None:
    """Print how many kernels starting compiles, then a line for each that is compiled later."""
    import triton

    compiled: list[str] = []
    compile_kernel = triton.JITFunction._do_compile

    def noted(kernel: triton.JITFunction, *args: object) -> object:
        compiled.append(kernel.__name__)
        return compile_kernel(kernel, *args)

    triton.JITFunction._do_compile = noted
    config = engine_config(
        "qwen3-0.6b",
        folder,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=2**30,
        deterministic=deterministic,
        tensor_parallel_size=ranks,
    )
    mixes, loads = ((*MIXES.values(), ADJUSTED, SCORED), LOADS) if max_num_seqs >= 64 else ((SCORED,), SCORED_LOADS)
    with closing(Runtime.start(config)) as runtime:
        print(len(compiled))
        for params in mixes:
            for count, length in loads:
                compiled.clear()
                for index in range(count):
                    runtime.add([7 + index] * length, params, seed=index)
                    if count < 64:
                        runtime.step()
                while runtime.has_work:
                    runtime.step()
                for name in compiled:
                    print(f"{name} in {count} prompts of {length} tokens, {params}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), bool(int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
