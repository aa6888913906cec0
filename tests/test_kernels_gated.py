"""The product with its gate for many rows computes what its plain-torch reference says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stretto.kernels.gated_matmul import LEAST_ROWS, gated_matmul, gated_matmul_reference, runs_on, takes
from stretto.kernels.launch import gpu_of
from tests.test_kernels import DEVICE, GPU, assert_close, random

# What the interpreter cannot multiply in bfloat16 it does in float16.
DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
SHAPES = [(1, 64, 128), (150, 128, 128), (300, 64, 384)]
SHAPES += [(128 * 9 + 1, 192, 256), (2100, 4096, 1280), (8192, 1024, 3072), (LEAST_ROWS, 4096, 12288)] if GPU else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "ffn"), SHAPES)
def test_gated_matmul(rows: int, width: int, ffn: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = random(rows, width, dtype=dtype), random(2 * ffn, width, dtype=dtype) / width**0.5
    assert_close(gated_matmul(x, weight), gated_matmul_reference(x, weight), 1e-2)


def test_what_it_takes() -> None:
    """Many rows and 16 bits, whole tiles of the weight, and a GPU that it runs on."""
    capable = GPU and runs_on(gpu_of(DEVICE))
    weight = torch.empty(2 * 128, 64, dtype=torch.bfloat16, device=DEVICE)
    assert takes(LEAST_ROWS, weight) is capable
    assert not takes(LEAST_ROWS - 1, weight)
    assert not takes(LEAST_ROWS, weight.float())
    assert not takes(LEAST_ROWS, weight[:-2])
    assert not takes(LEAST_ROWS, weight[:, :-2])
