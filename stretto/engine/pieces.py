"""Steps with prompt chunks in few launches: what lies between two attentions of a model, captured by number of tokens.

Launched kernel by kernel such a step costs the host some milliseconds, in which a GPU computes a few hundred tokens of
a small model and then waits. Norms, products and gates depend on nothing but the number of tokens, so they are captured
in CUDA graphs for a ladder of sizes; attention, whose launch depends on the chunks, is launched between them. Owns the
pieces and the tensors through which they hand on; the layers are the model's. Legend: T tokens, D hidden, I in-features
of the output projection, X out-features of the q, k, v projection.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stretto.models.fused import AttendProjected, FusedDecoder, rows_of

_SIZES = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
_FLOP_HIDDEN_PER_LAYER = 8e10
"""About what an H200 computes while the host launches a layer kernel by kernel; padding costs more than it saves if a
layer takes longer."""


class Recorded(Protocol):
    """Work on fixed tensors that can be repeated: a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Enqueue it again."""

    def reset(self) -> None:
        """Give back what it holds; it must not be running."""


Record = Callable[[Callable[[], None]], Recorded]
"""Records what a function enqueues on the current stream."""


def sizes_for(model: FusedDecoder, max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture: up to where a GPU computes for longer than the host launches."""
    most = min(max_tokens, int(_FLOP_HIDDEN_PER_LAYER / (2 * model.weights_per_layer)))
    return tuple(size for size in _SIZES if size <= most)


class LayerPieces:
    """The layers of a `FusedDecoder` for up to `max_tokens` tokens, in pieces.

    Args:
        sizes: ascending numbers of tokens; a step is padded to the next one. May be empty: then it serves nothing.
    """

    def __init__(self, model: FusedDecoder, sizes: tuple[int, ...], device: torch.device) -> None:
        self._model = model
        self.sizes = sizes
        most, config = max(sizes, default=0), model.config

        def zeros(width: int) -> Tensor:
            return torch.zeros(most, width, dtype=model.dtype, device=device)

        self._residual_TD = zeros(config.hidden_size)
        self._qkv_TX = zeros((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._o_TI = zeros(config.num_heads * config.head_dim)
        self._update_TD = zeros(config.hidden_size)
        self._pieces: dict[int, list[Recorded]] = {}

    def capture(self, record: Record) -> None:
        """Record all pieces, the largest first, in inference mode. Blocks; each is run once before."""
        for size in reversed(self.sizes):
            works = [partial(self._enter, size)]
            works += [partial(self._follow, size, index) for index in range(self._model.num_layers)]
            for work in works:
                work()
            self._pieces[size] = [record(work) for work in works]

    def release(self) -> None:
        """Give the graphs back; none may be running. It serves nothing any more."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.reset()
        self._pieces.clear()

    def serves(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens can be run in pieces. hot path"""
        return bool(self._pieces) and num_tokens <= self.sizes[-1]

    def forward(
        self, residual_TD: Tensor, attend: AttendProjected, *, wanted_S: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `FusedDecoder.forward`, which leaves its results elsewhere: here they are overwritten by the next call.

        hot path
        """
        model, tokens = self._model, residual_TD.shape[0]
        enter, *follow = self._pieces[self.sizes[bisect.bisect_left(self.sizes, tokens)]]
        self._residual_TD[:tokens].copy_(residual_TD)
        qkv_TX, o_TI = self._qkv_TX[:tokens], self._o_TI[:tokens]
        enter.replay()
        for index, piece in enumerate(follow):
            o_TI.copy_(model.attend(index, qkv_TX, attend))
            piece.replay()
        return rows_of(self._residual_TD[:tokens], self._update_TD[:tokens], wanted_S)

    def _enter(self, size: int) -> None:
        self._qkv_TX[:size].copy_(self._model.enter(self._residual_TD[:size]))

    def _follow(self, size: int, index: int) -> None:
        result = self._model.follow(index, self._residual_TD[:size], self._o_TI[:size])
        is_last = index == self._model.num_layers - 1
        (self._update_TD if is_last else self._qkv_TX)[:size].copy_(result)
