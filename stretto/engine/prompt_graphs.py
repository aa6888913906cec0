"""Steps with prompt chunks in one launch: all layers of a model, captured by number of tokens.

Launched kernel by kernel such a step costs the host some milliseconds, in which a GPU computes a few hundred tokens of
a small model and then waits. Captured, it depends on nothing but what `derive_mixed` leaves on the device: inputs of
each token, padding included, and lists of the work of attention. One graph serves any mix of decode rows and chunks
that has so many tokens. What is before the layers (the plan) is launched; what is behind them (the head and the choice
of tokens) is a graph of the runner's. Owns the graphs and the tensors in which they leave their results; the layers are
the model's.

Legend: B rows, S sampled rows, T tokens, N query heads, H head dim, D hidden, R slots, M pages of a request.
"""

from __future__ import annotations

import bisect
from dataclasses import fields

import torch
from torch import Tensor

from stretto.attention.triton_paged import PagedStep, TritonPagedAttention
from stretto.engine.graphs import MOST_PADDED, Record, StepGraphs
from stretto.kernels.plan import StepInputs
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
        choices: tuple[int, ...],
        equal_lengths: tuple[int, ...] = (),
    ) -> None:
        """`sizes`: ascending numbers of tokens, those of `graphs.token_ladder`. May be empty: it serves nothing then.

        `prefill_works`: by the queries of a block. `choices`: ascending numbers of sampled rows, up to the most that
        there may be, for which what follows is captured. `equal_lengths`: ascending, for which attention is prepared in
        steps of the largest size; none if there are no sizes.
        """
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._prefill_works = prefill_works
        self._page_table_RM = page_table_RM
        self._choices = choices
        self._decodes = (0, *attention.row_steps)
        self.graphs = StepGraphs(sizes, len(self._decodes), self._layers)
        self._equal_graphs = StepGraphs(equal_lengths, 1, self._equal_layers)
        most, config, device = max(sizes, default=0), model.config, page_table_RM.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=model.dtype, device=device)

        rows = inputs.slot_B.shape[0]
        self.results = zeros(rows, config.hidden_size), zeros(rows, config.hidden_size)
        """Where a replay leaves what `FusedDecoder.forward` returns, of the sampled rows."""
        self._o_TNH = zeros(most, config.num_heads, config.head_dim)
        """Attention writes no padding rows. What is in them must be numbers, as it comes into page 0."""

    def capture(self, record: Record, *, equal: bool) -> None:
        """Record all graphs; `equal`: those of prompts of one length, too. Blocks."""
        self._forget()
        self.graphs.capture(record)
        if equal:
            self._equal_graphs.capture(record)

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

    @property
    def capture_s(self) -> float:
        """As that of `StepGraphs`."""
        return self.graphs.capture_s + self._equal_graphs.capture_s

    def release(self) -> None:
        """Give the graphs back; none may be running. It serves nothing any more."""
        self._equal_graphs.release()
        self.graphs.release()

    def padded(self, num_tokens: int) -> int | None:
        """The size that serves a step of so many tokens; None: it is to be launched kernel by kernel. hot path"""
        sizes = self.graphs.sizes
        if not self.graphs.captured or num_tokens > sizes[-1]:
            return None
        size = sizes[bisect.bisect_left(sizes, num_tokens)]
        return size if size == num_tokens or size <= MOST_PADDED else None

    def replay(self, num_tokens: int, num_decode: int, equal_chunks: int) -> None:
        """`FusedDecoder.forward` for the tokens in `inputs`, of a number that is `padded`, into `results`.

        `equal_chunks`: see `PagedStep`. hot path
        """
        if equal_chunks:
            self._equal_graphs.replay(equal_chunks, 0)
        else:
            self.graphs.replay(num_tokens, bisect.bisect_left(self._decodes, num_decode))

    def _equal_layers(self, length: int, kind: int) -> None:
        self._layers(self.graphs.sizes[-1], kind, length)

    def _layers(self, size: int, kind: int, equal_chunks: int = 0) -> None:
        model, inputs, attention = self._model, self._inputs, self._attention
        max_rows = inputs.slot_B.shape[0]
        prefill = self._prefill_works[attention.query_block(size)]
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
                equal_chunks=equal_chunks,
                out_TNH=self._o_TNH,
            )
        )
        residual_TD = model.embed(inputs.input_ids_T[:size])
        # As many rows as what follows may read, or it would add to what an earlier step left in the others.
        most_wanted = bisect.bisect_left(self._choices, min(size, max_rows))
        wanted_S = inputs.last_token_S[: self._choices[most_wanted]]
        found = model.forward(residual_TD, attention.attend_projected, decodes=True, wanted_S=wanted_S)
        for result_SD, found_SD in zip(self.results, found, strict=True):
            assert found_SD is not None  # sizes are larger than what runs without an update
            result_SD[: len(wanted_S)].copy_(found_SD)
