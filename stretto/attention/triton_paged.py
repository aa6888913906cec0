"""The Triton attention backend: paged decode and prefill on a GPU, everything read from device-side tables.

Owns the KV cache and the room for the kernels' partial results. It serves two kinds of models: any, through
`AttentionBackend.attend`, and through `attend_projected` one that leaves the norm and turn of its heads to the kernel
that writes the cache. Legend: T tokens of the step, B rows, N query heads, K kv heads, X = N + 2 K, H head dim,
P pages, S page size, L layers, R slots, M pages per request.

Cache layout: [L, 2 (keys, values), P, K, S, H]; one head's positions within a page are adjacent, as they are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.attention.base import AttentionInputs, AttentionShape, IntArray
from stretto.errors import NotSupported
from stretto.kernels.decode_attention import decode_attention
from stretto.kernels.decode_work import DecodeWork, plan_decode, row_steps
from stretto.kernels.invariant_attention import PartScratch, invariant_attention
from stretto.kernels.prefill_attention import prefill_attention, query_block, query_blocks
from stretto.kernels.prefill_work import PrefillWork, plan_prefill
from stretto.kernels.rope_write import HeadTransform, rope_write

logger = logging.getLogger(__name__)

CUDNN_LEAST = 512
CUDNN_MULTIPLE = 128
"""Whole prompts of one length, at least this and a multiple of that, that fill a step may go to cuDNN: 1.5 times as
fast as the paged kernel on an H200."""
CUDNN_COUNTS = (16, 8, 4, 2, 1)
"""So many of them. cuDNN plans for each shape anew, which takes the host 65 ms: only what was planned for is served."""
CUDNN_HEAD_DIM = 128
"""It takes heads up to this, of a multiple of 8."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step as the kernels see it: device tensors, and what the host knows beside them.

    Of a step that is captured in a graph the host knows less: the numbers of rows are the most that there may be, which
    rows there are says the device's `DecodeWork`, `PrefillWork` and `query_end_B` (whose other rows are empty).
    """

    page_table_RM: Tensor
    """int64: pages of each slot in order."""
    slot_B: Tensor
    """int64: each row's line in the page table."""
    context_B: Tensor
    """int64: tokens of each row once this step's are written."""
    query_end_B: Tensor
    """int64: end of each row's new tokens in T; not read where all rows decode."""
    positions_T: Tensor
    location_T: Tensor
    """int64: page * page size + offset of each new token."""
    num_rows: int
    num_decode: int
    """The first rows, with one new token each."""
    prefill: PrefillWork | None
    """Blocks of the other rows' queries; None if there are none."""
    prefill_programs: int
    """How many programs, for each kv head, take those blocks."""
    equal_chunks: int = 0
    """The step is nothing but whole prompts of so many tokens, for which `prepare_equal` was called; 0: it is not."""
    out_TNH: Tensor | None = None
    """Where attention of chunks and decode rows together goes: rows of padding are left as they are. None: anywhere."""


class TritonPagedAttention:
    """`AttentionBackend` on a GPU (or, for tests, under Triton's interpreter)."""

    wants_host_pages = False
    wants_lengths = False
    """Whether `expect` must be told of every step's lengths."""

    def __init__(self, shape: AttentionShape, max_rows: int, *, invariant_up_to: int | None = None) -> None:
        """Allocates the cache, zeroed, and room for steps of `max_rows` rows.

        `invariant_up_to`: prompts and decode rows, of sequences of up to so many tokens, take one kernel, whose results
        depend on nothing but a token's own row. Raises NotSupported if the heads cannot be grouped or the head dim is
        odd.
        """
        if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
            raise NotSupported(
                f"{shape.num_heads} query heads over {shape.num_kv_heads} kv heads of {shape.head_dim}: the first must "
                "be a multiple of the second, and the head dim even"
            )
        self.shape = shape
        self._groups = shape.num_heads // shape.num_kv_heads
        sizes = (shape.num_layers, 2, shape.num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self._cache = torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
        self._keys = tuple(self._cache[:, 0].unbind())
        self._values = tuple(self._cache[:, 1].unbind())
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.device)
        self._works = [(rows, DecodeWork.allocate(rows, *heads)) for rows in row_steps(max_rows, shape.num_kv_heads)]
        self._rows = torch.arange(max_rows, device=shape.device)
        self._decode_end_B = torch.arange(1, max_rows + 1, device=shape.device)
        self._parts: PartScratch | None = None
        """None: not invariant."""
        if invariant_up_to is not None:
            self._parts = PartScratch.allocate(max_rows, *heads[:3], invariant_up_to, shape.device)
        self._cudnn = (
            self._parts is None
            and shape.dtype.itemsize == 2
            and shape.head_dim <= CUDNN_HEAD_DIM
            and shape.head_dim % 8 == 0
            and _has_cudnn_attention(shape.device)
        )
        self._step: PagedStep | None = None

    def work_for(self, rows: int) -> DecodeWork:
        """Where the kernels look up how the attention of so many decode rows is cut."""
        return next(work for most, work in self._works if rows <= most)

    @property
    def row_steps(self) -> tuple[int, ...]:
        """Numbers of decode rows up to which `work_for` is one and the same."""
        return tuple(most for most, _ in self._works)

    @property
    def query_blocks(self) -> tuple[int, ...]:
        """What `query_block` may be."""
        return query_blocks(self.shape.head_dim, self._groups)

    def query_block(self, num_tokens: int) -> int:
        """Queries of a block of `PrefillWork` in a step of so many tokens. hot path"""
        return query_block(self.shape.head_dim, self._groups, num_tokens)

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the KV cache."""
        return self._cache.nbytes

    def poison_page(self, page: int) -> None:
        """Fill a released page with NaN in every layer."""
        self._cache[:, :, page] = float("nan")

    def begin_step(self, inputs: AttentionInputs) -> None:
        """See `AttentionBackend`. hot path"""
        num_new_B = inputs.num_new_B_host
        num_rows = len(num_new_B)
        chunks = np.flatnonzero(num_new_B > 1)
        num_decode = int(chunks[0]) if len(chunks) else num_rows
        if num_decode:
            plan_decode(inputs.context_B, num_decode, self.shape.num_kv_heads, self.work_for(num_decode))
        query_end_B, num_tokens, num_chunks = inputs.query_start_B1[1:], int(num_new_B.sum()), num_rows - num_decode
        prefill = None
        if num_chunks:
            prefill = PrefillWork.allocate(num_tokens, num_chunks, self.query_block(num_tokens), self.shape.device)
            plan_prefill(self._rows, inputs.context_B, query_end_B, num_rows, num_decode, prefill)
        self.begin(
            PagedStep(
                page_table_RM=inputs.page_table_BM,
                slot_B=self._rows,
                context_B=inputs.context_B,
                query_end_B=query_end_B,
                positions_T=inputs.kv_location_T,
                location_T=inputs.kv_location_T,
                num_rows=num_rows,
                num_decode=num_decode,
                prefill=prefill,
                prefill_programs=0 if prefill is None else prefill.most_blocks(num_tokens - num_decode, num_chunks),
            )
        )

    def attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """See `AttentionBackend`. hot path"""
        step = self._current()
        location_T = step.location_T[: q_TNH.shape[0]]
        page_T = torch.div(location_T, self.shape.page_size, rounding_mode="floor")
        offset_T = location_T % self.shape.page_size
        self._keys[layer][page_T, :, offset_T] = k_TKH.to(self.shape.dtype)
        self._values[layer][page_T, :, offset_T] = v_TKH.to(self.shape.dtype)
        return self._attend(layer, q_TNH.to(self.shape.dtype), k_TKH, v_TKH).to(q_TNH.dtype)

    def expect(self, num_new_B: IntArray, context_B: IntArray) -> None:
        """What the host knows of the next step's rows. Nothing to this backend, which reads the device's tables."""

    def equal_lengths(self, num_tokens: int, longest: int) -> tuple[int, ...]:
        """Ascending lengths, up to `longest`, of whole prompts that fill a step of `num_tokens` and suit cuDNN best."""
        if not self._cudnn:
            return ()
        lengths = [num_tokens // count for count in CUDNN_COUNTS if num_tokens % count == 0]
        return tuple(n for n in lengths if CUDNN_LEAST <= n <= longest and n % CUDNN_MULTIPLE == 0)

    def prepare_equal(self, num_tokens: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Have cuDNN plan for steps of `num_tokens` in prompts of each of `lengths`, for the calling thread.

        Returns the lengths that it then serves: all, or, where it has no plan for one of them, none. Blocks for up to
        two seconds.
        """
        shape = self.shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        if not lengths:
            return ()
        qkv_TXH = torch.zeros(num_tokens, sum(heads), shape.head_dim, dtype=shape.dtype, device=shape.device)
        q_TNH, k_TKH, v_TKH = qkv_TXH.split_with_sizes(heads, dim=1)
        try:
            for length in lengths:
                self._attend_equal(q_TNH, k_TKH, v_TKH, length)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not about plans: nothing would go well after it
        except RuntimeError as error:
            logger.info("cuDNN does not serve prompts of %d tokens, so our kernel does: %s", length, error)
            self._cudnn = False
            return ()
        return lengths

    def begin(self, step: PagedStep) -> None:
        """Take the step's tensors; `work` must be filled for its decode rows. hot path"""
        self._step = step

    def attend_projected(self, layer: int, qkv_TXH: Tensor, transform: HeadTransform) -> Tensor:
        """o_TNH from the raw projection: heads normed and turned, in place unless it is in parts, the cache written.

        hot path
        """
        step = self._current()
        cache = self._keys[layer], self._values[layer]
        qkv_TXH = rope_write(qkv_TXH, step.positions_T, step.location_T, transform, *cache)
        heads, kv_heads = transform.num_heads, transform.num_kv_heads
        q_TNH, k_TKH, v_TKH = qkv_TXH.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        return self._attend(layer, q_TNH, k_TKH, v_TKH)

    def _attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """The new keys and values are in the cache already."""
        step, shape = self._current(), self.shape
        decodes = step.num_decode
        keys, values = self._keys[layer], self._values[layer]
        if self._parts is not None:
            return self._attend_invariantly(q_TNH, keys, values, self._parts)
        if step.equal_chunks:
            return self._attend_equal(q_TNH, k_TKH, v_TKH, step.equal_chunks)
        out_TNH = self._room_for(q_TNH)
        if decodes:
            decode_attention(
                q_TNH[:decodes],
                keys,
                values,
                step.page_table_RM,
                step.slot_B,
                step.context_B,
                shape.scale,
                self.work_for(decodes),
                out_TNH[:decodes],
            )
        if step.prefill is not None:
            prefill_attention(
                q_TNH,
                keys,
                values,
                step.page_table_RM,
                step.prefill,
                step.prefill_programs,
                shape.scale,
                out_TNH,
            )
        return out_TNH

    def _attend_invariantly(self, q_TNH: Tensor, keys: Tensor, values: Tensor, parts: PartScratch) -> Tensor:
        step = self._current()
        only_decodes = step.prefill is None
        out_TNH = self._room_for(q_TNH)
        invariant_attention(
            q_TNH,
            keys,
            values,
            step.page_table_RM,
            step.slot_B,
            step.context_B,
            self._decode_end_B if only_decodes else step.query_end_B,
            step.num_rows,
            self.shape.scale,
            out_TNH,
            parts if only_decodes and parts.serves(step.num_rows) else None,
        )
        return out_TNH

    def _room_for(self, q_TNH: Tensor) -> Tensor:
        """Where the step's o_TNH goes."""
        out_TNH = self._current().out_TNH
        if out_TNH is None:
            return torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        return out_TNH[: q_TNH.shape[0]]

    def _attend_equal(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, length: int) -> Tensor:
        """o_TNH of prompts of `length` tokens: each over itself, causal."""
        q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        # What `scaled_dot_product_attention` calls; choosing it there takes the host longer than the call.
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        o_BNtH: Tensor = cudnn(q, k, v, None, False, 0.0, True, False, scale=self.shape.scale)[0]
        return o_BNtH.transpose(1, 2).flatten(0, 1)

    def _current(self) -> PagedStep:
        if self._step is None:
            raise RuntimeError("attention is asked for before a step began")
        return self._step


def _has_cudnn_attention(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
