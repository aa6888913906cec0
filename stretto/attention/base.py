"""The attention interface: what a backend is told about a step, and what it must do with it.

Owns the shapes; a backend owns the layout of the KV cache. Legend: T tokens of the step, B rows (requests) of the
step, N query heads, K kv heads, H head dim, M pages per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from stretto.models.config import ModelConfig

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention backend needs to know to allocate its cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    """Pages of the pool, page 0 (padding) included."""
    dtype: torch.dtype
    """Element type of keys and values in the cache."""
    device: torch.device
    scale: float
    """Factor on q.k before the softmax."""

    @classmethod
    def of(
        cls, model: ModelConfig, *, page_size: int, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionShape:
        """That of a model; of a split one, `model` is the rank's."""
        return cls(
            model.num_layers,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            page_size,
            num_pages,
            dtype,
            device,
            model.attention_scale,
        )


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step as attention sees it. Device tensors are owned by the engine stream and valid during the step.

    The `*_host` arrays are exact host copies made when the step was scheduled; reading them costs no sync.
    """

    page_table_BM: torch.Tensor
    """int64 [B, M]: pages of each row in order; entries past the row's last page are 0."""
    kv_location_T: torch.Tensor
    """int64 [T]: page * page_size + offset at which each new token's key and value are written."""
    query_start_B1: torch.Tensor
    """int64 [B + 1]: row b's new tokens are [query_start[b], query_start[b + 1]) of T."""
    context_B: torch.Tensor
    """int64 [B]: tokens of each row whose KV is valid once this step's are written (new ones included)."""
    num_new_B_host: IntArray
    """int64 [B]: new tokens of each row (decode: 1)."""
    context_B_host: IntArray
    """int64 [B]: host copy of `context_B`."""
    page_table_BM_host: IntArray | None
    """int64 [B, M]: host copy of `page_table_BM`, for backends with `wants_host_pages`."""


class AttentionBackend(Protocol):
    """Owns the KV cache tensors of all layers. All methods run as work on the engine stream."""

    wants_host_pages: bool
    """Whether steps must carry a host copy of the rows' page tables (costs the host O(rows x pages) per step)."""

    def begin_step(self, inputs: AttentionInputs) -> None:
        """Prepare what all layers of this step share (gather indices, masks). Called once before the forward."""

    def attend(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        """Write the new keys and values into their pages, then attend causally over each row's context.

        Row b's j-th new token sees the first `context[b] - num_new[b] + j + 1` tokens of the row. Returns o_TNH in
        q's dtype; the tensor may be a workspace that the next call overwrites.
        """

    def poison_page(self, page: int) -> None:
        """Fill a released page with NaN in every layer (tests and STRETTO_CHECK only)."""

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the KV cache."""
