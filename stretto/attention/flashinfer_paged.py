"""The FlashInfer attention backend: its paged kernels over the Triton backend's cache, for comparison and as a choice.

FlashInfer (Ye et al., 2025) cuts the work of a step on the host, from the host's own knowledge of all lengths, and
sends the cut along. So steps are planned one by one and cannot be captured: this backend runs without CUDA graphs.
Owns FlashInfer's wrappers and workspaces; cache, norm, turn and write are the Triton backend's. Legend: B rows,
T tokens, N query heads, K kv heads, H head dim, P pages, S page size, X pages of all rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.attention.base import AttentionInputs, AttentionShape, IntArray
from stretto.attention.triton_paged import PagedStep, TritonPagedAttention
from stretto.errors import NotSupported

HEAD_DIMS = (64, 128, 256)
_PLAIN_GROUPS = (1, 2, 3, 4, 8)
"""Query heads a kv head for which its decode kernel without matrix units is made."""
_WORKSPACE_BYTES = 128 * 2**20
_PLAN_BYTES = 8 * 2**20
"""What each of its wrappers allocates, on the device and again as pinned memory, for plans."""


def workspace_bytes(overlap_depth: int) -> int:
    """Device memory beside the cache."""
    return _WORKSPACE_BYTES + 2 * wrappers_for(overlap_depth) * _PLAN_BYTES


def wrappers_for(overlap_depth: int) -> int:
    """Plans that must be kept apart: up to depth + 1 steps are in flight while the next one is planned.

    A wrapper sends its plan from its own pinned buffer, which nobody may write before the copy has run.
    """
    return overlap_depth + 2


def require_flashinfer() -> None:
    """Raise NotSupported, saying how to install it, unless FlashInfer can be imported."""
    if importlib.util.find_spec("flashinfer") is None:
        raise NotSupported(
            "attention_backend 'flashinfer' needs the package flashinfer-python, which is not installed: "
            "pip install 'stretto[flashinfer]' (and a CUDA compiler, as it builds kernels at first use)"
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    """Which wrappers serve the step's decode rows and its chunks; None where it has none."""

    decode: Any
    prefill: Any


class FlashInferAttention(TritonPagedAttention):
    """`AttentionBackend` for a GPU; `expect` must tell of each step before `begin`."""

    wants_lengths = True

    def __init__(self, shape: AttentionShape, max_rows: int, overlap_depth: int) -> None:
        """Allocates cache and workspaces and builds the kernels, which takes up to minutes the first time.

        Raises NotSupported if FlashInfer is missing, or has no kernel for these heads or this dtype.
        """
        require_flashinfer()
        if shape.head_dim not in HEAD_DIMS or shape.dtype.itemsize != 2:
            raise NotSupported(
                f"attention_backend 'flashinfer' with heads of {shape.head_dim} in {shape.dtype}: built for heads of "
                f"{', '.join(map(str, HEAD_DIMS))} in bfloat16 and float16; use 'triton'"
            )
        super().__init__(shape, max_rows)
        library: Any = importlib.import_module("flashinfer")
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        groups = shape.num_heads // shape.num_kv_heads
        count = wrappers_for(overlap_depth)
        tensor_cores = groups >= 4 or groups not in _PLAIN_GROUPS
        self._decoders = tuple(
            library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
            for _ in range(count)
        )
        self._prefillers = tuple(
            library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2") for _ in range(count)
        )
        self._turn = 0
        self._context_B: IntArray = np.ones(1, np.int64)
        self._num_new_B: IntArray = np.ones(1, np.int64)
        self._planned = _Planned(None, None)
        # Plans of one row build the kernels.
        page = torch.zeros(1, dtype=torch.int32, device=shape.device)
        self._plan_decode(self._decoders[0], page, self._context_B)
        self._plan_prefill(self._prefillers[0], page, self._context_B, self._num_new_B)

    def begin_step(self, inputs: AttentionInputs) -> None:
        """See `AttentionBackend`. hot path"""
        self.expect(inputs.num_new_B_host, inputs.context_B_host)
        super().begin_step(inputs)

    def expect(self, num_new_B: IntArray, context_B: IntArray) -> None:
        """What the host knows of the next step's rows: new tokens, and tokens with those. hot path"""
        self._num_new_B, self._context_B = num_new_B, context_B

    def begin(self, step: PagedStep) -> None:
        """Plan the step; nothing of the device is waited for. hot path

        FlashInfer uploads its plan from pinned memory, and a few numbers a row from pageable memory.
        """
        super().begin(step)
        rows, decodes = step.num_rows, step.num_decode
        turn, self._turn = self._turn, (self._turn + 1) % len(self._decoders)
        decode = prefill = None
        if decodes:
            decode = self._decoders[turn]
            self._plan_decode(decode, self._pages(step, 0, decodes), self._context_B[:decodes])
        if decodes < rows:
            prefill = self._prefillers[turn]
            pages_X = self._pages(step, decodes, rows)
            self._plan_prefill(prefill, pages_X, self._context_B[decodes:rows], self._num_new_B[decodes:rows])
        self._planned = _Planned(decode, prefill)

    def _attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """The new keys and values are in the cache already."""
        step, planned = self._current(), self._planned
        cache = (self._keys[layer], self._values[layer])
        decodes = step.num_decode
        # Its kernels take contiguous queries; these are a view into a fused projection.
        q_TNH = q_TNH.contiguous()
        out_TNH = torch.empty_like(q_TNH)
        if planned.decode is not None:
            planned.decode.run(q_TNH[:decodes], cache, out=out_TNH[:decodes])
        if planned.prefill is not None:
            planned.prefill.run(q_TNH[decodes:], cache, out=out_TNH[decodes:])
        return out_TNH

    def _pages(self, step: PagedStep, first: int, last: int) -> Tensor:
        """int32 [X]: the pages of rows [first, last), row by row."""
        count_B = -(-self._context_B[first:last] // self.shape.page_size)
        total = int(count_B.sum())
        context_B = step.context_B[first:last]
        count_on_device_B = torch.div(
            context_B + (self.shape.page_size - 1), self.shape.page_size, rounding_mode="floor"
        )
        end_B = count_on_device_B.cumsum(0)
        row_X = torch.repeat_interleave(self._rows[: last - first], count_on_device_B, output_size=total)
        index_X = torch.arange(total, device=row_X.device) - (end_B - count_on_device_B)[row_X]
        return step.page_table_RM[step.slot_B[first:last][row_X], index_X].to(torch.int32)

    def _layout(self, context_B: IntArray) -> tuple[Tensor, Tensor]:
        """(first page of each row and their number, tokens of each row's last page), int32 on the host."""
        size = self.shape.page_size
        first_B1 = np.zeros(len(context_B) + 1, np.int32)
        np.cumsum(-(-context_B // size), out=first_B1[1:])
        return torch.from_numpy(first_B1), torch.from_numpy(((context_B - 1) % size + 1).astype(np.int32))

    def _plan_decode(self, wrapper: Any, pages_X: Tensor, context_B: IntArray) -> None:
        shape = self.shape
        first_B1, last_B = self._layout(context_B)
        wrapper.plan(
            first_B1,
            pages_X,
            last_B,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )

    def _plan_prefill(self, wrapper: Any, pages_X: Tensor, context_B: IntArray, num_new_B: IntArray) -> None:
        shape = self.shape
        first_B1, last_B = self._layout(context_B)
        query_B1 = np.zeros(len(context_B) + 1, np.int32)
        np.cumsum(num_new_B, out=query_B1[1:])
        wrapper.plan(
            torch.from_numpy(query_B1),
            first_B1,
            pages_X,
            last_B,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
