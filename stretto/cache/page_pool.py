"""PagePool: which KV pages are free and how many holders each other page has. Never touches device memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from stretto.errors import PagesExhausted


class PagePool:
    """Owns every KV page: free, or held with a reference count. Page 0 is padding and never handed out.

    The lowest free pages go out first, so that pages in use stay dense at the low end and a request's pages tend to
    be consecutive; an attention backend may then read them without a gather.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts page 0."""
        self.num_pages = num_pages
        self._references = np.zeros(num_pages, np.int32)
        self._references[0] = 1
        self._free = list(range(1, num_pages))  # a heap: the lowest page first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Take `n` free pages (count 1 each). Raises PagesExhausted if fewer are free; then nothing is taken."""
        if n > len(self._free):
            raise PagesExhausted(f"{n} pages wanted, {len(self._free)} of {self.num_pages - 1} are free")
        pages = [heapq.heappop(self._free) for _ in range(n)]
        self._references[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one holder to each of `pages`, all of them held already."""
        for page in pages:
            if self._references[page] <= 0 or page == 0:
                raise RuntimeError(f"page {page} is shared but nobody holds it")
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> list[int]:
        """Take one holder from each of `pages`; returns those that are free now."""
        freed: list[int] = []
        for page in pages:
            if self._references[page] <= 0 or page == 0:
                raise RuntimeError(f"page {page} is given back but nobody holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed

    def references(self, page: int) -> int:
        """Holders of `page`."""
        return int(self._references[page])

    def check(self) -> None:
        """Raise RuntimeError unless every page is either free, once, or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page is in the free list twice")
        for page in range(1, self.num_pages):
            if (page in free) == (self._references[page] > 0):
                raise RuntimeError(f"page {page}: in free list {page in free}, holders {self._references[page]}")
