"""The prefix cache interface, and `NoCache`, which shares nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stretto.request import TokenArray


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached beginning of a prompt. Whoever holds it keeps its pages from eviction until `unlock`."""

    pages: tuple[int, ...]
    num_tokens: int
    """Page-aligned, and at least one token short of the prompt."""
    node: object = None


class PrefixCache(Protocol):
    """Shares pages between requests with equal beginnings. Host only; called by the scheduler alone."""

    def lock(self, token_ids: TokenArray) -> Prefix:
        """The longest cached prefix of `token_ids`, page-aligned, leaving at least one token to compute; locked."""

    def unlock(self, prefix: Prefix) -> None:
        """Give up a locked prefix; legal once."""

    def store(self, token_ids: TokenArray, pages: list[int]) -> None:
        """Offer the KV of `token_ids` (written by launched steps) in `pages`; the cache takes its own references."""

    def evict(self, num_pages: int) -> list[int]:
        """Free up to `num_pages` unlocked pages, least recently used first; returns those that are free now."""

    def held(self) -> Iterable[int]:
        """Every page that the cache has a reference to (for checks)."""

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""


class NoCache:
    """A PrefixCache that never has anything."""

    num_evictable = 0

    def lock(self, token_ids: TokenArray) -> Prefix:
        """Nothing is cached."""
        return Prefix((), 0)

    def unlock(self, prefix: Prefix) -> None:
        """Nothing to give up."""

    def store(self, token_ids: TokenArray, pages: list[int]) -> None:
        """Keeps nothing."""

    def evict(self, num_pages: int) -> list[int]:
        """Frees nothing."""
        return []

    def held(self) -> Iterable[int]:
        """No page."""
        return ()
