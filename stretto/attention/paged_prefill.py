"""Attention of prompt chunks: rows with several new tokens, each over its own context, cached prefix included.

Reads the KV cache, owns none of it. Legend: T tokens of the step, t tokens of a block of queries, N query heads,
K kv heads, G = N / K, H head dim, P pages, S page size, C context of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stretto.attention.base import AttentionShape, IntArray
from stretto.attention.workspace import Workspace

QUERY_BLOCK = 256
"""Queries of a chunk that share one mask, so that masks stay small and little is computed only to be masked."""


@dataclass(frozen=True, slots=True)
class _Row:
    begin: int
    end: int
    """The row's new tokens are [begin, end) of T."""
    context: int
    page_index_KM: torch.Tensor | None
    """Rows of the cache, seen as [P K, S H], that hold the context; None: it is exactly the new tokens."""


class PagedPrefill:
    """Runs the prefill rows of a step one after another; each keeps all threads busy."""

    def __init__(self, shape: AttentionShape, cache_L2PKSH: torch.Tensor, workspace: Workspace) -> None:
        self._shape = shape
        pages = cache_L2PKSH.view(shape.num_layers, 2, shape.num_pages * shape.num_kv_heads, -1)
        self._keys_LXY, self._values_LXY = pages[:, 0].unbind(), pages[:, 1].unbind()
        self._workspace = workspace
        self._rows: list[_Row] = []
        self._mask = torch.empty(0, 0)
        self.num_tokens = 0

    def begin_step(self, start_B: IntArray, num_new_B: IntArray, context_B: IntArray, pages_BM: IntArray) -> None:
        """Rows with new tokens [start, start + num_new) of T, all on the host. hot path"""
        self.num_tokens = int(num_new_B.sum())
        self._rows = []
        heads = np.arange(self._shape.num_kv_heads)[:, None]
        for start, num_new, context, pages_M in zip(
            start_B.tolist(), num_new_B.tolist(), context_B.tolist(), pages_BM, strict=True
        ):
            index = None
            if context > num_new:
                used = pages_M[: -(-context // self._shape.page_size)]
                index = torch.from_numpy(used * self._shape.num_kv_heads + heads).to(self._shape.device)
            self._rows.append(_Row(start, start + num_new, context, index))

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, o_TNH: torch.Tensor
    ) -> None:
        """Fill the rows' tokens of `o_TNH`. The new keys and values are in the cache already. hot path"""
        kv_heads, groups = self._shape.num_kv_heads, self._shape.num_heads // self._shape.num_kv_heads
        dtype, split = self._shape.dtype, (-1, kv_heads, groups, self._shape.head_dim)
        for row in self._rows:
            q_KGtH = q_TNH[row.begin : row.end].to(dtype).view(split).permute(1, 2, 0, 3)
            if row.page_index_KM is None:
                k_KCH = k_TKH[row.begin : row.end].to(dtype).transpose(0, 1)
                v_KCH = v_TKH[row.begin : row.end].to(dtype).transpose(0, 1)
            else:
                k_KCH = self._gather(self._keys_LXY[layer], row.page_index_KM, row.context, "prefill keys")
                v_KCH = self._gather(self._values_LXY[layer], row.page_index_KM, row.context, "prefill values")
            o_tKGH = o_TNH[row.begin : row.end].view(split)
            self._attend_row(q_KGtH, k_KCH, v_KCH, o_tKGH)

    def _gather(self, pages: torch.Tensor, index_KM: torch.Tensor, context: int, name: str) -> torch.Tensor:
        kv_heads = index_KM.shape[0]
        out = self._workspace.take(name, (index_KM.numel(), pages.shape[1]), pages.dtype)
        torch.index_select(pages, 0, index_KM.view(-1), out=out)
        return out.view(kv_heads, -1, self._shape.head_dim)[:, :context]

    def _attend_row(self, q_KGtH: torch.Tensor, k_KCH: torch.Tensor, v_KCH: torch.Tensor, o_tKGH: torch.Tensor) -> None:
        groups, num_new, context = q_KGtH.shape[1], q_KGtH.shape[2], k_KCH.shape[1]
        # Kv heads as the batch and their query heads as its heads: sharing is a stride of 0, not a copy.
        k_KGCH = k_KCH.unsqueeze(1).expand(-1, groups, -1, -1)
        v_KGCH = v_KCH.unsqueeze(1).expand(-1, groups, -1, -1)
        scale = self._shape.scale
        if num_new == context:
            o_KGtH = torch.nn.functional.scaled_dot_product_attention(
                q_KGtH, k_KGCH, v_KGCH, is_causal=True, scale=scale
            )
            o_tKGH.copy_(o_KGtH.permute(2, 0, 1, 3))
            o_tKGH.add_(_not_numbers(q_KGtH, k_KCH))
            return
        for begin in range(0, num_new, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, num_new)
            seen = context - num_new + end
            o_KGtH = torch.nn.functional.scaled_dot_product_attention(
                q_KGtH[:, :, begin:end],
                k_KGCH[:, :, :seen],
                v_KGCH[:, :, :seen],
                attn_mask=self._causal_mask(end - begin, seen),
                scale=scale,
            )
            o_tKGH[begin:end].copy_(o_KGtH.permute(2, 0, 1, 3))
        o_tKGH.add_(_not_numbers(q_KGtH, k_KCH))

    def _causal_mask(self, num_queries: int, seen: int) -> torch.Tensor:
        """[t, seen], 0 or -inf: the last query sees everything, each one before it one key less.

        All such masks are the lower right corner of one. The zeros in front of its triangle are what grows.
        """
        if self._mask.shape[1] < seen:
            width = max(QUERY_BLOCK, 2 * seen)
            mask = torch.zeros(QUERY_BLOCK, width, dtype=self._shape.dtype, device=self._shape.device)
            block = torch.full((QUERY_BLOCK, QUERY_BLOCK), float("-inf"), dtype=mask.dtype, device=mask.device)
            mask[:, -QUERY_BLOCK:] = block.triu(1)
            self._mask = mask
        return self._mask[QUERY_BLOCK - num_queries :, self._mask.shape[1] - seen :]


def _not_numbers(q_KGtH: torch.Tensor, k_KCH: torch.Tensor) -> torch.Tensor:
    """What to add to the output, [t, K, G, 1]: NaN where a query, or a key that it sees, holds no number; else 0.

    torch's attention gives 0 to a query whose scores are all NaN, and the fault would pass for an answer.
    """
    q_KGt = q_KGtH.sum(-1).mul_(0)
    k_KC = k_KCH.sum(-1).mul_(0).cumsum(-1)
    return q_KGt.add_(k_KC[:, None, -q_KGt.shape[-1] :]).permute(2, 0, 1).unsqueeze(-1)
