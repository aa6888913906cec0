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
from stretto.layers.scripting import compiled


class _Step:
    """Index tensors and workspace views that all layers of a step share."""

    def __init__(self, shape: AttentionShape, work: PageWork, token_B: IntArray, workspace: Workspace) -> None:
        heads, kv_heads, size, dim = shape.num_heads, shape.num_kv_heads, shape.page_size, shape.head_dim
        rows, most, items = len(work.num_pages_B), work.slot_BM.shape[1], work.num_slots
        device, dtype = shape.device, shape.dtype
        self.token_B_host = token_B
        self.work = work

        def index(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1)).to(device)

        token_W = np.full(items, token_B[0], dtype=np.int64)
        token_W[work.slot_X] = token_B[work.row_X]
        head_N = np.arange(heads)
        self.token_B = index(token_B)
        # One page a row, in order: scores and results are already where the row wants them.
        in_place = most == 1 and items == rows and bool((work.slot_BM[:, 0] == np.arange(rows)).all())
        place_WN = np.zeros((items, heads), dtype=np.int64)
        place_WN[work.slot_X] = (work.row_X[:, None] * heads + head_N) * most + work.page_index_X[:, None]
        item_BM = work.slot_BM.copy()
        item_BM[np.arange(most) >= work.num_pages_B[:, None]] = items  # the zeros after the last item

        take = workspace.take
        partial_WX = take("decode partial", (items + 1, heads * dim), dtype)
        partial_WX[items] = 0
        scores = take("decode scores", (items * kv_heads, heads // kv_heads, size), dtype)
        weights_BNC = take("decode weights", (rows, heads, most * size), dtype)
        if in_place:
            placed_BNC, item_weights = scores.view(weights_BNC.shape), weights_BNC.view(scores.shape)
        else:
            placed_BNC = take("decode placed", (rows, heads, most * size), dtype)
            item_weights = take("decode item weights", (items * kv_heads, heads // kv_heads, size), dtype)
        gathered = (len(work.gathered_pages), kv_heads * size * dim)
        self.mask_B1C = take("decode mask", (rows, 1, most * size), dtype)
        self.arguments = (
            shape.scale,
            [page for page, _ in work.runs],
            [count for _, count in work.runs],
            index(work.gathered_pages),
            in_place,
            index(token_W),
            index(work.slot_BM[:, None, :] * heads + head_N[:, None]),
            index(place_WN),
            index(item_BM),
            self.mask_B1C,
            take("decode q", (items, heads * dim), dtype),
            scores,
            placed_BNC,
            weights_BNC,
            item_weights,
            partial_WX,
            take("decode placed partial", (rows, most, heads * dim), dtype),
            take("decode keys", gathered, dtype),
            take("decode values", gathered, dtype),
        )
        """Those of `attend_pages` from `scale` on."""
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
        self._keys, self._values = cache_L2PKSH[:, 0].unbind(), cache_L2PKSH[:, 1].unbind()
        self._attend = compiled(attend_pages) if shape.device.type == "cpu" else attend_pages
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
        step = self._step
        assert step is not None
        o_BNH: torch.Tensor = self._attend(q_TNH, self._keys[layer], self._values[layer], *step.arguments)
        return o_BNH


def attend_pages(
    q_TNH: torch.Tensor,
    keys_PKSH: torch.Tensor,
    values_PKSH: torch.Tensor,
    scale: float,
    run_pages: list[int],
    run_counts: list[int],
    gathered_pages: torch.Tensor,
    in_place: bool,
    token_W: torch.Tensor,
    score_of_place: torch.Tensor,
    place_of_score: torch.Tensor,
    item_of_place: torch.Tensor,
    mask_B1C: torch.Tensor,
    q_WX: torch.Tensor,
    scores: torch.Tensor,
    placed_BNC: torch.Tensor,
    weights_BNC: torch.Tensor,
    item_weights: torch.Tensor,
    partial_WX: torch.Tensor,
    placed_partial_BMX: torch.Tensor,
    gathered_keys: torch.Tensor,
    gathered_values: torch.Tensor,
) -> torch.Tensor:
    """One layer's attention of a step, o_BNH; what the arguments are, `_Step` says. Python and TorchScript. hot path"""
    kv_heads, size, dim = keys_PKSH.shape[1], keys_PKSH.shape[2], keys_PKSH.shape[3]
    rows, heads = weights_BNC.shape[0], weights_BNC.shape[1]
    torch.index_select(q_TNH.to(keys_PKSH.dtype).flatten(1), 0, token_W, out=q_WX)
    q = q_WX.view(-1, heads // kv_heads, dim)
    end = 0
    for page, count in zip(run_pages, run_counts):  # noqa: B905 (TorchScript knows no `strict`)
        begin, end = end, end + count * kv_heads
        keys = keys_PKSH.narrow(0, page, count).view(-1, size, dim).transpose(1, 2)
        run_scores = scores[begin:end]
        torch.baddbmm(run_scores, q[begin:end], keys, beta=0, alpha=scale, out=run_scores)
    if gathered_pages.shape[0] > 0:
        torch.index_select(keys_PKSH.flatten(1), 0, gathered_pages, out=gathered_keys)
        keys = gathered_keys.view(-1, size, dim).transpose(1, 2)
        run_scores = scores[end:]
        torch.baddbmm(run_scores, q[end:], keys, beta=0, alpha=scale, out=run_scores)

    if not in_place:
        torch.index_select(scores.view(-1, size), 0, score_of_place, out=placed_BNC.view(-1, size))
    torch.softmax(placed_BNC.add_(mask_B1C), -1, out=weights_BNC)
    if not in_place:
        torch.index_select(weights_BNC.view(-1, size), 0, place_of_score, out=item_weights.view(-1, size))

    partial = partial_WX[: partial_WX.shape[0] - 1].view(-1, heads // kv_heads, dim)
    end = 0
    for page, count in zip(run_pages, run_counts):  # noqa: B905
        begin, end = end, end + count * kv_heads
        run_values = values_PKSH.narrow(0, page, count).view(-1, size, dim)
        torch.bmm(item_weights[begin:end], run_values, out=partial[begin:end])
    if gathered_pages.shape[0] > 0:
        torch.index_select(values_PKSH.flatten(1), 0, gathered_pages, out=gathered_values)
        torch.bmm(item_weights[end:], gathered_values.view(-1, size, dim), out=partial[end:])
    if in_place:
        return partial_WX[:rows].view(rows, heads, dim)
    # Not `embedding_bag`, which is one operation: FBGEMM's kernel halves the speed of the product that follows it.
    torch.index_select(partial_WX, 0, item_of_place, out=placed_partial_BMX.view(-1, partial_WX.shape[1]))
    return placed_partial_BMX.sum(1).view(rows, heads, dim)
