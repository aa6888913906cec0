"""Turns the quantised blocks of GGUF tensors into float32, bit-equal to ggml's reference arithmetic.

Each kernel gets B blocks as raw bytes [B, bytes per block] and fills float32 values [B, elements per block]. Layouts
after ggml-quants.h of the ggml project. The order of float operations is part of the format: one rounding more or less
and the values are no longer those that every other program computes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stretto.errors import NotSupported
from stretto.models.gguf_file import GGUFTensor

# Values converted at a time: temporaries of this many floats stay in the second-level cache.
_CHUNK_ELEMENTS = 1 << 17


def dequantize(tensor: GGUFTensor) -> Tensor:
    """The tensor's values: float32, shape `tensor.shape`, memory of its own. Blocks on disk reads.

    Raises NotSupported for a type that has no kernel here.
    """
    if tensor.type_name not in _KERNELS:
        known = ", ".join(_KERNELS)
        raise NotSupported(f"{tensor.file}: tensor {tensor.name!r} has type {tensor.type_name}; supported are {known}")
    block, block_bytes, kernel = _KERNELS[tensor.type_name]
    blocks = math.prod(tensor.shape) // block
    out = torch.empty(tensor.shape, dtype=torch.float32)
    raw_BX, out_BE = torch.from_numpy(tensor.data).view(blocks, block_bytes), out.view(blocks, block)
    step = max(1, _CHUNK_ELEMENTS // block)
    for begin in range(0, blocks, step):
        kernel(raw_BX[begin : begin + step], out_BE[begin : begin + step])
    return out


def _half(raw_BX: Tensor, byte: int) -> Tensor:
    """The float16 at this byte of each block: float32 [B, 1]. All block sizes and offsets are even."""
    return raw_BX.view(torch.float16)[:, byte // 2, None].float()


def _nibbles(raw_BX: Tensor, group: int) -> Tensor:
    """Bytes [B, n] in groups of `group`: per group first all low, then all high halves. uint8 [B, 2 * n]."""
    groups = raw_BX.reshape(raw_BX.shape[0], -1, 1, group)
    return torch.cat((groups & 15, groups >> 4), dim=2).flatten(1)


def _fields(raw_BX: Tensor, group: int, bits: int) -> Tensor:
    """Bytes [B, n] in groups of `group`: per group the lowest `bits` of all, then the next. uint8 [B, n * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((raw_BX.reshape(raw_BX.shape[0], -1, 1, group) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _fifth_bits(raw_BX: Tensor) -> Tensor:
    """Four bytes with one bit per element, lowest first, each moved to value 16: uint8 [B, 32]."""
    return _fields(raw_BX.reshape(-1, 1), 1, 1).view(-1, 32) << 4


def _f32(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(raw_BX.view(torch.float32))


def _f16(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(raw_BX.view(torch.float16))


def _bf16(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(raw_BX.view(torch.bfloat16))


def _q4_0(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(_nibbles(raw_BX[:, 2:], 16)).sub_(8).mul_(_half(raw_BX, 0))


def _q4_1(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(_nibbles(raw_BX[:, 4:], 16)).mul_(_half(raw_BX, 0)).add_(_half(raw_BX, 2))


def _q5_0(raw_BX: Tensor, out_BE: Tensor) -> None:
    values = _nibbles(raw_BX[:, 6:], 16) | _fifth_bits(raw_BX[:, 2:6])
    out_BE.copy_(values).sub_(16).mul_(_half(raw_BX, 0))


def _q5_1(raw_BX: Tensor, out_BE: Tensor) -> None:
    values = _nibbles(raw_BX[:, 8:], 16) | _fifth_bits(raw_BX[:, 4:8])
    out_BE.copy_(values).mul_(_half(raw_BX, 0)).add_(_half(raw_BX, 2))


def _q8_0(raw_BX: Tensor, out_BE: Tensor) -> None:
    out_BE.copy_(raw_BX.view(torch.int8)[:, 2:]).mul_(_half(raw_BX, 0))


def _q2_k(raw_BX: Tensor, out_BE: Tensor) -> None:
    scales = raw_BX[:, :16]
    scale = (_half(raw_BX, 80) * (scales & 15)).unsqueeze(2)
    minimum = (_half(raw_BX, 82) * (scales >> 4)).unsqueeze(2)
    out_BE.copy_(_fields(raw_BX[:, 16:80], 32, 2))
    out_BE.view(-1, 16, 16).mul_(scale).sub_(minimum)


def _q3_k(raw_BX: Tensor, out_BE: Tensor) -> None:
    # 16 scales of 6 bits: the low four in eight bytes of nibbles, the high two in four bytes.
    scales = _nibbles(raw_BX[:, 96:104], 8) | (_fields(raw_BX[:, 104:108], 4, 2) << 4)
    scale = (_half(raw_BX, 108) * (scales.float() - 32)).unsqueeze(2)
    # The third bit is stored inverted: set means that nothing is subtracted.
    out_BE.copy_(_fields(raw_BX[:, 32:96], 32, 2)).add_(_fields(raw_BX[:, :32], 32, 1) << 2).sub_(4)
    out_BE.view(-1, 16, 16).mul_(scale)


def _six_bit_pairs(raw_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes that pack eight (scale, minimum) pairs of six bits: two float32 [B, 8]."""
    first, second, rest = raw_BX[:, 0:4], raw_BX[:, 4:8], raw_BX[:, 8:12]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_k(raw_BX: Tensor, out_BE: Tensor) -> None:
    scales, minima = _six_bit_pairs(raw_BX[:, 4:16])
    out_BE.copy_(_nibbles(raw_BX[:, 16:], 32))
    _scale_and_shift(out_BE, raw_BX, scales, minima)


def _q5_k(raw_BX: Tensor, out_BE: Tensor) -> None:
    scales, minima = _six_bit_pairs(raw_BX[:, 4:16])
    out_BE.copy_(_nibbles(raw_BX[:, 48:], 32) | (_fields(raw_BX[:, 16:48], 32, 1) << 4))
    _scale_and_shift(out_BE, raw_BX, scales, minima)


def _scale_and_shift(out_BE: Tensor, raw_BX: Tensor, scales: Tensor, minima: Tensor) -> None:
    scale, minimum = _half(raw_BX, 0) * scales, _half(raw_BX, 2) * minima
    out_BE.view(-1, 8, 32).mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2))


def _q6_k(raw_BX: Tensor, out_BE: Tensor) -> None:
    scale = (_half(raw_BX, 208) * raw_BX[:, 192:208].view(torch.int8)).unsqueeze(2)
    out_BE.copy_(_nibbles(raw_BX[:, :128], 64) | (_fields(raw_BX[:, 128:192], 32, 2) << 4)).sub_(32)
    out_BE.view(-1, 16, 16).mul_(scale)


# ggml type -> (elements of one block, bytes of one block, kernel).
_KERNELS: dict[str, tuple[int, int, Callable[[Tensor, Tensor], None]]] = {
    "F32": (1, 4, _f32),
    "F16": (1, 2, _f16),
    "BF16": (1, 2, _bf16),
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
