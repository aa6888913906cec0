"""Every kernel compiles for a Hopper GPU, on any machine; the interpreter accepts more than the compiler does.

And what a GPU with less shared memory or fewer ways to fill it is given fits into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from stretto.kernels.launch import H200, Gpu
from tests.helpers.compile_kernels import OTHERS

MOST_STACK = 1024
"""What a thread takes beyond that, the driver sets aside for every one that a GPU can run: 10 KB are 2.3 GiB of an
H200."""


def compile_kernels(*arguments: str) -> str:
    """What the helper prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", *arguments],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def too_large(needs: dict[str, dict[str, int]], gpu: Gpu) -> dict[str, int]:
    """The kernels that need more than `gpu` has."""
    limits = {"shared": gpu.shared_memory, "stack": MOST_STACK}
    return {f"{what} of {name}": size for what in limits for name, size in needs[what].items() if size > limits[what]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles(dtype: str) -> None:
    needs = json.loads(compile_kernels(dtype).rpartition("needs:")[2])
    assert len(needs["stack"]) > 20
    assert too_large(needs, H200) == {}


def test_what_models_launch_on_other_gpus_fits_into_them() -> None:
    needs = json.loads(compile_kernels("bfloat16", "--others"))
    assert needs.keys() == OTHERS.keys()
    assert all(needs[name]["shared"]["_decode_attention"] > 0 for name in OTHERS)
    assert {name: too_large(needs[name], gpu) for name, gpu in OTHERS.items()} == {name: {} for name in OTHERS}
    # Whole tiles of weights are for those that do not load them through registers.
    assert [name for name in OTHERS if "_resident" in needs[name]["shared"]] == ["RTX 5090"]


def test_launches_of_real_models_are_programs() -> None:
    """Blocks follow from widths, and must be powers of two; tiny models have widths that are."""
    assert "launches of 15 shapes" in compile_kernels("float16", "--shapes")
