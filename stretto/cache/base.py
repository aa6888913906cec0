"""The prefix cache interface, and `NoCache`, which shares nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stretto.request import TokenArray


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What else KV depends on, beside the tokens before it. Entries with different keys are never shared.

    Each kind has its own field, so an adapter named "x" and a salt "x" are different keys.
    """

    adapter: str | None = None
    """Identity of the weights that change the KV: an id that is never used again, not a name that may be."""
    salt: str | None = None
    """Chosen by the client, so that nobody else can find out by timing what it sent."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A locked beginning of a sequence in the cache: its pages are safe from eviction until it is given up."""

    pages: tuple[int, ...]
    """The pages that `lock` found, in order. Empty in what `store` returns: that caller has its pages already."""
    num_tokens: int
    """Tokens whose pages are locked; a multiple of the page size."""
    lock: int = 0
    """The cache's number of this lock; 0 locks nothing."""


NO_KEY = CacheKey()
_NOTHING = Prefix((), 0)


class PrefixCache(Protocol):
    """Shares pages between requests with equal beginnings. Host only; called by the scheduler alone; never blocks.

    A request locks what is cached of its prompt, moves the lock on with each `store`, and gives it up with its pages.
    So whoever uses a page that the cache holds has it locked, and a page that nobody locks is the cache's alone.
    """

    def lock(self, token_ids: TokenArray, key: CacheKey = NO_KEY) -> Prefix:
        """Lock the longest cached prefix of `token_ids` (int32 [T]): whole pages, at least one token left to compute.

        Takes no page references: a caller that uses the pages shares them.
        """

    def store(self, token_ids: TokenArray, pages: Sequence[int], prefix: Prefix) -> Prefix:
        """Offer the KV of `token_ids` (int32 [T], written by launched steps) in `pages`; moves the caller's lock.

        Consumes `prefix`, a lock on a beginning of `token_ids`, and returns one on all whole pages of `token_ids`
        (on the same as before if those are fewer). The cache takes its own reference on each page that is new to it;
        where it has an equal page already, that one stays and the caller's remains the caller's alone.
        """

    def unlock(self, prefix: Prefix) -> None:
        """Give up a locked prefix, which counts as its last use. RuntimeError if that was done, or it was stored."""

    def evict(self, num_pages: int) -> list[int]:
        """Give up `num_pages` unlocked pages (or all, if fewer), least recently used first; returns the freed pages."""

    def forget(self, prefix: Prefix) -> list[int]:
        """Give up a locked prefix whose KV is not to be trusted; returns the pages that are free now.

        Drops it from its end up to where somebody else has it locked or has stored more after it.
        """

    def num_unlocked_by(self, prefixes: Iterable[Prefix]) -> int:
        """Pages that would become evictable if all of these different locks were given up."""

    def held(self) -> Iterable[int]:
        """Every page that the cache has a reference to (for checks)."""

    def check(self) -> None:
        """Raise RuntimeError unless a walk over everything finds it sound."""

    @property
    def num_held(self) -> int:
        """Pages that the cache has a reference to."""

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now; exact, at no cost."""


class NoCache:
    """A PrefixCache that never has anything."""

    num_evictable = 0
    num_held = 0

    def lock(self, token_ids: TokenArray, key: CacheKey = NO_KEY) -> Prefix:
        """Nothing is cached."""
        return _NOTHING

    def store(self, token_ids: TokenArray, pages: Sequence[int], prefix: Prefix) -> Prefix:
        """Keeps nothing."""
        return _NOTHING

    def unlock(self, prefix: Prefix) -> None:
        """Nothing to give up."""

    def evict(self, num_pages: int) -> list[int]:
        """Frees nothing."""
        return []

    def forget(self, prefix: Prefix) -> list[int]:
        """Nothing to drop."""
        return []

    def num_unlocked_by(self, prefixes: Iterable[Prefix]) -> int:
        """Nothing is locked."""
        return 0

    def held(self) -> Iterable[int]:
        """No page."""
        return ()

    def check(self) -> None:
        """Nothing can be wrong."""
