"""Steps with prompt chunks in one launch: all layers of a model, captured by number of tokens.

Launched kernel by kernel such a step costs the host some milliseconds, in which a GPU computes a few hundred tokens of
a small model and then waits. Captured, it depends on nothing but what `derive_mixed` leaves on the device: inputs of
each token, padding included, and lists of the work of attention. One graph serves any mix of decode rows and chunks
that has so many tokens. What is before the layers (the plan) is launched; what is behind them (the head and the choice
of tokens) is a graph of the runner's. Owns the graphs and the tensors in which they leave their results; the layers are
the model's.

Legend: B rows, T tokens, N query heads, H head dim, D hidden, R slots, M pages of a request.
"""

from __future__ import annotations

import bisect
from dataclasses import fields

import torch
from torch import Tensor

from stretto.attention.triton_paged import PagedStep, TritonPagedAttention
from stretto.engine.graphs import Record, StepGraphs
from stretto.kernels.elementwise import sum_parts
from stretto.kernels.plan import StepInputs
from stretto.kernels.prefill_attention import query_block
from stretto.kernels.prefill_work import PrefillWork
from stretto.models.fused import FusedDecoder

_SPARE_PROGRAMS = 4
"""Programs of prefill attention beyond those that one chunk of all tokens needs: so many more chunks begin at once."""


class PromptGraphs:
    """The layers of steps that have prompt chunks.

    For each size there are several graphs, by how many decode rows there are at most: attention is cut otherwise then,
    and without any it has a kernel less.
    """

    def __init__(
        self,
        model: FusedDecoder,
        attention: TritonPagedAttention,
        inputs: StepInputs,
        prefill_works: dict[int, PrefillWork],
        page_table_RM: Tensor,
        sizes: tuple[int, ...],
    ) -> None:
        """`sizes`: ascending numbers of tokens; a step is padded to the next one. May be empty: it serves nothing then.

        `prefill_works`: by the queries of a block.
        """
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._prefill_works = prefill_works
        self._page_table_RM = page_table_RM
        self._decodes = (0, *attention.row_steps)
        self.graphs = StepGraphs(sizes, len(self._decodes), self._layers)
        most, config, device = max(sizes, default=0), model.config, page_table_RM.device

        def zeros(*width: int) -> Tensor:
            return torch.zeros(most, *width, dtype=model.dtype, device=device)

        self._residual_TD = zeros(config.hidden_size)
        self._update_TD = zeros(config.hidden_size)
        self._o_TNH = zeros(config.num_heads, config.head_dim)
        """Attention writes no padding rows. What is in them must be numbers, as it comes into page 0."""

    def capture(self, record: Record) -> None:
        """Record all graphs. Blocks."""
        self._forget()
        self.graphs.capture(record)

    def _forget(self) -> None:
        """Make the step on the device one of no rows, tokens or work: the last one may have been larger than a size,
        and attention would go beyond that size's tensors."""
        for field in fields(self._inputs):
            getattr(self._inputs, field.name).zero_()
        for prefill in self._prefill_works.values():
            prefill.num_blocks_1.zero_()
        for rows in self._attention.row_steps:
            work = self._attention.work_for(rows)
            work.line_B2.zero_()
            work.first_row_C.zero_()

    def release(self) -> None:
        """Give the graphs back; none may be running. It serves nothing any more."""
        self.graphs.release()

    def padded(self, num_tokens: int) -> int | None:
        """The size that serves a step of so many tokens; None: it is to be launched kernel by kernel. hot path"""
        sizes = self.graphs.sizes
        if not self.graphs.captured or num_tokens > sizes[-1]:
            return None
        return sizes[bisect.bisect_left(sizes, num_tokens)]

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """Where `forward` leaves what it returns."""
        return self._residual_TD, self._update_TD

    def forward(self, num_tokens: int, num_decode: int) -> tuple[Tensor, Tensor]:
        """As `FusedDecoder.forward` for the tokens in `inputs`; the next call overwrites what it returns. hot path"""
        self.graphs.replay(num_tokens, bisect.bisect_left(self._decodes, num_decode))
        return self._residual_TD[:num_tokens], self._update_TD[:num_tokens]

    def _layers(self, size: int, kind: int) -> None:
        model, inputs, attention = self._model, self._inputs, self._attention
        max_rows = inputs.slot_B.shape[0]
        prefill = self._prefill_works[query_block(model.config.head_dim, size)]
        attention.begin(
            PagedStep(
                page_table_RM=self._page_table_RM,
                slot_B=inputs.slot_B,
                context_B=inputs.context_B,
                query_end_B=inputs.query_end_B,
                positions_T=inputs.positions_T,
                location_T=inputs.location_T,
                num_rows=min(max_rows, size),
                num_decode=min(self._decodes[kind], size),
                prefill=prefill,
                prefill_programs=prefill.most_blocks(size, _SPARE_PROGRAMS),
                # One kernel that reads the cache serves chunks with and without a past.
                fresh=False,
                longest_chunk=size,
                out_TNH=self._o_TNH,
            )
        )
        residual_TD = model.embed(inputs.input_ids_T[:size])
        residual_TD, update_TD = model.forward(residual_TD, attention.attend_projected, decodes=True)
        assert update_TD is not None  # sizes are larger than what runs without
        if update_TD.dim() == 3:
            update_TD = sum_parts(update_TD, model.dtype)
        self._residual_TD[:size].copy_(residual_TD)
        self._update_TD[:size].copy_(update_TD)
