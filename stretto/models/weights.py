"""From checkpoint tensors to a model's parameters: fused, reordered, and packed into their format one at a time.

Owns the path of a weight from its source into memory. At any time one parameter is unpacked, so the peak stays near the
size of the finished model. Legend: O, I rows and columns of a weight; H head dim; V vocabulary; D hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.errors import ModelLoadError
from stretto.layers.linear import Linear, activation_dtype, make_linear, staging_dtype, table_dtype
from stretto.models.rope import halves_as_pairs
from stretto.models.sources import WeightSource

Progress = Callable[[int, int], None]
"""(done, total), in elements of the checkpoint: called after each tensor."""

# Constants that old checkpoints carry and every program recomputes.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Rows:
    """The part of a parameter's rows that one checkpoint module gives."""

    module: str
    """Name without ".weight"."""
    count: int
    head_dim: int | None = None
    """Set for q and k: their rows are heads of this size and are brought into pair order (rope.py)."""


class WeightReader:
    """Builds parameters out of a source's tensors; `finish` verifies that nothing was left over."""

    def __init__(
        self, source: WeightSource, *, weight_format: str, device: torch.device, progress: Progress | None = None
    ) -> None:
        self._source = source
        self._format = weight_format
        self._device = device
        self._progress = progress
        self._used: set[str] = set()
        self._elements_done = 0
        self.activation_dtype = activation_dtype(weight_format, device)

    def linear(self, parts: Sequence[Rows], columns: int, *, bias: bool) -> Linear:
        """One linear layer whose rows are those of `parts` on top of each other. Raises ModelLoadError."""
        weight_OI = self._matrix(parts, columns)
        if not bias:
            return make_linear(weight_OI, None, self._format)
        bias_O = torch.empty(weight_OI.shape[0], dtype=self.activation_dtype, device=self._device)
        row = 0
        for part in parts:
            self._read_into(bias_O[row : row + part.count], f"{part.module}.bias", part.head_dim)
            row += part.count
        return make_linear(weight_OI, bias_O, self._format)

    def vector(self, name: str, size: int, *, in_pairs: bool = False) -> Tensor:
        """A norm's weight. With `in_pairs`, that of a q or k head, brought into pair order. Raises ModelLoadError."""
        out = torch.empty(size, dtype=self.activation_dtype, device=self._device)
        self._read_into(out, name, size if in_pairs else None)
        return out

    def embedding_and_head(self, rows: int, columns: int, *, tied: bool) -> tuple[Tensor, Linear]:
        """Token embedding [V, D] and the layer from hidden states to logits. Raises ModelLoadError.

        If tied, they share memory where the format keeps its rows readable; otherwise the table is kept in the format's
        element type as well.
        """
        table_VD = self._matrix([Rows("model.embed_tokens", rows)], columns)
        if tied:
            self._used.add("lm_head.weight")  # some checkpoints carry the copy
            head = make_linear(table_VD, None, self._format)
            return table_VD.to(table_dtype(self._format, self._device)), head
        table_VD = table_VD.to(table_dtype(self._format, self._device))
        return table_VD, self.linear([Rows("lm_head", rows)], columns, bias=False)

    def finish(self) -> None:
        """Raises ModelLoadError if the source has tensors that no parameter asked for."""
        unexpected = [name for name in self._source.names if name not in self._used and not _IGNORED.fullmatch(name)]
        if unexpected:
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise ModelLoadError(
                f"{self._source.origin}: unexpected tensor {unexpected[0]!r}{more}: the config describes another model"
            )

    def _matrix(self, parts: Sequence[Rows], columns: int) -> Tensor:
        weight_OI = torch.empty(
            sum(part.count for part in parts), columns, dtype=staging_dtype(self._format, self._device), device=self._device
        )
        row = 0
        for part in parts:
            self._read_into(weight_OI[row : row + part.count], f"{part.module}.weight", part.head_dim)
            row += part.count
        return weight_OI

    def _read_into(self, out: Tensor, name: str, head_dim: int | None) -> None:
        stored = self._source.read(name, tuple(out.shape))
        if head_dim is not None and not self._source.rows_in_pairs:
            stored, out = halves_as_pairs(stored, head_dim), out.unflatten(0, (-1, head_dim // 2, 2))
        out.copy_(stored)
        self._used.add(name)
        self._elements_done += stored.numel()
        if self._progress is not None:
            self._progress(self._elements_done, max(self._elements_done, self._source.total_elements))
