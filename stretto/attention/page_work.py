"""Which pages a decode step reads, and in which order: runs of adjacent pages where they lie, the rest gathered.

Plain numpy on the host; touches no tensor. Legend: B decode rows, M pages of the longest row, X pages of all rows.
A *slot* is a place in the step's batch of page-sized products: first the pages of each run, holes included, then the
gathered ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.attention.base import IntArray

RUN_BYTES = 192 * 1024
"""A run with less than this in use is gathered instead. Two more batched products take about as long as moving it."""

HOLE_BYTES = 256 * 1024
"""A gap between two runs up to this is read along, its results ignored, rather than begin another run."""


@dataclass(frozen=True, slots=True)
class PageWork:
    """The page-sized products of a decode step."""

    num_pages_B: IntArray
    pages_BM: IntArray
    """The table this was planned for; past a row's last page it is not looked at."""
    runs: tuple[tuple[int, int], ...]
    """(first page, number of pages) of each run, in slot order."""
    gathered_pages: IntArray
    """Pages of the slots after the runs."""
    num_slots: int
    row_X: IntArray
    page_index_X: IntArray
    slot_X: IntArray
    """For every page of every row, row by row: its row, its place in the row, its slot."""
    slot_BM: IntArray
    """The same as a table; past a row's last page the row's first slot, as something finite to be masked."""

    def covers(self, num_pages_B: IntArray, pages_BM: IntArray) -> bool:
        """True if this plan is right for these rows too, as it is until a row begins a page."""
        if not np.array_equal(num_pages_B, self.num_pages_B):
            return False
        most = self.pages_BM.shape[1]
        in_use_BM = np.arange(most) < num_pages_B[:, None]
        return bool(((pages_BM[:, :most] == self.pages_BM) | ~in_use_BM).all())


def plan_page_work(num_pages_B: IntArray, pages_BM: IntArray, page_bytes: int) -> PageWork:
    """Plan the products for rows that hold the first `num_pages` (at least 1) of `pages`; pages may be shared.

    `page_bytes`: keys and values of one page in one layer. hot path (only when a row begins a page or rows change)
    """
    most = int(num_pages_B.max())
    pages_BM = pages_BM[:, :most].copy()
    row_X, page_index_X = np.nonzero(np.arange(most) < num_pages_B[:, None])
    page_X = pages_BM[row_X, page_index_X]

    # A page that several rows share is read once for each: the second readers form runs of their own, and so on.
    order = np.argsort(page_X, kind="stable")
    sorted_pages = page_X[order]
    first_of_page = np.r_[True, sorted_pages[1:] != sorted_pages[:-1]]
    position = np.arange(len(order))
    reader = position - np.maximum.accumulate(np.where(first_of_page, position, 0))
    if reader.any():
        by_reader = np.lexsort((sorted_pages, reader))
        order, sorted_pages, reader = order[by_reader], sorted_pages[by_reader], reader[by_reader]

    gap = sorted_pages[1:] - sorted_pages[:-1]
    begins = np.r_[True, (gap > 1 + HOLE_BYTES // page_bytes) | (reader[1:] != reader[:-1])]
    begin_R = np.flatnonzero(begins)
    end_R = np.r_[begin_R[1:], len(order)]
    kept_R = (end_R - begin_R) * page_bytes >= RUN_BYTES
    if len(begin_R) <= 2:
        kept_R[:] = True
    first_page_R, last_page_R = sorted_pages[begin_R], sorted_pages[end_R - 1]
    length_R = np.where(kept_R, last_page_R - first_page_R + 1, 0)
    first_slot_R = np.cumsum(length_R) - length_R

    run_of = np.cumsum(begins) - 1
    in_run = kept_R[run_of]
    slot_sorted = first_slot_R[run_of] + sorted_pages - first_page_R[run_of]
    num_run_slots, num_gathered = int(length_R.sum()), int((~in_run).sum())
    slot_sorted[~in_run] = num_run_slots + np.arange(num_gathered)
    slot_X = np.empty_like(slot_sorted)
    slot_X[order] = slot_sorted

    first_X = np.cumsum(num_pages_B) - num_pages_B
    slot_BM = np.repeat(slot_X[first_X][:, None], most, axis=1)
    slot_BM[row_X, page_index_X] = slot_X
    runs = tuple(zip(first_page_R[kept_R].tolist(), length_R[kept_R].tolist(), strict=True))
    return PageWork(
        num_pages_B=num_pages_B,
        pages_BM=pages_BM,
        runs=runs,
        gathered_pages=sorted_pages[~in_run],
        num_slots=num_run_slots + num_gathered,
        row_X=row_X,
        page_index_X=page_index_X,
        slot_X=slot_X,
        slot_BM=slot_BM,
    )
