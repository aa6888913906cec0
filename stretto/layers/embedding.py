"""Token embeddings: a row per token id, kept in as few bytes as the weight format needs.

Owns its own copy of the table: a packed output head cannot be read by row, even where the two are tied.
Legend: T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stretto.layers.formats import activation_dtype


class Embedding:
    """Rows of weight_VD in the activation dtype of `format`. float16 weights are stored in 16 bits, others as used."""

    def __init__(self, weight_VD: torch.Tensor, format: str) -> None:
        self.dtype = activation_dtype(format, weight_VD.device)
        stored = torch.float16 if format == "float16" else self.dtype
        self.weight_VD = weight_VD.to(stored).contiguous()
        self.table_bytes = self.weight_VD.nbytes

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """hidden_TD of token ids (int32 or int64) [T], a fresh tensor that the caller may change. hot path"""
        return F.embedding(token_ids_T, self.weight_VD).to(self.dtype)
