"""The plain-torch attention backend: the reference for every other backend, and the fast path on a CPU.

Owns the KV cache and the write of new keys and values; decode rows go to `paged_decode.py`, prompt chunks to
`paged_prefill.py`. Legend: T tokens of the step, B rows, N query heads, K kv heads, H head dim, P pages, S page size,
L layers, M pages of the longest row.

Cache layout: [L, 2 (keys, values), P, K, S, H]. One head's positions within a page are adjacent, so all pages of a
layer are one batch of small [S, H] matrices that matrix products can read where they lie.

Every position of a page in use is finite, written or not: a page that a step begins and does not fill is zeroed
first. So masked positions need no second mask on the values (0 x NaN is NaN, and stale memory may hold anything).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from stretto.attention.base import AttentionInputs, AttentionShape, IntArray
from stretto.attention.paged_decode import PagedDecode
from stretto.attention.paged_prefill import PagedPrefill
from stretto.attention.workspace import Workspace
from stretto.errors import NotSupported

CPU_PAGE_SIZE = 64
"""Recommended tokens per page on a CPU: long enough for efficient matrix products, short enough to waste little."""


class PagedTorchAttention:
    """`AttentionBackend` in plain torch, for any device; fast on a CPU."""

    wants_host_pages = True

    def __init__(self, shape: AttentionShape) -> None:
        """Allocates the cache, zeroed; on a CPU it takes memory as it is used. Raises NotSupported if the heads cannot
        be grouped."""
        if shape.num_heads % shape.num_kv_heads:
            raise NotSupported(
                f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} kv heads: not a multiple of them"
            )
        self.shape = shape
        sizes = (shape.num_layers, 2, shape.num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self._cache_L2PKSH = _zeros(sizes, shape.dtype, shape.device)
        self._positions_LXH = self._cache_L2PKSH.view(shape.num_layers, -1, shape.head_dim).unbind()
        workspace = Workspace(shape.device)
        self._decode = PagedDecode(shape, self._cache_L2PKSH, workspace)
        self._prefill = PagedPrefill(shape, self._cache_L2PKSH, workspace)
        self._workspace = workspace
        self._write_index_X = torch.empty(0, dtype=torch.int64)

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the KV cache."""
        return self._cache_L2PKSH.nbytes

    def poison_page(self, page: int) -> None:
        """Fill a released page with NaN in every layer."""
        self._cache_L2PKSH[:, :, page] = float("nan")

    def begin_step(self, inputs: AttentionInputs) -> None:
        """Prepare what all layers share: where to write, which pages to read. hot path"""
        if inputs.page_table_BM_host is None:
            raise ValueError("this backend chooses its products by the pages on the host: page_table_BM_host is needed")
        num_new_B, context_B = inputs.num_new_B_host, inputs.context_B_host
        pages_BM = inputs.page_table_BM_host
        self._zero_begun_pages(num_new_B, context_B, pages_BM)
        self._write_index_X = self._write_index(inputs.kv_location_T)
        start_B = np.cumsum(num_new_B) - num_new_B
        decode_rows, prefill_rows = np.flatnonzero(num_new_B == 1), np.flatnonzero(num_new_B > 1)
        self._decode.begin_step(start_B[decode_rows], context_B[decode_rows], pages_BM[decode_rows])
        self._prefill.begin_step(
            start_B[prefill_rows], num_new_B[prefill_rows], context_B[prefill_rows], pages_BM[prefill_rows]
        )

    def attend(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend`. Tokens beyond the last row's (padding) get zeros. hot path"""
        self._write(layer, k_TKH, v_TKH)
        num_tokens = q_TNH.shape[0]
        if self._decode.num_rows == num_tokens:
            return self._decode.attend(layer, q_TNH).to(q_TNH.dtype)
        o_TNH = self._workspace.take("output", tuple(q_TNH.shape), q_TNH.dtype)
        if self._decode.num_rows + self._prefill.num_tokens < num_tokens:
            o_TNH.zero_()
        if self._decode.num_rows:
            o_TNH.index_copy_(0, self._decode.token_B, self._decode.attend(layer, q_TNH).to(q_TNH.dtype))
        self._prefill.attend(layer, q_TNH, k_TKH, v_TKH, o_TNH)
        return o_TNH

    def _zero_begun_pages(self, num_new_B: IntArray, context_B: IntArray, pages_BM: IntArray) -> None:
        """Zero each row's last page if this step begins it and does not fill it (see the module's invariant)."""
        begin_B = context_B // self.shape.page_size * self.shape.page_size
        rows = np.flatnonzero((begin_B < context_B) & (begin_B >= context_B - num_new_B))
        if rows.size:
            pages = torch.from_numpy(pages_BM[rows, begin_B[rows] // self.shape.page_size].astype(np.int64))
            self._cache_L2PKSH.index_fill_(2, pages.to(self.shape.device), 0)

    def _write_index(self, location_T: torch.Tensor) -> torch.Tensor:
        """Rows of the cache, seen as [2 P K S, H], of each token's keys, then values: order [T, 2, K] flattened."""
        shape = self.shape
        page_T = torch.div(location_T, shape.page_size, rounding_mode="floor")
        # (page * K + head) * S + offset, with page * S + offset = location
        first_T = location_T + page_T * ((shape.num_kv_heads - 1) * shape.page_size)
        head_stride, half = shape.page_size, shape.num_pages * shape.num_kv_heads * shape.page_size
        step_2K = torch.arange(0, shape.num_kv_heads * head_stride, head_stride, device=location_T.device)
        step_2K = torch.cat((step_2K, step_2K + half))
        return (first_T.unsqueeze(1) + step_2K).view(-1)

    def _write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        num_tokens, kv_heads, head_dim = k_TKH.shape
        together = (
            k_TKH.stride() == v_TKH.stride()
            and k_TKH.stride(1) == head_dim
            and v_TKH.data_ptr() - k_TKH.data_ptr() == kv_heads * head_dim * k_TKH.element_size()
            and k_TKH.untyped_storage().data_ptr() == v_TKH.untyped_storage().data_ptr()
        )
        if together:  # as they are in a fused projection: one copy instead of two
            kv = k_TKH.as_strided((num_tokens, 2 * kv_heads, head_dim), k_TKH.stride())
        else:
            kv = torch.cat((k_TKH, v_TKH), dim=1)
        rows = kv.reshape(-1, head_dim).to(self.shape.dtype)
        self._positions_LXH[layer].index_copy_(0, self._write_index_X, rows)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, which on a CPU writes them all: a second for a cache of which most requests use little.

    numpy takes memory that the system zeroes when it is first touched.
    """
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(sizes) * dtype.itemsize, np.uint8)).view(dtype).view(sizes)
