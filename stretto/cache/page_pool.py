"""PagePool: which KV pages are free and how many holders each other page has. Never touches device memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stretto.errors import PagesExhausted

Pages = Sequence[int] | npt.NDArray[np.integer]


class PagePool:
    """Owns every KV page: free, or held with a reference count. Page 0 is padding and never handed out.

    The lowest free pages go out first, so that pages in use stay dense at the low end and a request's pages tend to
    be consecutive; an attention backend may then read them without a gather.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts page 0."""
        self.num_pages = num_pages
        self._references = np.zeros(num_pages, np.int32)
        """Holders of each page; page 0 has none, so nobody can share it or give it back."""
        self._free = bytearray(b"\1" * num_pages)
        """1 for each free page: a flat map, because the next free page is then one `find` away."""
        self._free[0] = 0
        self._is_free = np.frombuffer(self._free, np.bool_)
        """The same memory, for many pages at once."""
        self._lowest = 1
        """No page below is free."""
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def take(self, n: int) -> list[int]:
        """Take the `n` lowest free pages (count 1 each). Raises PagesExhausted if fewer are free; then takes none."""
        if n > self._num_free:
            raise PagesExhausted(f"{n} pages wanted, {self._num_free} of {self.num_pages - 1} are free")
        if n <= 0:
            return []
        start = self._free.find(1, self._lowest)
        if n == 1:
            pages = [start]
        else:
            pages, at, width = [], start, 2 * n
            while len(pages) < n and at < self.num_pages:
                found = np.flatnonzero(self._is_free[at : at + width])
                pages += (found[: n - len(pages)] + at).tolist()
                at += width
                if len(found) * 64 <= width:  # far apart: one by one is faster
                    break
                width *= 4
            while len(pages) < n and (at := self._free.find(1, at)) >= 0:
                pages.append(at)
                at += 1
        if start < 0 or len(pages) < n:
            raise RuntimeError(f"{self._num_free} pages are free by count, but not {n} from page {self._lowest} on")
        self._is_free[pages] = False
        self._references[pages] = 1
        self._lowest = pages[-1] + 1
        self._num_free -= n
        return pages

    def share(self, pages: Pages) -> None:
        """Add one holder to each of `pages`. RuntimeError if nobody holds one of them; then nothing changes."""
        index = self._index(pages, "shared")
        np.add.at(self._references, index, 1)

    def give_back(self, pages: Pages) -> list[int]:
        """Take one holder from each of `pages`; returns those that are free now.

        RuntimeError if a page is given back more often than it is held; then nothing changes.
        """
        index = self._index(pages, "given back")
        np.subtract.at(self._references, index, 1)  # counts a page twice that is named twice
        left = self._references[index]
        if (left < 0).any():
            np.add.at(self._references, index, 1)
            page = int(index[left < 0][0])
            holders = self._references[page]
            raise RuntimeError(
                f"page {page} is given back {int((index == page).sum())} times but has {holders} holders"
            )
        freed = list(dict.fromkeys(index[left == 0].tolist()))
        if freed:
            self._is_free[freed] = True
            self._lowest = min(self._lowest, min(freed))
            self._num_free += len(freed)
        return freed

    def _index(self, pages: Pages, what: str) -> npt.NDArray[np.intp]:
        """`pages` as an index. RuntimeError if nobody holds one of them."""
        index = np.array(pages, np.intp)
        valid = (index > 0) & (index < self.num_pages)
        if not (valid.all() and self._references[index].all()):
            page = next(p for p in index.tolist() if not 0 < p < self.num_pages or self._references[p] == 0)
            raise RuntimeError(f"page {page} is {what} but nobody holds it")
        return index

    def references(self, page: int) -> int:
        """Holders of `page`."""
        return int(self._references[page])

    def num_freed_by(self, pages: Pages) -> int:
        """How many pages `give_back(pages)` would free: those that are named as often as they are held."""
        index, times = np.unique(np.array(pages, np.intp), return_counts=True)
        return int((self._references[index] == times).sum())

    def check(self) -> None:
        """Raise RuntimeError unless every page is either free or held, and free pages are where `take` looks."""
        wrong = np.flatnonzero(self._is_free == (self._references > 0))
        if len(wrong) > 1 or self._is_free[0] or self._references[0]:  # page 0 is neither free nor held
            page = int(wrong[wrong > 0][0]) if len(wrong) > 1 else 0
            raise RuntimeError(f"page {page}: free {self._is_free[page]}, holders {self._references[page]}")
        if self._num_free != int(self._is_free.sum()) or self._is_free[: self._lowest].any():
            raise RuntimeError(
                f"{self._num_free} free pages counted from page {self._lowest} on, there are {self._is_free.sum()} "
                f"from page {self._free.find(1)} on"
            )
