"""RadixCache: shares pages between sequences with equal beginnings, by a radix tree over whole pages of tokens.

Owns which cached page stands for which tokens, who has it locked, and what is evicted next. It holds one pool reference
to each of its pages. A node covers many pages and is compared as one array, so that a match costs what the tree
branches, not what the prompt is long; docs/prefix-cache.md measures it against a hash for each page and against a tree
of token tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from stretto.cache.base import NO_KEY, CacheKey, Prefix
from stretto.cache.page_pool import PagePool
from stretto.cache.radix_node import Node, PageArray, Root, UseOrder
from stretto.request import TokenArray


class RadixCache:
    """A PrefixCache over `pool` with pages of `page_size` tokens. Host only; not thread safe.

    A lock counts on every node from where it ends up to the root. So an unlocked node has only unlocked ones below
    it, all of those can be evicted, and `num_evictable` is the sum of their pages.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[CacheKey, Root] = {}
        """Each with children or locks; dropped with the last of them, since keys may come and go without end."""
        self._locks: dict[int, Node] = {}
        """The node at which each lock in force ends."""
        self._num_locks = 0
        """Locks ever made."""
        self._order = UseOrder()
        self._num_evictable = 0
        self._num_held = 0

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now: those of unlocked nodes."""
        return self._num_evictable

    @property
    def num_held(self) -> int:
        """Pages that the cache has a reference to. Counted as they come and go: there may be millions."""
        return self._num_held

    def lock(self, token_ids: TokenArray, key: CacheKey = NO_KEY) -> Prefix:
        """Lock the longest cached prefix of `token_ids` (int32 [T]): whole pages, at least one token left to compute.

        Takes no page references: a caller that uses the pages shares them. hot path (each admission)
        """
        tokens = np.ascontiguousarray(token_ids, np.int32)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key)
        end = max(0, len(tokens) - 1) // self._page_size * self._page_size
        node, num_tokens = self._descend(root, tokens, 0, end)
        parts = self._hold(node, None)
        pages = tuple(np.concatenate(parts[::-1]).tolist()) if num_tokens else ()
        return self._locked(node, pages, num_tokens)

    def store(self, token_ids: TokenArray, pages: Sequence[int], prefix: Prefix) -> Prefix:
        """Offer the KV of `token_ids` (int32 [T], written by launched steps) in `pages`; moves the caller's lock.

        See `PrefixCache.store`. RuntimeError, and nothing changes, if `prefix` is not a lock in force on a beginning
        of `token_ids`, or if `pages` are too few or not held by anyone. hot path (each prefill chunk and release)
        """
        size = self._page_size
        node = self._ending_at(prefix)
        tokens = np.ascontiguousarray(token_ids, np.int32)
        start, end = prefix.num_tokens, len(tokens) // size * size
        if len(pages) * size < end:
            raise RuntimeError(f"{end} tokens are offered in {len(pages)} pages of {size} tokens")
        if end <= start:
            del self._locks[prefix.lock]
            return self._locked(node, (), start)
        if start and not np.array_equal(tokens[start - size : start], node.tokens[-size:]):
            raise RuntimeError(f"the prefix of {start} tokens that is locked is not a beginning of what is offered")
        last, at = self._descend(node, tokens, start, end)
        if at < end:
            new = np.array(pages[at // size : end // size], np.int32)
            self._pool.share(new)
            last = self._add(last, tokens[at:end].copy(), new)
        self._hold(last, node)
        del self._locks[prefix.lock]
        return self._locked(last, (), end)

    def unlock(self, prefix: Prefix) -> None:
        """Give up a locked prefix, which counts as its last use. RuntimeError if that was done, or it was stored."""
        node = self._ending_at(prefix)
        del self._locks[prefix.lock]
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._order.append(node)
                self._num_evictable += len(node.pages)
            node = node.parent
        node.locks -= 1
        self._drop_if_empty(node)

    def evict(self, num_pages: int) -> list[int]:
        """Give up `num_pages` unlocked pages (or all, if fewer), least recently used first; returns the freed pages.

        Of equally recent ones, those furthest from the root go first: a long leaf loses only its tail.
        """
        parts: list[PageArray] = []
        wanted = num_pages
        while wanted > 0 and (node := self._order.first()) is not None:
            keep = len(node.pages) - wanted
            if keep > 0:  # views: trimmed page by page, copies of a long node would cost its length each time
                parts.append(node.pages[keep:])
                node.tokens = node.tokens[: keep * self._page_size]
                node.pages = node.pages[:keep]
                break
            parts.append(node.pages)
            wanted = -keep
            self._remove(node)
        if not parts:
            return []
        pages = np.concatenate(parts)
        self._num_evictable -= len(pages)
        self._num_held -= len(pages)
        freed = self._pool.give_back(pages)
        if len(freed) != len(pages):
            in_use = sorted(set(pages.tolist()).difference(freed))
            raise RuntimeError(f"pages {in_use} are evicted, but somebody uses them without a lock")
        return freed

    def forget(self, prefix: Prefix) -> list[int]:
        """Give up a locked prefix whose KV is not to be trusted; returns the pages that are free now.

        Drops it from its end up to where somebody else has it locked or has stored more after it.
        """
        node: Node | None = self._ending_at(prefix)
        self.unlock(prefix)
        freed: list[int] = []
        while node is not None and node.parent is not None and node.locks == 0 and not node.children:
            parent = node.parent
            self._remove(node)
            self._num_evictable -= len(node.pages)
            self._num_held -= len(node.pages)
            freed += self._pool.give_back(node.pages)
            node = parent
        return freed

    def num_unlocked_by(self, prefixes: Iterable[Prefix]) -> int:
        """Pages that would become evictable if all of these different locks were given up."""
        given_up: dict[Node, int] = {}
        for prefix in prefixes:
            node = self._ending_at(prefix)
            while node.parent is not None:
                given_up[node] = given_up.get(node, 0) + 1
                node = node.parent
        return sum(len(node.pages) for node, count in given_up.items() if node.locks == count)

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _descend(self, node: Node, tokens: TokenArray, start: int, end: int) -> tuple[Node, int]:
        """Follow `tokens[start:end]` (whole pages) from `node`; returns the node and position at which they part.

        Splits the node inside of which that is.
        """
        size = self._page_size
        while start < end:
            child = node.children.get(tokens[start : start + size].tobytes())
            if child is None:
                break
            length = len(child.tokens)
            common = min(length, end - start)
            differs = child.tokens[:common] != tokens[start : start + common]
            first = int(differs.argmax())
            if differs[first]:
                common = first // size * size
            node = child if common == length else self._split(child, common)
            start += common
        return node, start

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Move the first `num_tokens` (whole pages, not all) of `node` to a new node above it; returns that.

        `node` stays the lower part, so that the locks that end at it still end where they did.
        """
        size, parent = self._page_size, node.parent
        if parent is None:
            raise RuntimeError("a root has nothing to split")
        upper = Node(parent, node.name, node.tokens[:num_tokens].copy(), node.pages[: num_tokens // size].copy())
        upper.locks = node.locks
        parent.children[upper.name] = upper
        node.parent = upper
        node.tokens = node.tokens[num_tokens:].copy()
        node.pages = node.pages[num_tokens // size :].copy()
        node.name = node.tokens[:size].tobytes()
        upper.children[node.name] = node
        if node.locks == 0:
            self._order.insert_after(upper, node)
        return upper

    def _add(self, parent: Node, tokens: TokenArray, pages: PageArray) -> Node:
        """A new leaf, unlocked and most recently used."""
        leaf = Node(parent, tokens[: self._page_size].tobytes(), tokens, pages)
        parent.children[leaf.name] = leaf
        self._order.append(leaf)
        self._num_evictable += len(pages)
        self._num_held += len(pages)
        return leaf

    def _remove(self, leaf: Node) -> None:
        """Take an unlocked leaf out of the tree. Its pages are the caller's to give back."""
        parent = leaf.parent
        if parent is None or leaf.children or leaf.locks:
            raise RuntimeError(f"a node with {len(leaf.children)} children and {leaf.locks} locks is no leaf to evict")
        self._order.remove(leaf)
        del parent.children[leaf.name]
        if not parent.children:
            self._drop_if_empty(parent)

    def _drop_if_empty(self, node: Node) -> None:
        if isinstance(node, Root) and node.locks == 0 and not node.children:
            del self._roots[node.key]

    # -- locks ------------------------------------------------------------------------------------------------------

    def _ending_at(self, prefix: Prefix) -> Node:
        node = self._locks.get(prefix.lock)
        if node is None:
            raise RuntimeError(f"lock {prefix.lock} of {prefix.num_tokens} tokens is not in force: given up or stored")
        return node

    def _locked(self, node: Node, pages: tuple[int, ...], num_tokens: int) -> Prefix:
        """A new lock that ends at `node`, already counted."""
        self._num_locks += 1
        self._locks[self._num_locks] = node
        return Prefix(pages, num_tokens, self._num_locks)

    def _hold(self, node: Node, above: Node | None) -> list[PageArray]:
        """Count one lock more from `node` up to below `above` (None: the root too); returns their pages, last first."""
        parts: list[PageArray] = []
        step: Node | None = node
        while step is not None and step is not above:
            if step.parent is not None:
                if step.locks == 0:
                    self._order.remove(step)
                    self._num_evictable -= len(step.pages)
                parts.append(step.pages)
            step.locks += 1
            step = step.parent
        return parts

    # -- for checks -------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[int]:
        """Every page that the cache has a reference to."""
        for node in self._nodes():
            yield from node.pages.tolist()

    def _nodes(self) -> Iterator[Node]:
        """Every node, a parent before its children; roots too."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise RuntimeError unless a walk over everything finds the tree, its locks, counts and references sound."""
        locks: dict[Node, int] = {}
        for end in self._locks.values():
            node: Node | None = end
            while node is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        nodes = list(self._nodes())
        for node in nodes:
            self._check_node(node, locks.pop(node, 0))
        if locks:
            raise RuntimeError(f"{len(locks)} nodes are locked, but no longer in the tree")
        pages = list(self.held())
        if len(set(pages)) != len(pages):
            raise RuntimeError(f"pages {sorted({p for p in pages if pages.count(p) > 1})} are in the tree twice")
        if len(pages) != self._num_held:
            raise RuntimeError(f"{self._num_held} pages counted as held, there are {len(pages)}")
        self._check_order({node for node in nodes if node.locks == 0 and node.parent is not None})

    def _check_node(self, node: Node, locks: int) -> None:
        size = self._page_size
        name = f"the node of tokens {node.tokens[:8].tolist()}... in pages {node.pages[:8].tolist()}..."
        if node.locks != locks:
            raise RuntimeError(f"{name} counts {node.locks} locks, there are {locks}")
        if len(node.tokens) != len(node.pages) * size or (len(node.pages) == 0) != (node.parent is None):
            raise RuntimeError(f"{name} has {len(node.tokens)} tokens in {len(node.pages)} pages of {size}")
        if node.parent is None and not node.children and not locks:
            raise RuntimeError("an empty tree is kept although nobody locks it")
        for first_page, child in node.children.items():
            if child.parent is not node or not first_page == child.name == child.tokens[:size].tobytes():
                raise RuntimeError(f"{name} has a child that is not its own, or begins with another page")
        for page in node.pages.tolist():
            references = self._pool.references(page)
            if references < 1 or (references > 1 and locks == 0):
                raise RuntimeError(f"page {page} has {references} holders and {locks} locks in the tree")

    def _check_order(self, unlocked: set[Node]) -> None:
        """The order of use has every unlocked node once, a child before its parent, and the counter their pages."""
        num_evictable = 0
        for node in self._order:
            if node not in unlocked:
                raise RuntimeError("the order of use has a node twice, or one that is locked or gone")
            if any(child in unlocked for child in node.children.values()):
                raise RuntimeError("the order of use has a node before its child")
            unlocked.remove(node)
            num_evictable += len(node.pages)
        if unlocked:
            raise RuntimeError(f"{len(unlocked)} unlocked nodes are missing from the order of use")
        if num_evictable != self._num_evictable:
            raise RuntimeError(f"{self._num_evictable} pages counted as evictable, there are {num_evictable}")
