"""From checkpoint tensors to a rank's parameters: cut, fused, reordered, and packed into their format one at a time.

Owns the path of a weight from its source into memory. At any time one parameter is unpacked, so the peak stays near the
size of the finished model. Legend: O, I rows and columns of a weight; H head dim; V vocabulary; D hidden.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.distributed.group import SOLO, TensorGroup
from stretto.errors import ModelLoadError, NotSupported
from stretto.layers.embedding import Embedding
from stretto.layers.formats import activation_dtype
from stretto.layers.linear import Linear, make_linear
from stretto.layers.norm import RMSNorm
from stretto.layers.parallel import RowParallelLinear, VocabularyParallelEmbedding, VocabularyParallelHead
from stretto.models.rope import halves_as_pairs
from stretto.models.shard import ModelShard
from stretto.models.sources import TensorPart, WeightSource

Progress = Callable[[int, int], None]
"""(done, total), in elements of the checkpoint: called after each tensor, of which a shard may have read a part."""

# How much may be packed before freed memory is given back to the system.
_TRIM_BYTES = 512 << 20
# Constants that old checkpoints carry and every program recomputes.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Rows:
    """The part of a parameter's rows that one checkpoint module gives."""

    module: str
    """Name without ".weight"."""
    count: int
    """Rows that the module has, on all ranks together."""
    head_dim: int | None = None
    """Set for q and k: their rows are heads of this size and are brought into pair order (rope.py)."""
    share: range | None = None
    """The rows that the rank holds (of q and k: whole heads); None: all."""

    @property
    def num_rows(self) -> int:
        """Rows that are read."""
        return self.count if self.share is None else len(self.share)


class WeightReader:
    """Builds parameters out of a source's tensors; `finish` verifies that nothing was left over."""

    def __init__(
        self,
        source: WeightSource,
        *,
        weight_format: str,
        device: torch.device,
        group: TensorGroup = SOLO,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self._group = group
        self.activation_dtype = activation_dtype(weight_format, device)
        self._source = source
        self.weight_format = weight_format
        # Wide enough for the packer of the format, and already the final type where nothing is packed.
        self._staging_dtype = torch.float32 if weight_format == "int4" else self.activation_dtype
        self._progress = progress
        self._used: set[str] = set()
        self._elements_done = 0
        self._untrimmed_bytes = 0

    def linear(self, parts: Sequence[Rows], columns: int, *, bias: bool) -> Linear:
        """One linear layer whose rows are those of `parts` on top of each other.

        Raises ModelLoadError for a tensor, NotSupported if the weight format cannot hold it.
        """
        weight_OI = self._matrix(parts, columns)
        return self._packed(weight_OI, self._bias(parts) if bias else None, parts)

    def row_parallel(self, module: str, rows: int, columns: int, share: range, *, bias: bool) -> Linear:
        """One linear layer whose weight has `columns` columns, of which the rank holds `share`. Raises as `linear`."""
        parts = [Rows(module, rows)]
        if self._group.size == 1:
            return self.linear(parts, columns, bias=bias)
        weight_OI = torch.empty(rows, len(share), dtype=self._staging_dtype, device=self.device)
        self._read_into(weight_OI, f"{module}.weight", (rows, columns), TensorPart(1, share))
        # One rank adds the bias, as the products are summed.
        bias_O = self._bias(parts) if bias and self._group.rank == 0 else None
        if bias and bias_O is None:
            self._pass_over(f"{module}.bias", rows)
        return RowParallelLinear(self._packed(weight_OI, bias_O, parts), self._group)

    def norm(self, module: str, size: int, eps: float) -> RMSNorm:
        """A norm over hidden states. Raises ModelLoadError."""
        return RMSNorm(self.vector(f"{module}.weight", size), eps, self.activation_dtype)

    def vector(self, name: str, size: int, *, in_pairs: bool = False) -> Tensor:
        """One vector in the activation dtype; `in_pairs` if it lies along a q or k head. Raises ModelLoadError."""
        out = torch.empty(size, dtype=self.activation_dtype, device=self.device)
        self._read_into(out, name, (size,), head_dim=size if in_pairs else None)
        return out

    def embedding_and_head(
        self, shard: ModelShard, *, tied: bool
    ) -> tuple[Embedding | VocabularyParallelEmbedding, Linear]:
        """Token embedding and the layer from hidden states to logits; tied, they share memory if the format lets them.

        Raises as `linear`.
        """
        vocabulary, columns = shard.config.vocab_size, shard.config.hidden_size
        share = shard.vocabulary if shard.size > 1 else None
        parts = [Rows("model.embed_tokens", vocabulary, share=share)]
        weight_VD = self._matrix(parts, columns, shard.vocabulary_rows)
        embedding = Embedding(weight_VD, self.weight_format)
        if not tied:
            parts = [Rows("lm_head", vocabulary, share=share)]
            del weight_VD  # before the next one of this size is read
            weight_VD = self._matrix(parts, columns, shard.vocabulary_rows)
        self._used.add("lm_head.weight")  # some tied checkpoints carry the copy
        head = self._packed(weight_VD, None, parts, head=True)
        if share is None:
            return embedding, head
        split = VocabularyParallelEmbedding(embedding, shard.rank * shard.vocabulary_rows, self._group)
        return split, VocabularyParallelHead(head, share, vocabulary, self._group)

    def finish(self) -> None:
        """Raises ModelLoadError if the source has tensors that no parameter asked for."""
        _return_freed_memory()
        unexpected = [name for name in self._source.names if name not in self._used and not _IGNORED.fullmatch(name)]
        if unexpected:
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise ModelLoadError(
                f"{self._source.origin}: unexpected tensor {unexpected[0]!r}{more}: the config describes another model"
            )

    def _matrix(self, parts: Sequence[Rows], columns: int, padded_rows: int = 0) -> Tensor:
        """The parts' rows, and zeros behind them up to `padded_rows`."""
        rows = sum(part.num_rows for part in parts)
        weight_OI = torch.empty(max(rows, padded_rows), columns, dtype=self._staging_dtype, device=self.device)
        self._stack(weight_OI, parts, "weight", (columns,))
        weight_OI[rows:].zero_()
        return weight_OI

    def _bias(self, parts: Sequence[Rows]) -> Tensor:
        bias_O = torch.empty(sum(part.num_rows for part in parts), dtype=self.activation_dtype, device=self.device)
        self._stack(bias_O, parts, "bias", ())
        return bias_O

    def _stack(self, out: Tensor, parts: Sequence[Rows], kind: str, row_shape: tuple[int, ...]) -> None:
        """Read the parts into the rows of `out`, one after the other."""
        row = 0
        for part in parts:
            self._read_into(
                out[row : row + part.num_rows],
                f"{part.module}.{kind}",
                (part.count, *row_shape),
                None if part.share is None else TensorPart(0, part.share),
                part.head_dim,
            )
            row += part.num_rows

    def _packed(self, weight_OI: Tensor, bias_O: Tensor | None, parts: Sequence[Rows], *, head: bool = False) -> Linear:
        self._untrimmed_bytes += weight_OI.nbytes
        if self._untrimmed_bytes > _TRIM_BYTES:
            self._untrimmed_bytes = 0
            _return_freed_memory()
        try:
            return make_linear(weight_OI, bias_O, self.weight_format, head=head)
        except NotSupported as error:
            names = ", ".join(part.module for part in parts)
            raise NotSupported(f"{self._source.origin}: {names}: {error}") from error

    def _read_into(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        part: TensorPart | None = None,
        head_dim: int | None = None,
    ) -> None:
        if out.numel() == 0:  # the last ranks' part of a small vocabulary
            self._pass_over(name, torch.Size(shape).numel())
            return
        stored = self._source.read(name, shape, part)
        if head_dim is not None and not self._source.rows_in_pairs:
            stored, out = halves_as_pairs(stored, head_dim), out.view(-1, head_dim // 2, 2, *out.shape[1:])
        out.copy_(stored)
        if out.dtype == torch.float16 and stored.dtype != torch.float16 and not bool(out.isfinite().all()):
            raise NotSupported(f"{self._source.origin}: tensor {name!r} exceeds float16; use bfloat16 or float32")
        self._pass_over(name, torch.Size(shape).numel())

    def _pass_over(self, name: str, elements: int) -> None:
        """Count a tensor as done with."""
        self._used.add(name)
        self._elements_done += elements
        if self._progress is not None:
            self._progress(self._elements_done, max(self._elements_done, self._source.total_elements))


def _return_freed_memory() -> None:
    """Unpacked and packed weights alternate in the C heap, and glibc keeps the holes: half a model by the end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
