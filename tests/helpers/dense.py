"""Running a model for one request, with attention in plain torch and without pages."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.models.decoder import Decoder

CPU = torch.device("cpu")


class DenseAttention:
    """Causal attention of one request in plain torch: keeps all keys and values in float32."""

    def __init__(self, model: Decoder) -> None:
        self.scale = model.config.attention_scale
        self.group = model.config.num_heads // model.config.num_kv_heads
        self.past: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        keys, values = k_TKH.float(), v_TKH.float()
        if layer in self.past:
            keys, values = torch.cat((self.past[layer][0], keys)), torch.cat((self.past[layer][1], values))
        self.past[layer] = keys, values
        keys, values = (part.repeat_interleave(self.group, dim=1) for part in (keys, values))
        scores = torch.einsum("tnh,lnh->ntl", q_TNH.float(), keys) * self.scale
        new, length = scores.shape[1:]
        at = torch.arange(length, device=scores.device)
        seen = at <= at[length - new :].unsqueeze(1)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("ntl,lnh->tnh", weights, values).to(q_TNH.dtype)


@torch.inference_mode()
def logits_of(
    model: Decoder,
    token_ids: list[int],
    attend: DenseAttention | None = None,
    start: int = 0,
    device: torch.device = CPU,
) -> Tensor:
    """Logits [T, V] of all tokens, which stand at positions `start`, `start + 1`, ..."""
    ids = torch.tensor(token_ids, device=device)
    positions = torch.arange(start, start + len(token_ids), device=device)
    return model.logits(model.forward(ids, positions, attend or DenseAttention(model)))


def greedy(model: Decoder, prompt: list[int], new_tokens: int) -> list[int]:
    """The most likely continuation, token by token."""
    attend = DenseAttention(model)
    step, start, out = prompt, 0, list[int]()
    while len(out) < new_tokens:
        out.append(int(logits_of(model, step, attend, start)[-1].argmax()))
        start += len(step)
        step = out[-1:]
    return out
