"""The decoder that Llama, Qwen2 and Qwen3 share, over the flat tokens of a step.

Owns the arithmetic between token ids and logits, and which checkpoint tensors it needs. Knows nothing of pages or
requests: attention over the past is the caller's `attend`. A model may be split over the ranks of a tensor group: then
N, K and F are this rank's, and the layers that need the other ranks ask them (layers/parallel.py). Legend: T tokens of
the step, S sampled rows, N query heads, K kv heads, Q = N + K, H head dim, h = H / 2, D hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.distributed.group import SOLO, TensorGroup
from stretto.layers.activation import silu_and_mul
from stretto.layers.embedding import Embedding
from stretto.layers.linear import Linear
from stretto.layers.norm import RMSNorm
from stretto.layers.parallel import VocabularyParallelEmbedding, VocabularyParallelHead
from stretto.layers.rope import Rope, apply_rope
from stretto.models.config import ModelConfig
from stretto.models.rope import inverse_frequencies
from stretto.models.scripted import ScriptedLayers, scripted_layers
from stretto.models.shard import ModelShard, shard_of
from stretto.models.weights import Rows, WeightReader

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH) -> o_TNH: stores the new keys and values, then attends. May return a workspace."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every head of q and k, in one go for both (Qwen3)."""

    weight_QH: Tensor
    """q_norm's weight for each query head, then k_norm's for each kv head."""
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, name: str) -> HeadNorm:
        q_H = weights.vector(f"{name}.q_norm.weight", config.head_dim, in_pairs=True)
        k_H = weights.vector(f"{name}.k_norm.weight", config.head_dim, in_pairs=True)
        weight_QH = torch.cat((q_H.expand(config.num_heads, -1), k_H.expand(config.num_kv_heads, -1)))
        return cls(weight_QH, config.rms_norm_eps)

    def __call__(self, qk_TQH: Tensor) -> Tensor:
        """hot path"""
        return F.rms_norm(qk_TQH, self.weight_QH.shape[-1:], None, self.eps).mul_(self.weight_QH)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    qk_norm: HeadNorm | None
    o: Linear

    @classmethod
    def load(cls, whole: ModelConfig, shard: ModelShard, weights: WeightReader, layer: int, name: str) -> Attention:
        config, dim = shard.config, whole.head_dim
        q_rows, kv_rows = whole.num_heads * dim, whole.num_kv_heads * dim
        q_share, kv_share = _rows_of_heads(shard.heads, dim), _rows_of_heads(shard.kv_heads, dim)
        qkv = [
            Rows(f"{name}.q_proj", q_rows, dim, share=q_share),
            Rows(f"{name}.k_proj", kv_rows, dim, share=kv_share),
            Rows(f"{name}.v_proj", kv_rows, share=kv_share),
        ]
        return cls(
            layer,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv=weights.linear(qkv, config.hidden_size, bias=config.traits.qkv_bias),
            qk_norm=HeadNorm.load(config, weights, name) if config.traits.qk_norm else None,
            o=weights.row_parallel(f"{name}.o_proj", config.hidden_size, q_rows, q_share, bias=config.traits.o_bias),
        )

    def __call__(self, x_TD: Tensor, turns_T1h: Tensor, attend: Attend) -> Tensor:
        """hot path"""
        qkv_TXH = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        qk_TQH, v_TKH = qkv_TXH.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk_TQH = self.qk_norm(qk_TQH)
        apply_rope(qk_TQH, turns_T1h)
        q_TNH, k_TKH = qk_TQH.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        return self.o(attend(self.layer, q_TNH, k_TKH, v_TKH).flatten(1))


@dataclass(frozen=True, slots=True)
class MLP:
    """SiLU-gated feed-forward block."""

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, whole: ModelConfig, shard: ModelShard, weights: WeightReader, name: str) -> MLP:
        hidden, width, bias = whole.hidden_size, whole.intermediate_size, whole.traits.mlp_bias
        gate_up = [Rows(f"{name}.{part}", width, share=shard.ffn) for part in ("gate_proj", "up_proj")]
        return cls(
            gate_up=weights.linear(gate_up, hidden, bias=bias),
            down=weights.row_parallel(f"{name}.down_proj", hidden, width, shard.ffn, bias=bias),
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        """hot path"""
        return self.down(silu_and_mul(self.gate_up(x_TD)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each of which reads the normed residual stream and adds to it."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    @classmethod
    def load(cls, whole: ModelConfig, shard: ModelShard, weights: WeightReader, layer: int) -> DecoderLayer:
        config, name = shard.config, f"model.layers.{layer}"
        return cls(
            attention_norm=weights.norm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps),
            attention=Attention.load(whole, shard, weights, layer, f"{name}.self_attn"),
            mlp_norm=weights.norm(f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps),
            mlp=MLP.load(whole, shard, weights, f"{name}.mlp"),
        )

    def __call__(self, residual_TD: Tensor, update_TD: Tensor | None, turns_T1h: Tensor, attend: Attend) -> Tensor:
        """Adds the layer before's `update_TD` to the residual in place and returns this layer's own, not yet added.

        An addition is handed on so that it meets the norm that follows it, with which it is one operation. hot path
        """
        norm = self.attention_norm
        x_TD = norm(residual_TD) if update_TD is None else norm.add(residual_TD, update_TD)
        x_TD = self.mlp_norm.add(residual_TD, self.attention(x_TD, turns_T1h, attend))
        return self.mlp(x_TD)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model. All calls are work for the device's thread, in inference mode; none blocks the host."""

    config: ModelConfig
    """What this rank computes: its own heads and feed-forward width, the whole vocabulary (see `ModelShard`)."""
    weight_format: str
    """That of its linear layers: one of layers/formats.py."""
    kv_dtype: torch.dtype
    """Element type in which q, k and v reach `attend`, and the best one for the cache."""
    max_model_len: int
    """Positions are below this."""
    embedding: Embedding | VocabularyParallelEmbedding
    rope: Rope
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear
    group: TensorGroup
    scripted: ScriptedLayers | None = None
    """The layers once more, without Python between their operations, where there is such a thing."""

    @classmethod
    def load(cls, whole: ModelConfig, weights: WeightReader, max_model_len: int, group: TensorGroup = SOLO) -> Decoder:
        """Read the rank's share of all weights, in the order in which checkpoints store them.

        `whole` is the unsplit model's config. Raises ModelLoadError, InvalidRequest if the model cannot be split over
        the ranks of `group`; blocks on the disk.
        """
        shard = shard_of(whole, group.rank, group.size)
        config = shard.config
        embedding, head = weights.embedding_and_head(shard, tied=config.tie_word_embeddings)
        frequencies = inverse_frequencies(config, max_model_len).to(weights.device)
        loaded = cls(
            config,
            weights.weight_format,
            weights.activation_dtype,
            max_model_len,
            embedding,
            Rope(frequencies, max_model_len, scale=config.rope.attention_factor),
            tuple(DecoderLayer.load(whole, shard, weights, layer) for layer in range(config.num_layers)),
            weights.norm("model.norm", config.hidden_size, config.rms_norm_eps),
            head,
            group,
        )
        return replace(loaded, scripted=scripted_layers(loaded.layers))

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states of the step's tokens before the last norm: hidden_TD in the activation dtype. hot path

        `input_ids_T` and `positions_T` are int64, of any mix of requests; what a token sees of the others is
        `attend`'s to decide.
        """
        residual_TD = self.embedding(input_ids_T)
        turns_T1h = self.rope.turns(positions_T)
        update_TD = None
        if self.scripted is not None:
            return self.scripted.forward(residual_TD, turns_T1h, attend)
        for layer in self.layers:
            update_TD = layer(residual_TD, update_TD, turns_T1h, attend)
        assert update_TD is not None  # a config has at least one layer
        return residual_TD.add_(update_TD)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits of those rows of `forward`'s result that are sampled from: float32 [S, V], the same on every rank.

        hot path
        """
        return self.head(self.norm(hidden_SD)).float()

    @property
    def token_ids(self) -> range:
        """Ids whose logits this rank computes."""
        head = self.head
        return head.token_ids if isinstance(head, VocabularyParallelHead) else range(self.config.vocab_size)

    def own_logits(self, hidden_SD: Tensor) -> Tensor:
        """This rank's part of `logits`, float32 [S, v]: those of its `token_ids`, then padding. hot path"""
        head = self.head.local if isinstance(self.head, VocabularyParallelHead) else self.head
        return head(self.norm(hidden_SD)).float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads at least on this rank: all linear layers, the head included."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
        return sum(linear.weight_bytes for linear in linears)


def weight_format_of(model: object) -> str:
    """The weight format of the model of an engine that was assembled from options."""
    if not isinstance(model, Decoder):
        raise TypeError(f"a Decoder is expected, not a {type(model).__name__}")
    return model.weight_format


def _rows_of_heads(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
