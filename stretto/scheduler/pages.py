"""PageBook: which pages each running request holds, on the host side of the page table.

Gives pages out and takes them back through the pool and the prefix cache; decides nothing about who comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stretto.cache.base import Prefix, PrefixCache
from stretto.cache.page_pool import PagePool
from stretto.config import SchedulerConfig
from stretto.request import Request
from stretto.scheduler.batch import IntArray
from stretto.scheduler.prefill import Chunk
from stretto.scheduler.slots import SlotTable


class PageBook:
    """Page bookkeeping of the slots: counts are in pages unless a name says tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        pool: PagePool,
        cache: PrefixCache,
        *,
        on_taken: Callable[[list[int]], None],
        on_evicted: Callable[[list[int]], None],
    ) -> None:
        """`on_taken` and `on_evicted` are told the pages that got an owner, and that the cache gave up."""
        self.pool = pool
        self._on_taken = on_taken
        self._on_evicted = on_evicted
        self._cache = cache
        self._slots = slots
        self._page_size = config.page_size
        self._new: list[tuple[int, int, int]] = []
        """(slot, index, page) given since the last plan."""

    def needed(self, chunk: Chunk) -> int:
        """Pages that the chunk's request lacks for the chunk's tokens."""
        slot = chunk.request.slot
        return self._pages_of(int(self._slots.length[slot]) + chunk.num_tokens) - int(self._slots.num_pages[slot])

    def reserve(self, decode: IntArray, chunks: Sequence[Chunk]) -> bool:
        """Give all these rows the pages they lack, or none of them any (False). hot path"""
        slots = self._slots
        lacking = decode[slots.num_pages[decode] * self._page_size <= slots.length[decode]]
        needs = [self.needed(chunk) for chunk in chunks]
        total = len(lacking) + sum(needs)
        if total == 0:
            return True
        if not self.has_room(total):
            return False
        if len(lacking):
            self._give_one_each(lacking)
        for chunk, need in zip(chunks, needs, strict=True):
            self.give(chunk.request, need)
        return True

    def _give_one_each(self, lacking: IntArray) -> None:
        """Append a new page to each of these slots' requests; that many must be available. hot path"""
        slots = self._slots
        pages = self.pool.take(len(lacking))
        self._on_taken(pages)
        index = slots.num_pages[lacking]
        slots.page_table[lacking, index] = pages
        slots.num_pages[lacking] = index + 1
        for slot, page in zip(lacking.tolist(), pages, strict=True):
            slots.holder(slot).pages.append(page)
        self._new.extend(zip(lacking.tolist(), index.tolist(), pages, strict=True))

    def has_room(self, need: int) -> bool:
        """Whether `need` pages are free, after evicting from the cache where that helps."""
        lacking = need - self.pool.num_free
        if lacking > 0 and self._cache.num_evictable:
            self._on_evicted(self._cache.evict(lacking))
        return self.pool.num_free >= need

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted from the cache."""
        return self.pool.num_free + self._cache.num_evictable

    def num_coming(self, leaving: Sequence[Request]) -> int:
        """Pages that become available once these requests are released: free, or held by the cache alone."""
        freed = self.pool.num_freed_by([page for request in leaving for page in request.pages])
        return freed + self._cache.num_unlocked_by([r.prefix for r in leaving if r.prefix is not None])

    def can_admit(self, request: Request, prefix: Prefix, missing: int, num_running: int) -> bool:
        """Whether a waiting request's whole prompt fits now, beside what the running ones need soon.

        What they need soon: the `missing` pages of the prompts being computed, and a page for each running request, so
        that an admission is not followed at once by a preemption.
        """
        own = self._pages_of(len(request.token_ids)) - len(prefix.pages)
        return own + missing + num_running <= self.num_available

    def missing(self, prefilling: Sequence[Request]) -> int:
        """Pages that these requests need for the rest of their prompts."""
        slots = self._slots
        return sum(max(0, self._pages_of(int(slots.target[r.slot])) - int(slots.num_pages[r.slot])) for r in prefilling)

    def adopt(self, request: Request, prefix: Prefix) -> None:
        """Put a locked cached prefix at the beginning of `request`'s pages."""
        request.prefix = prefix
        if prefix.num_tokens:
            self.pool.share(prefix.pages)
            self._append(request, prefix.pages)
            self._slots.length[request.slot] = prefix.num_tokens

    def give(self, request: Request, num_pages: int) -> None:
        """Append `num_pages` new pages, which must be available."""
        if num_pages and self.has_room(num_pages):
            pages = self.pool.take(num_pages)
            self._on_taken(pages)
            self._append(request, pages)
        elif num_pages:
            raise RuntimeError(f"{num_pages} pages for request {request.uid}, but {self.pool.num_free} are free")

    def _append(self, request: Request, pages: Sequence[int]) -> None:
        slot, index = request.slot, len(request.pages)
        self._new.extend((slot, index + i, page) for i, page in enumerate(pages))
        self._slots.page_table[slot, index : index + len(pages)] = pages
        self._slots.num_pages[slot] = index + len(pages)
        request.pages.extend(pages)

    def drain(self) -> tuple[IntArray, IntArray, IntArray]:
        """(slots, indices, pages) given since the last call: the changes that go up with the next plan."""
        if not self._new:
            return _NONE, _NONE, _NONE
        new = np.array(self._new, np.int64)
        self._new.clear()
        return new[:, 0], new[:, 1], new[:, 2]

    def forget(self, request: Request) -> list[int]:
        """Take what `request` put into the cache, and nobody else uses, out of it; returns the pages free now."""
        if request.prefix is None:
            return []
        freed = self._cache.forget(request.prefix)
        request.prefix = None
        return freed

    def take_back(self, request: Request) -> list[int]:
        """Take all of `request`'s pages; returns those that are free now."""
        if request.prefix is not None:
            self._cache.unlock(request.prefix)
            request.prefix = None
        slot = request.slot
        self._new = [new for new in self._new if new[0] != slot]
        freed = self.pool.give_back(request.pages)
        request.pages.clear()
        return freed

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


_NONE = np.empty(0, np.int64)
