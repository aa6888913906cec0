"""A paged KV cache driven like the engine does it, beside a dense float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stretto.attention.base import AttentionBackend, AttentionInputs


@dataclass
class Row:
    """A request: its pages, and everything ever written for it (layer by layer), for the reference."""

    pages: list[int]
    keys_LCKH: torch.Tensor
    values_LCKH: torch.Tensor
    context: int = 0


def random_row(
    pages: list[int], length: int, layers: int, kv_heads: int, head_dim: int, generator: torch.Generator
) -> Row:
    """A row whose keys and values for `length` tokens are drawn now and written by `step` later."""
    size = (layers, length, kv_heads, head_dim)
    return Row(pages, torch.randn(size, generator=generator), torch.randn(size, generator=generator))


def step_inputs(rows: list[Row], num_new: list[int], page_size: int, num_columns: int = 0) -> AttentionInputs:
    """What the engine would say of a step in which row b gets `num_new[b]` tokens; advances the rows."""
    starts = [row.context for row in rows]
    for row, new in zip(rows, num_new, strict=True):
        row.context += new
    used = [-(-row.context // page_size) for row in rows]
    table = np.zeros((len(rows), max(max(used), num_columns)), dtype=np.int64)
    locations = []
    for b, row in enumerate(rows):
        table[b, : used[b]] = row.pages[: used[b]]
        positions = np.arange(starts[b], row.context)
        locations.append(table[b, positions // page_size] * page_size + positions % page_size)
    context = np.array([row.context for row in rows], dtype=np.int64)
    new_B = np.array(num_new, dtype=np.int64)
    return AttentionInputs(
        page_table_BM=torch.from_numpy(table.copy()),
        kv_location_T=torch.from_numpy(np.concatenate(locations)),
        query_start_B1=torch.from_numpy(np.r_[0, np.cumsum(new_B)]),
        context_B=torch.from_numpy(context.copy()),
        num_new_B_host=new_B,
        context_B_host=context,
        page_table_BM_host=table,
    )


def run_step(
    backend: AttentionBackend,
    rows: list[Row],
    num_new: list[int],
    page_size: int,
    q_LTNH: torch.Tensor,
    *,
    fused: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """o_LTNH of one step. `fused`: q, k and v are views of one tensor, as from a fused projection."""
    starts = [row.context for row in rows]
    backend.begin_step(step_inputs(rows, num_new, page_size))
    outputs = []
    for layer, q_TNH in enumerate(q_LTNH):
        new = [slice(s, s + n) for s, n in zip(starts, num_new, strict=True)]
        k_TKH = torch.cat([row.keys_LCKH[layer, at] for row, at in zip(rows, new, strict=True)])
        v_TKH = torch.cat([row.values_LCKH[layer, at] for row, at in zip(rows, new, strict=True)])
        q_TNH = q_TNH.to(dtype)
        k_TKH, v_TKH = k_TKH.to(dtype), v_TKH.to(dtype)
        if fused:
            parts = (q_TNH.shape[1], k_TKH.shape[1], v_TKH.shape[1])
            q_TNH, k_TKH, v_TKH = torch.cat((q_TNH, k_TKH, v_TKH), dim=1).split(parts, dim=1)
        outputs.append(backend.attend(layer, q_TNH, k_TKH, v_TKH).clone())
    return torch.stack(outputs)


def dense_reference(rows: list[Row], num_new: list[int], q_LTNH: torch.Tensor, scale: float) -> torch.Tensor:
    """The same in float64 without pages, one query at a time; call after `run_step` (contexts already advanced)."""
    o_LTNH = torch.zeros(q_LTNH.shape, dtype=torch.float64)
    token = 0
    for row, new in zip(rows, num_new, strict=True):
        group = q_LTNH.shape[2] // row.keys_LCKH.shape[2]
        for seen in range(row.context - new + 1, row.context + 1):
            k_LNCH = row.keys_LCKH[:, :seen].double().repeat_interleave(group, dim=2).transpose(1, 2)
            v_LNCH = row.values_LCKH[:, :seen].double().repeat_interleave(group, dim=2).transpose(1, 2)
            scores = torch.einsum("lnh,lnch->lnc", q_LTNH[:, token].double(), k_LNCH) * scale
            o_LTNH[:, token] = torch.einsum("lnc,lnch->lnh", scores.softmax(-1), v_LNCH)
            token += 1
    return o_LTNH
