"""Layers whose weights are split over the ranks of a tensor group and whose results are whole on each of them.

Owns where the ranks exchange what. A layer split by rows of its weight (column-parallel: q, k, v, gate, up) needs no
exchange and is a plain `Linear`. Legend: T tokens, S sampled rows, I in-features, O out-features, V vocabulary, v the
rank's part of it, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from stretto.distributed.group import TensorGroup
from stretto.layers.embedding import Embedding
from stretto.layers.linear import Linear


class RowParallelLinear:
    """y_TO of x_TI of which every rank has its share of I: the sum of the ranks' products.

    The bias is in one rank's product only.
    """

    def __init__(self, local: Linear, group: TensorGroup) -> None:
        self.local = local
        self.in_features = local.in_features
        """The rank's."""
        self.out_features = local.out_features
        self.weight_bytes = local.weight_bytes
        self._group = group

    def __call__(self, x_TI: Tensor) -> Tensor:
        """hot path"""
        return self._group.all_reduce(self.local(x_TI))


class VocabularyParallelEmbedding:
    """Rows of a table of which every rank has the ids from `first_id` on; the others give zero, the sum is exact."""

    def __init__(self, local: Embedding, first_id: int, group: TensorGroup) -> None:
        self.dtype = local.dtype
        self.weight_VD = local.weight_VD
        self.table_bytes = local.table_bytes
        self.first_id = first_id
        self._local = local
        self._last_row = local.weight_VD.shape[0] - 1
        self._group = group

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """hidden_TD of token ids (int32 or int64) [T], a fresh tensor that the caller may change. hot path"""
        row_T = token_ids_T - self.first_id
        elsewhere_T = (row_T < 0) | (row_T > self._last_row)
        hidden_TD = self._local(row_T.clamp_(0, self._last_row))
        return self._group.all_reduce(hidden_TD.masked_fill_(elsewhere_T.unsqueeze(1), 0.0))


class VocabularyParallelHead:
    """Logits of the whole vocabulary, of which every rank computes an equal part, the last ones with padding behind."""

    def __init__(self, local: Linear, token_ids: range, vocabulary: int, group: TensorGroup) -> None:
        self.local = local
        self.token_ids = token_ids
        """The rank's, without padding."""
        self.in_features = local.in_features
        self.out_features = vocabulary
        self.weight_bytes = local.weight_bytes
        self._group = group

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Logits [S, V] of hidden states [S, D], equal on all ranks to the bit. hot path"""
        return self._group.all_gather(self.local(x_TI), self.out_features)
