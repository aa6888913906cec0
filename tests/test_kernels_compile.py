"""Every kernel compiles for a Hopper GPU, on any machine; the interpreter accepts more than the compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles(dtype: str) -> None:
    printed = compile_kernels(dtype)
    assert "_decode_attention" in printed
    # What exceeds 1 KB, the driver sets aside for every thread that a GPU can run: 10 KB are 2.3 GiB of an H200.
    stacks = json.loads(printed.rpartition("stack:")[2])
    assert len(stacks) > 20
    assert {name: size for name, size in stacks.items() if size > 1024} == {}


def test_launches_of_real_models_are_programs() -> None:
    """Blocks follow from widths, and must be powers of two; tiny models have widths that are."""
    assert "launches of 15 shapes" in compile_kernels("float16", "--shapes")
