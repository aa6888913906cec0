"""A decoder's forward pass in few kernels, for a GPU: the arithmetic of `decoder.py`, fused where neighbours can be.

Owns no weights: it reads a `Decoder`'s. Heads' norm, turn and the write to the cache are one kernel of the attention
backend. In a split model the ranks' products are summed where the decoder's layers do it (layers/parallel.py). Legend:
T tokens, S sampled rows, N query heads, K kv heads, X = N + 2 K, H head dim, D hidden, V vocabulary; of a split model
N and K are the rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import NotSupported
from stretto.kernels import few_rows, gated_matmul
from stretto.kernels.elementwise import add_rms_norm, silu_and_mul, sum_parts
from stretto.kernels.exchange import add_sum, add_sum_rms_norm
from stretto.kernels.rope_write import HeadTransform
from stretto.kernels.small_matmul import Norm, small_matmul
from stretto.layers.linear import Linear, PlainLinear
from stretto.layers.norm import RMSNorm
from stretto.layers.parallel import RowParallelLinear, VocabularyParallelEmbedding, VocabularyParallelHead
from stretto.models.config import ModelConfig
from stretto.models.decoder import Decoder

AttendProjected = Callable[[int, Tensor, HeadTransform], Tensor]
"""(layer, qkv_TXH, transform) -> o_TNH. The projection may come in parts, float32 [S, T, X, H]."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x_TI, weight_OI, bias_O) -> y_TO."""

SMALL_ROWS = 1
"""Up to this many rows, products run in `small_matmul`, fused with norms, gates and additions."""

FEW_ROWS = few_rows.MAX_ROWS
"""Up to this many rows, products of decode steps run in `few_rows`; beyond it, and in steps with prompts, in cuBLAS."""

FEW_ROWS_OF_WIDE = 32
"""As `FEW_ROWS`, for the layers of hidden states wider than `WIDE`: rows of x are read as often as there are 64 rows of
weights. (64 rows of the 8B take 130 us a layer without attention, in cuBLAS 125; 32 rows 117 and 123.)"""

WIDE = 2048

LARGE_STEP = 1024
"""From so many rows on, products that end in the residual stream are added to it by cuBLAS: the norm behind them then
has a tensor less to read. (On an H200 the sums have the same bits either way.)"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's tensors."""

    weight_OI: Tensor
    bias_O: Tensor | None
    product: Product = F.linear

    @classmethod
    def of(cls, linear: Linear, product: Product = F.linear) -> Matrix:
        """Of a split layer: the rank's part. Raises NotSupported for a packed format."""
        if isinstance(linear, RowParallelLinear | VocabularyParallelHead):
            linear = linear.local
        if not isinstance(linear, PlainLinear):
            raise NotSupported(f"fused layers need plain weights, not {type(linear).__name__}")
        return cls(linear.weight_OI, linear.bias_O, product)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """hot path"""
        return self.product(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's tensors."""

    attention_norm: Norm
    qkv: Matrix
    transform: HeadTransform
    o: Matrix
    mlp_norm: Norm
    gate_up: Matrix
    down: Matrix


class FusedDecoder:
    """Runs a `Decoder`. All calls are work on a stream; none blocks the host or looks at a value."""

    def __init__(self, decoder: Decoder, *, small_rows: int = SMALL_ROWS, product: Product = F.linear) -> None:
        """Raises NotSupported for weights in a packed format (a CPU's).

        `product`: for more than `small_rows` rows; another one than cuBLAS's is used for any number of them.
        """
        config = decoder.config
        turns_LH = decoder.rope.turns_LH
        layers = []
        for layer in decoder.layers:
            attention, norm = layer.attention, layer.attention.qk_norm
            transform = HeadTransform(
                config.num_heads,
                config.num_kv_heads,
                None if norm is None else norm.weight_QH,
                0.0 if norm is None else norm.eps,
                turns_LH,
            )
            layers.append(
                FusedLayer(
                    attention_norm=_norm(layer.attention_norm),
                    qkv=Matrix.of(attention.qkv, product),
                    transform=transform,
                    o=Matrix.of(attention.o, product),
                    mlp_norm=_norm(layer.mlp_norm),
                    gate_up=Matrix.of(layer.mlp.gate_up, product),
                    down=Matrix.of(layer.mlp.down, product),
                )
            )
        self.config: ModelConfig = config
        self.decoder = decoder
        self.small_rows = small_rows
        wide = config.hidden_size > WIDE
        self._is_plain = product is F.linear
        self._few_rows = (FEW_ROWS_OF_WIDE if wide else FEW_ROWS) if self._is_plain else 0
        self._few_rows_of_head = FEW_ROWS if self._is_plain else 0
        self.embedding_VD = decoder.embedding.weight_VD
        """The rank's part of the table."""
        embedding = decoder.embedding
        self.first_id = embedding.first_id if isinstance(embedding, VocabularyParallelEmbedding) else None
        """The id of the table's first row; None: the table is whole."""
        self.group = decoder.group
        self._layers = tuple(layers)
        self._final_norm = _norm(decoder.norm)
        self._head = Matrix.of(decoder.head, product)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of hidden states."""
        return self.decoder.kv_dtype

    def warm_up(self, max_tokens: int) -> None:
        """Compile what steps of up to `max_tokens` tokens launch only if they are large, and the head for any number of
        rows: prompts are scored by up to `FEW_ROWS` at once, however few may decode together. Blocks."""
        for rows in (1, *few_rows.KINDS_OF_ROWS):
            self.own_logits(self.embedding_VD.new_zeros(rows, self.config.hidden_size), None)
        if max_tokens >= gated_matmul.LEAST_ROWS:
            x_TD = self.embedding_VD.new_zeros(gated_matmul.LEAST_ROWS, self.config.hidden_size)
            self._gated(x_TD, self._layers[0].gate_up)
        rows = 1
        while self.group.size > 1 and rows < max_tokens:  # few and many words, in whole blocks and not
            for count in (rows, rows + 1):
                self.group.all_reduce(self.embedding_VD.new_zeros(count, self.config.hidden_size))
            rows *= 2

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """residual_TD of token ids, a fresh tensor. hot path"""
        return self.decoder.embedding(input_ids_T)

    def embed_split(self, residual_TD: Tensor) -> None:
        """Complete, in place, rows that were read from `embedding_VD`, zeros for ids that it lacks. hot path"""
        self.group.all_reduce(residual_TD)

    def forward(
        self, residual_TD: Tensor, attend: AttendProjected, *, decodes: bool = False, wanted_S: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(residual, update): what the last norm reads is residual + the sum of all ranks' updates.

        Changes `residual_TD` in place. `decodes`: the step will be replayed often, so that the host's time for it does
        not count. `wanted_S`, int64: the tokens whose rows are given, in this order; of the others nothing is computed
        behind the last attention. None: all, and then an update [S, T, D] is in parts. hot path
        """
        rows = residual_TD.shape[0]
        if rows <= self.small_rows:
            for index, layer in enumerate(self._layers):
                self._small_layer(index, layer, residual_TD, attend)
            return rows_of(residual_TD, None, wanted_S)
        if decodes and rows <= self._few_rows:
            update_TD = self._few_rows_layers(residual_TD, attend)
            if wanted_S is not None and update_TD.dim() == 3:
                update_TD = sum_parts(update_TD, self.dtype)
            return rows_of(residual_TD, update_TD, wanted_S)
        result = self.enter(residual_TD)
        last = self.num_layers - 1
        for index in range(last):
            result = self.follow(index, residual_TD, self.attend(index, result, attend))
        o_TI = self.attend(last, result, attend)
        if wanted_S is None:
            return residual_TD, self.follow(last, residual_TD, o_TI)
        residual_SD = residual_TD[wanted_S]
        if not len(wanted_S):  # the step's only use is what it left in the cache
            return residual_SD, None
        return residual_SD, self.follow(last, residual_SD, o_TI[wanted_S])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def weights_per_layer(self) -> int:
        """Elements of a layer's matrices; of a split model, this rank's."""
        layer = self._layers[0]
        return sum(matrix.weight_OI.numel() for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down))

    def enter(self, residual_TD: Tensor) -> Tensor:
        """What is before the first attention: qkv_TX. The same for any number of rows. hot path"""
        first = self._layers[0]
        return first.qkv(self._add_norm(residual_TD, None, first.attention_norm))

    def attend(self, index: int, qkv_TX: Tensor, attend: AttendProjected) -> Tensor:
        """Layer `index`'s attention: o_TI. hot path"""
        return attend(index, self._heads(qkv_TX), self._layers[index].transform).flatten(1)

    def follow(self, index: int, residual_TD: Tensor, o_TI: Tensor) -> Tensor:
        """What is between layer `index`'s attention and the next one: qkv_TX; after the last one the update_TD.

        Changes `residual_TD` in place. hot path
        """
        layer = self._layers[index]
        gated_TF = self._gated(self._add_product_norm(residual_TD, o_TI, layer.o, layer.mlp_norm), layer.gate_up)
        if index == self.num_layers - 1:
            return layer.down(gated_TF)
        following = self._layers[index + 1]
        return following.qkv(self._add_product_norm(residual_TD, gated_TF, layer.down, following.attention_norm))

    def logits(self, residual_SD: Tensor, update_SD: Tensor | None) -> Tensor:
        """Logits of rows of what `forward` gave, [S, V] in the weights' dtype, the same on every rank. hot path"""
        return self.group.all_gather(self.own_logits(residual_SD, update_SD), self.config.vocab_size)

    @property
    def token_ids(self) -> range:
        """Ids whose logits this rank computes."""
        return self.decoder.token_ids

    def own_logits(self, residual_SD: Tensor, update_SD: Tensor | None) -> Tensor:
        """This rank's part of `logits`: those of its `token_ids`, then padding. hot path"""
        norm, head = self._final_norm, self._head
        if residual_SD.shape[0] <= self.small_rows and update_SD is None:
            return small_matmul(residual_SD, head.weight_OI, head.bias_O, norm=norm)
        x_SD = self._add_norm(residual_SD, update_SD, norm)
        if 1 < x_SD.shape[0] <= self._few_rows_of_head:
            return few_rows.few_rows_matmul(x_SD, head.weight_OI, head.bias_O, whole=True)
        return head(x_SD)

    def _few_rows_layers(self, residual_TD: Tensor, attend: AttendProjected) -> Tensor:
        """All layers, their sums of products left in parts for the kernels behind them; the last update."""
        update_TD: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
            x_TD = self._add_norm(residual_TD, update_TD, layer.attention_norm)
            qkv_TX = few_rows.few_rows_matmul(x_TD, qkv.weight_OI, qkv.bias_O)
            o_TNH = attend(index, self._heads(qkv_TX), layer.transform)
            update_TD = self._few_rows_update(o_TNH.flatten(1), o)
            x_TD = self._add_norm(residual_TD, update_TD, layer.mlp_norm)
            gated_TF = few_rows.few_rows_gated(x_TD, gate_up.weight_OI, gate_up.bias_O)
            update_TD = self._few_rows_update(gated_TF, down)
        assert update_TD is not None  # a config has at least one layer
        return update_TD

    def _few_rows_update(self, x_TI: Tensor, matrix: Matrix) -> Tensor:
        product_TD = few_rows.few_rows_matmul(x_TI, matrix.weight_OI, matrix.bias_O)
        if self.group.size > 1 and product_TD.dim() == 3:  # ranks exchange what is whole, and half as wide
            return sum_parts(product_TD, x_TI.dtype)
        return product_TD

    def _small_layer(self, index: int, layer: FusedLayer, residual_TD: Tensor, attend: AttendProjected) -> None:
        qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
        qkv_TX = small_matmul(residual_TD, qkv.weight_OI, qkv.bias_O, norm=layer.attention_norm)
        o_TNH = attend(index, self._heads(qkv_TX), layer.transform)
        self._add_product(residual_TD, o_TNH.flatten(1), o)
        gated_TF = small_matmul(residual_TD, gate_up.weight_OI, gate_up.bias_O, norm=layer.mlp_norm, gate=True)
        self._add_product(residual_TD, gated_TF, down)

    def _add_product(self, residual_TD: Tensor, x_TI: Tensor, matrix: Matrix) -> None:
        """residual += the sum of all ranks' products."""
        if self.group.size == 1:
            small_matmul(x_TI, matrix.weight_OI, matrix.bias_O, add_to=residual_TD)
        else:
            product_TD = small_matmul(x_TI, matrix.weight_OI, matrix.bias_O)
            peers = self.group.peers_for(product_TD)
            if peers is None:
                residual_TD.add_(self.group.all_reduce(product_TD))
            else:
                add_sum(residual_TD, product_TD, peers)

    def _add_product_norm(self, residual_TD: Tensor, x_TI: Tensor, matrix: Matrix, norm: Norm) -> Tensor:
        """residual += the sum of all ranks' products, of any number of rows; returns its norm."""
        in_place = self._is_plain and self.group.size == 1 and matrix.bias_O is None
        if in_place and residual_TD.shape[0] >= LARGE_STEP:
            residual_TD.addmm_(x_TI, matrix.weight_OI.t())
            return add_rms_norm(residual_TD, None, norm.weight, norm.eps)
        return self._add_norm(residual_TD, matrix(x_TI), norm)

    def _gated(self, x_TD: Tensor, matrix: Matrix) -> Tensor:
        """silu(gate) * up, of any number of rows."""
        if self._is_plain and matrix.bias_O is None and gated_matmul.takes(x_TD.shape[0], matrix.weight_OI):
            return gated_matmul.gated_matmul(x_TD, matrix.weight_OI)
        return silu_and_mul(matrix(x_TD))

    def _add_norm(self, residual_TD: Tensor, update_TD: Tensor | None, norm: Norm) -> Tensor:
        """residual += the sum of all ranks' updates, where given; returns its norm."""
        if update_TD is not None and self.group.size > 1:
            peers = self.group.peers_for(update_TD)
            if peers is not None:
                return add_sum_rms_norm(residual_TD, update_TD, norm.weight, norm.eps, peers)
            self.group.all_reduce(update_TD)
        return add_rms_norm(residual_TD, update_TD, norm.weight, norm.eps)

    def _heads(self, qkv_TX: Tensor) -> Tensor:
        return qkv_TX.view(*qkv_TX.shape[:-1], -1, self.config.head_dim)


def rows_of(residual_TD: Tensor, update_TD: Tensor | None, wanted_S: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows `wanted_S` (None: all) of what `FusedDecoder.forward` gave, not in parts. hot path"""
    if wanted_S is None:
        return residual_TD, update_TD
    return residual_TD[wanted_S], None if update_TD is None else update_TD[wanted_S]


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight_D, norm.eps)
