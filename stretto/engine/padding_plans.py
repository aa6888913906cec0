"""Plans that take every path of a step with prompt chunks, on the padding row: what they compile, no request waits for.

Decides nothing else. Legend: B rows, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stretto.config import SchedulerConfig
from stretto.engine.sampling_rows import SamplingMix
from stretto.scheduler.batch import StepPlan

_PLAIN = SamplingMix(False, False, 0, False, False, False, -1)
_GUARDED = replace(_PLAIN, any_min_tokens=True)
_BIASED = replace(_PLAIN, max_biases=1)
_ALL = replace(_BIASED, any_top_p=True, any_min_tokens=True, num_logprobs=0)
"""With adjusted logits sampling runs in float32, which are kernels of their own."""
_SHORT, _LONG = 32, 1024
"""Chunks whose queries are cut into small and into large blocks."""


def padding_plans(config: SchedulerConfig, row_steps: tuple[int, ...]) -> Iterator[tuple[int, StepPlan]]:
    """(tokens that the padding row has before, a step of one chunk of it), one after the other.

    `row_steps`: numbers of decode rows up to which the attention of these is cut by one kernel.
    """
    decode_rows = {min(rows, config.max_rows - 1) for rows in (1, *row_steps)}
    runs = [(_SHORT, 0, rows, _PLAIN) for rows in sorted(decode_rows)]
    runs += [(_SHORT, 0, 0, mix) for mix in (_PLAIN, _GUARDED, _BIASED, _ALL)]
    runs += [(length, 1, 0, _PLAIN) for length in (_SHORT, _LONG)]
    for length, past, decodes, mix in runs:
        tokens = min(length, config.max_model_len - 1, config.max_num_batched_tokens - decodes)
        yield past, _padding_plan(tokens, past, decodes, mix)


def _padding_plan(tokens: int, past: int, decodes: int, mix: SamplingMix) -> StepPlan:
    """A prompt chunk of the padding row after `past` tokens, behind `decodes` decode rows of it."""
    rows, none = decodes + 1, np.empty(0, np.int64)
    zeros_B = np.zeros(rows, np.int64)
    return StepPlan(
        index=0,
        slots_B=zeros_B,
        num_new_B=np.array([1] * decodes + [tokens]),
        start_B=zeros_B + past,
        num_decode=decodes,
        prefill_tokens=np.zeros(tokens, np.int32),
        sampled_S=np.arange(rows),
        position_S=zeros_B + past + 1,
        is_last_S=np.zeros(rows, np.bool_),
        admitted=(),
        page_slot_U=none,
        page_index_U=none,
        page_id_U=none,
        max_pages=1,
        page_table_BM=None,
        mix=mix,
    )
