"""An engine keeps to `gpu_memory_utilization`, with the largest steps that its limits admit, of every kind.

The GPU's memory in use is measured, so nothing else may run on it: `scripts/gpu_test.sh` runs this file alone. Each
case is a process of its own: what a process has once loaded or set aside stays.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.assembly import assemble
from stretto.bench.gpu import engine_config
from stretto.engine.memory import GIB
from stretto.request import SamplingParams
from stretto.runtime import Runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
UTILIZATION = 0.9
SPARE = 0.03
"""Part of what is allowed that may stay unused: workspace is sized for all kinds of steps together."""


@pytest.mark.parametrize(
    ("rows", "caching", "fills"), [(8, True, True), (256, False, False), (512, False, True)], ids=str
)
def test_memory_in_use_stays_within_the_utilization(tmp_path: Path, rows: int, caching: bool, fills: bool) -> None:
    """`fills`: the cache takes all that is left, for prefixes, or as the requests could use more than there is."""
    command = [sys.executable, "-m", "tests.gpu.test_memory_gpu", str(tmp_path), str(rows), str(int(caching))]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    most = max(line["in_use"] for line in lines)
    allowed = lines[0]["allowed"]
    told = "; ".join(f"{line['after']} {line['in_use'] / GIB:.2f}" for line in lines)
    print(f"{rows} rows: {allowed / GIB:.2f} GiB allowed; in use after {told}")
    assert most <= allowed, told
    assert not fills or most >= (1 - SPARE) * allowed, told


def _in_use() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _stages(runtime: Runtime, rows: int) -> Iterator[str]:
    """Runs steps of one kind after the other, as large as they may be; their names."""
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        "top-p": SamplingParams(top_p=0.9, max_tokens=3, ignore_eos=True),
        "penalties": SamplingParams(presence_penalty=0.5, top_k=50, max_tokens=3, ignore_eos=True),
        "log-probabilities": SamplingParams(top_p=0.9, logprobs=20, max_tokens=3, ignore_eos=True),
        "prompt log-probabilities": SamplingParams(prompt_logprobs=20, max_tokens=1, ignore_eos=True),
    }
    for name, params in kinds.items():
        for length in (40, 3000) if name != "prompt log-probabilities" else (40,):
            for index in range(rows if length == 40 else 8):
                runtime.add([7 + index] * length, params, seed=index)
            while runtime.has_work:
                runtime.step()
        yield name


def main(folder: Path, rows: int, caching: bool) -> None:
    """Start an engine of the 0.6B's shape, run everything, and print what was in use after each stage."""
    parts = assemble(
        engine_config(
            "qwen3-0.6b",
            folder,
            max_num_seqs=rows,
            gpu_memory_utilization=UTILIZATION,
            enable_prefix_caching=caching,
        )
    )
    assert parts.memory is not None
    allowed = parts.memory.allowed
    print(json.dumps({"after": "the cache", "in_use": _in_use(), "allowed": allowed, "plan": parts.memory.describe()}))
    runtime = Runtime(parts.config, parts.device, parts.model, parts.attention, make_runner=parts.make_runner)
    print(json.dumps({"after": "start", "in_use": _in_use()}))
    for name in _stages(runtime, rows):
        print(json.dumps({"after": name, "in_use": _in_use()}), flush=True)
    runtime.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
