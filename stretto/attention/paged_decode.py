"""Decode attention over pages without gathering them: each page in use is one matrix of a batched product.

Reads the KV cache, owns none of it. `page_work.py` decides which products are made; this file makes them.
Legend: B decode rows, W work items (pages of rows, holes of the runs included), N query heads, K kv heads,
G = N / K, H head dim, P pages, S page size, M pages of the longest row, C = M * S.

Per layer: scores of every work item, a softmax over each row's items brought together, the weighted values of every
item, and their sum per row. Only scores and partial results are moved, a few percent of the bytes of keys and values.
A row's numbers come from products and sums of its own pages alone, so they do not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto.attention.base import AttentionShape, IntArray
from stretto.attention.page_work import PageWork, plan_page_work
from stretto.attention.workspace import Workspace


class _Step:
    """Index tensors and workspace views that all layers of a step share."""

    def __init__(self, shape: AttentionShape, work: PageWork, token_B: IntArray, workspace: Workspace) -> None:
        heads, kv_heads, size, dim = shape.num_heads, shape.num_kv_heads, shape.page_size, shape.head_dim
        rows, most, items = len(work.num_pages_B), work.slot_BM.shape[1], work.num_slots
        device, dtype = shape.device, shape.dtype
        self.token_B_host = token_B
        self.work = work
        self.width = heads * dim

        def index(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1)).to(device)

        token_W = np.full(items, token_B[0], dtype=np.int64)
        token_W[work.slot_X] = token_B[work.row_X]
        head_N = np.arange(heads)
        self.token_B = index(token_B)
        self.token_W = index(token_W)
        # One page a row, in order: scores and results are already where the row wants them.
        self.in_place = most == 1 and items == rows and bool((work.slot_BM[:, 0] == np.arange(rows)).all())
        self.score_of_place = index(work.slot_BM[:, None, :] * heads + head_N[:, None])
        place_WN = np.zeros((items, heads), dtype=np.int64)
        place_WN[work.slot_X] = (work.row_X[:, None] * heads + head_N) * most + work.page_index_X[:, None]
        self.place_of_score = index(place_WN)
        item_BM = work.slot_BM.copy()
        item_BM[np.arange(most) >= work.num_pages_B[:, None]] = items  # the zeros after the last item
        self.item_of_place = index(item_BM)
        self.gathered_pages = index(work.gathered_pages)

        take = workspace.take
        self.q_WX = take("decode q", (items, heads * dim), dtype)
        self.q = self.q_WX.view(items * kv_heads, heads // kv_heads, dim)
        self.scores = take("decode scores", (items * kv_heads, heads // kv_heads, size), dtype)
        self.scores_XS = self.scores.view(items * heads, size)
        self.placed_XS = take("decode placed", (rows * heads * most, size), dtype)
        self.placed_BNC = self.placed_XS.view(rows, heads, most * size)
        self.weights_BNC = take("decode weights", (rows, heads, most * size), dtype)
        self.weights_XS = self.weights_BNC.view(rows * heads * most, size)
        self.item_weights_XS = take("decode item weights", (items * heads, size), dtype)
        self.item_weights = self.item_weights_XS.view_as(self.scores)
        self.partial_WX = take("decode partial", (items + 1, heads * dim), dtype)
        self.partial_WX[items] = 0
        self.partial = self.partial_WX[:items].view(items * kv_heads, heads // kv_heads, dim)
        self.placed_partial_BMX = take("decode placed partial", (rows, most, heads * dim), dtype)
        if self.in_place:
            self.placed_XS, self.placed_BNC = self.scores_XS, self.scores_XS.view(rows, heads, size)
            self.item_weights_XS, self.item_weights = self.weights_XS, self.weights_XS.view_as(self.scores)
        gathered = (len(work.gathered_pages), kv_heads * size * dim)
        self.gathered_keys = take("decode keys", gathered, dtype)
        self.gathered_values = take("decode values", gathered, dtype)
        # Slices that every layer takes: (first kv head's page, kv heads' pages, q, scores, weights, partial results).
        self.run_parts: list[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        end = 0
        for page, count in work.runs:
            part = slice(end, end + count * kv_heads)
            tensors = (self.q[part], self.scores[part], self.item_weights[part], self.partial[part])
            self.run_parts.append((page * kv_heads, count * kv_heads, *tensors))
            end = part.stop
        self.gathered_part = (self.q[end:], self.scores[end:], self.item_weights[end:], self.partial[end:])
        self.has_gathered = work.num_slots * kv_heads > end
        self.gathered_keys_transposed = self.gathered_keys.view(-1, size, dim).transpose(-1, -2)
        self.gathered_values_view = self.gathered_values.view(-1, size, dim)
        self.placed_partial_XX = self.placed_partial_BMX.view(-1, self.width)
        self.mask_B1C = take("decode mask", (rows, 1, most * size), dtype)
        self._position_C = np.arange(most * size)
        self._context_B: IntArray | None = None

    def set_context(self, context_B: IntArray) -> None:
        """Mask what lies beyond each row's context."""
        if self._context_B is not None and np.array_equal(self._context_B + 1, context_B):
            last = np.arange(len(context_B)) * len(self._position_C) + context_B - 1
            self.mask_B1C.view(-1).index_fill_(0, torch.from_numpy(last).to(self.mask_B1C.device), 0)
        else:
            mask_BC = np.where(self._position_C < context_B[:, None], np.float32(0), np.float32("-inf"))
            self.mask_B1C.copy_(torch.from_numpy(mask_BC).unsqueeze(1))
        self._context_B = context_B


class PagedDecode:
    """Attention of the rows with one new token."""

    def __init__(self, shape: AttentionShape, cache_L2PKSH: torch.Tensor, workspace: Workspace) -> None:
        self._shape = shape
        layers, kv_heads = shape.num_layers, shape.num_kv_heads
        batch = cache_L2PKSH.view(layers, 2, shape.num_pages * kv_heads, shape.page_size, shape.head_dim)
        self._keys_transposed = batch[:, 0].transpose(-1, -2).unbind()
        self._values = batch[:, 1].unbind()
        pages = cache_L2PKSH.view(layers, 2, shape.num_pages, -1)
        self._key_pages, self._value_pages = pages[:, 0].unbind(), pages[:, 1].unbind()
        self._page_bytes = cache_L2PKSH[0, :, 0].numel() * cache_L2PKSH.element_size()
        self._workspace = workspace
        self._step: _Step | None = None
        self.num_rows = 0

    @property
    def token_B(self) -> torch.Tensor:
        """int64 [B]: each row's token among the tokens of the step."""
        assert self._step is not None
        return self._step.token_B

    def begin_step(self, token_B: IntArray, context_B: IntArray, pages_BM: IntArray) -> None:
        """Rows whose single new token is `token` of the step and sees `context` tokens; all on the host. hot path"""
        self.num_rows = len(token_B)
        if not self.num_rows:
            return
        num_pages_B = -(-context_B // self._shape.page_size)
        step = self._step
        if (
            step is None
            or not step.work.covers(num_pages_B, pages_BM)
            or not np.array_equal(step.token_B_host, token_B)
        ):
            work = plan_page_work(num_pages_B, pages_BM, self._page_bytes)
            step = self._step = _Step(self._shape, work, token_B, self._workspace)
        step.set_context(context_B)

    def attend(self, layer: int, q_TNH: torch.Tensor) -> torch.Tensor:
        """o_BNH in the cache's dtype. The new keys and values are in the cache already. hot path"""
        step, shape = self._step, self._shape
        assert step is not None
        torch.index_select(q_TNH.to(shape.dtype).flatten(1), 0, step.token_W, out=step.q_WX)
        keys_transposed, values = self._keys_transposed[layer], self._values[layer]
        for first, count, q, scores, _, _ in step.run_parts:
            keys = keys_transposed.narrow(0, first, count)
            torch.baddbmm(scores, q, keys, beta=0, alpha=shape.scale, out=scores)
        if step.has_gathered:
            torch.index_select(self._key_pages[layer], 0, step.gathered_pages, out=step.gathered_keys)
            q, scores, _, _ = step.gathered_part
            torch.baddbmm(scores, q, step.gathered_keys_transposed, beta=0, alpha=shape.scale, out=scores)

        if not step.in_place:
            torch.index_select(step.scores_XS, 0, step.score_of_place, out=step.placed_XS)
        torch.softmax(step.placed_BNC.add_(step.mask_B1C), -1, out=step.weights_BNC)
        if not step.in_place:
            torch.index_select(step.weights_XS, 0, step.place_of_score, out=step.item_weights_XS)

        for first, count, _, _, weights, partial in step.run_parts:
            torch.bmm(weights, values.narrow(0, first, count), out=partial)
        if step.has_gathered:
            torch.index_select(self._value_pages[layer], 0, step.gathered_pages, out=step.gathered_values)
            _, _, weights, partial = step.gathered_part
            torch.bmm(weights, step.gathered_values_view, out=partial)
        if step.in_place:
            return step.partial_WX[: self.num_rows].view(self.num_rows, shape.num_heads, shape.head_dim)
        # Not `embedding_bag`, which is one operation: FBGEMM's kernel halves the speed of the product that follows it.
        torch.index_select(step.partial_WX, 0, step.item_of_place, out=step.placed_partial_XX)
        o_BX = step.placed_partial_BMX.sum(1)
        return o_BX.view(self.num_rows, shape.num_heads, shape.head_dim)
