"""The decoder that Llama, Qwen2 and Qwen3 share, over the flat tokens of a step.

Owns the arithmetic between token ids and logits. Knows nothing of pages or requests: attention over the past is the
caller's `attend`. Legend: T tokens of the step, S sampled rows, N query heads, K kv heads, Q = N + K, H head dim,
D hidden, F ffn, V vocabulary, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.layers.linear import Linear
from stretto.models.config import ModelConfig
from stretto.models.rope import rotation_table
from stretto.models.weights import Rows, WeightReader

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH) -> o_TNH: stores the new keys and values, then attends causally. May return a workspace."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension."""

    weight_D: Tensor
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, name: str) -> Norm:
        return cls(weights.vector(f"{name}.weight", config.hidden_size), config.rms_norm_eps)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return F.rms_norm(x_TD, self.weight_D.shape[-1:], self.weight_D, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every head of q and k at once (Qwen3)."""

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
        return F.rms_norm(qk_TQH, self.weight_QH.shape[-1:], None, self.eps) * self.weight_QH


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    o: Linear
    qk_norm: HeadNorm | None

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, layer: int, name: str) -> Attention:
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [
            Rows(f"{name}.q_proj", q_rows, config.head_dim),
            Rows(f"{name}.k_proj", kv_rows, config.head_dim),
            Rows(f"{name}.v_proj", kv_rows),
        ]
        return cls(
            layer,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv=weights.linear(qkv, config.hidden_size, bias=config.traits.qkv_bias),
            o=weights.linear([Rows(f"{name}.o_proj", config.hidden_size)], q_rows, bias=config.traits.o_bias),
            qk_norm=HeadNorm.load(config, weights, name) if config.traits.qk_norm else None,
        )

    def __call__(self, x_TD: Tensor, rotation_T1R: Tensor, attend: Attend) -> Tensor:
        qkv_TQH = self.qkv(x_TD).unflatten(-1, (-1, self.head_dim))
        qk_TQH, v_TKH = qkv_TQH.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk_TQH = self.qk_norm(qk_TQH)
        q_TNH, k_TKH = rotate(qk_TQH, rotation_T1R).split((self.num_heads, self.num_kv_heads), dim=1)
        return self.o(attend(self.layer, q_TNH, k_TKH, v_TKH).flatten(1))


@dataclass(frozen=True, slots=True)
class MLP:
    """SiLU-gated feed-forward block."""

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, name: str) -> MLP:
        gate_up = [Rows(f"{name}.{part}", config.intermediate_size) for part in ("gate_proj", "up_proj")]
        down = [Rows(f"{name}.down_proj", config.hidden_size)]
        return cls(
            gate_up=weights.linear(gate_up, config.hidden_size, bias=config.traits.mlp_bias),
            down=weights.linear(down, config.intermediate_size, bias=config.traits.mlp_bias),
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate_TF).mul_(up_TF))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, layer: int) -> DecoderLayer:
        name = f"model.layers.{layer}"
        return cls(
            attention_norm=Norm.load(config, weights, f"{name}.input_layernorm"),
            attention=Attention.load(config, weights, layer, f"{name}.self_attn"),
            mlp_norm=Norm.load(config, weights, f"{name}.post_attention_layernorm"),
            mlp=MLP.load(config, weights, f"{name}.mlp"),
        )

    def __call__(self, x_TD: Tensor, rotation_T1R: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotation_T1R, attend)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model. All calls are work for the device's thread, in inference mode; none blocks the host."""

    config: ModelConfig
    kv_dtype: torch.dtype
    """Element type in which q, k and v reach `attend`."""
    embedding_VD: Tensor
    rotations_LR: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader, *, max_model_len: int, device: torch.device) -> Decoder:
        """Read all weights, in the order in which checkpoints store them. Raises ModelLoadError; blocks on the disk."""
        embedding_VD, head = weights.embedding_and_head(
            config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
        )
        return cls(
            config,
            weights.activation_dtype,
            embedding_VD,
            rotation_table(config, max_model_len, device),
            tuple(DecoderLayer.load(config, weights, layer) for layer in range(config.num_layers)),
            Norm.load(config, weights, "model.norm"),
            head,
        )

    @property
    def max_model_len(self) -> int:
        """Positions must be below this."""
        return self.rotations_LR.shape[0]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states (before the last norm) of the step's tokens: hidden_TD. hot path

        `input_ids_T` and `positions_T` are int64 or int32 of any order and mix of requests; what a token sees of the
        others is `attend`'s to decide.
        """
        x_TD = F.embedding(input_ids_T, self.embedding_VD).to(self.kv_dtype)
        rotation_T1R = self.rotations_LR[positions_T].unsqueeze(1)
        for layer in self.layers:
            x_TD = layer(x_TD, rotation_T1R, attend)
        return x_TD

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits of the rows of `forward`'s result that are sampled from: float32 [S, V]. hot path"""
        return self.head(self.norm(hidden_SD)).float()


def rotate(qk_TQH: Tensor, rotation_T1R: Tensor) -> Tensor:
    pairs = torch.view_as_complex(qk_TQH.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation_T1R).flatten(-2)
