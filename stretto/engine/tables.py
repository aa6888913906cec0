"""DeviceTables: what the device remembers of every slot between steps. Only work on the engine stream touches them.

Legend: R slots, L longest sequence, M pages per request, E stop ids, A admitted requests, U new pages.
"""

from __future__ import annotations

import torch

from stretto.config import SchedulerConfig
from stretto.engine.adjustment import AdjustmentTables
from stretto.engine.sampling_rows import SamplingMix, SamplingRows
from stretto.engine.staging import ADMISSION_WORDS

POISON = 2**40
"""Token id and length of a poisoned row: out of range everywhere."""


class DeviceTables:
    """One row per slot; row 0 is padding. The host keeps exact mirrors in `scheduler.slots.SlotTable`."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        rows = config.num_slots

        def table(*columns: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(rows, *columns, dtype=dtype, device=device)

        self.token_ids_RL = table(config.max_model_len + 1)
        """Prompt and output ids; a sampled token is written at its position, where the next step reads it."""
        self.page_table_RM = table(config.max_pages_per_request)
        self.length_R = table()
        """Tokens whose KV is in the cache."""
        self.temperature_R = table(dtype=torch.float32)
        self.top_k_R = table()
        self.top_p_R = table(dtype=torch.float32)
        self.min_p_R = table(dtype=torch.float32)
        self.seed_R = table()
        self.min_position_R = table()
        self.stop_ids_RE = table(config.max_stop_ids)
        self.adjustment = AdjustmentTables(rows, device)

    def admit(self, words_AW: torch.Tensor, words64_AW: torch.Tensor) -> None:
        """Set the rows of newly admitted requests from packed words (int32, and the same as int64)."""
        slot_A = words64_AW[:, 0]
        self.length_R[slot_A] = words64_AW[:, 1]
        self.top_k_R[slot_A] = words64_AW[:, 2]
        self.seed_R[slot_A] = (words64_AW[:, 3] & 0xFFFFFFFF) | (words64_AW[:, 4] << 32)
        self.min_position_R[slot_A] = words64_AW[:, 5]
        floats_A3 = words_AW[:, 6:ADMISSION_WORDS].contiguous().view(torch.float32)
        self.temperature_R[slot_A] = floats_A3[:, 0]
        self.top_p_R[slot_A] = floats_A3[:, 1]
        self.min_p_R[slot_A] = floats_A3[:, 2]
        self.stop_ids_RE[slot_A] = words64_AW[:, ADMISSION_WORDS:]

    def set_pages(self, slot_U: torch.Tensor, index_U: torch.Tensor, page_U: torch.Tensor) -> None:
        """Enter new pages into the page tables."""
        self.page_table_RM[slot_U, index_U] = page_U

    def poison_row(self, slot: int) -> None:
        """Make a released row useless: no valid token, no page, no length."""
        self.token_ids_RL[slot].fill_(POISON)
        self.page_table_RM[slot].fill_(0)
        self.length_R[slot].fill_(POISON)

    def sampling_rows(self, slot_S: torch.Tensor, position_S: torch.Tensor, mix: SamplingMix) -> SamplingRows:
        """Sampling parameters of the sampled rows; what `mix` says is unused is not gathered."""
        if mix.all_greedy and not mix.any_min_tokens:
            count = slot_S.shape[0]
            return SamplingRows(
                self.temperature_R[:count],
                self.top_k_R[:count],
                self.top_p_R[:count],
                self.min_p_R[:count],
                self.seed_R[:count],
                position_S,
                self.min_position_R[:count],
                self.stop_ids_RE[:count],
            )
        return SamplingRows(
            self.temperature_R[slot_S],
            self.top_k_R[slot_S],
            self.top_p_R[slot_S],
            self.min_p_R[slot_S],
            self.seed_R[slot_S],
            position_S,
            self.min_position_R[slot_S],
            self.stop_ids_RE[slot_S],
        )
