"""A model whose every token depends exactly on its whole context, through the KV pages, in integer arithmetic.

A wrong, stale, foreign or poisoned key anywhere in a row's context changes the row's next token, and no rounding ever
does: so token streams can be compared for equality whatever the batches, chunks and overlap depth were.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stretto.attention.base import AttentionInputs
from stretto.engine.engine import Attend

PRIME = 1_000_003
POISON = -(2**40)


def _mix(x: torch.Tensor) -> torch.Tensor:
    return (x * 48_271 + 12_345) % PRIME


class ExactAttention:
    """Keys are hashes of (token, position); attending sums them over the row's context. Plain and slow on purpose."""

    wants_host_pages = True

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.cache = torch.full((num_pages * page_size,), POISON, dtype=torch.int64)
        self.page_size = page_size
        self._inputs: AttentionInputs | None = None

    def begin_step(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs

    def attend(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs
        assert inputs is not None
        self.cache[inputs.kv_location_T] = k_TKH[:, 0, 0]
        new_B, total = torch.from_numpy(inputs.num_new_B_host), int(inputs.num_new_B_host.sum())
        starts = inputs.query_start_B1[:-1].repeat_interleave(new_B, output_size=total)
        rows = torch.arange(len(new_B)).repeat_interleave(new_B, output_size=total)
        offsets = torch.arange(len(rows)) - starts
        seen_T = (inputs.context_B - torch.from_numpy(inputs.num_new_B_host))[rows] + offsets + 1
        offsets_P = torch.arange(self.page_size)
        locations_BC = (inputs.page_table_BM[:, :, None] * self.page_size + offsets_P).flatten(1)
        keys_TC = self.cache[locations_BC][rows]
        visible_TC = torch.arange(locations_BC.shape[1])[None, :] < seen_T[:, None]
        return torch.where(visible_TC, keys_TC, 0).sum(1)[:, None, None]

    def poison_page(self, page: int) -> None:
        self.cache[page * self.page_size : (page + 1) * self.page_size] = POISON

    @property
    def cache_bytes(self) -> int:
        return self.cache.numel() * 8


class ExactModel:
    """Next token = hash of the sum of hashed (token, position) over the context, modulo the vocabulary.

    The logits put distinct, exact values on all ids, so that sampling has something to choose from.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        key_T = _mix(_mix(input_ids_T.to(torch.int64)) + positions_T * 7919)
        key_T11 = key_T[:, None, None]
        return attend(0, key_T11, key_T11, key_T11)[:, 0]

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        ids_V = torch.arange(self.vocab_size)
        scores_SV = _mix(_mix(hidden_SD % PRIME) + ids_V * 104_729)
        return scores_SV.to(torch.float32) * (4.0 / PRIME)


def next_logits(token_ids: list[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """The model's logits after `token_ids`: the reference, without engine, pages or batches."""
    ids = torch.tensor(token_ids)
    model = ExactModel(vocab_size)
    hidden = model.forward(ids, torch.arange(len(ids)), lambda _, q, k, v: k.cumsum(0))
    return model.logits(hidden[-1:])[0].numpy()


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """What the model answers greedily after `token_ids`."""
    return int(next_logits(token_ids, vocab_size).argmax())
