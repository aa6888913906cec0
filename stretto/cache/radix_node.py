"""Node, Root and UseOrder: parts of the radix tree, and the order in which its unlocked nodes were last used.

They keep no counts and know neither pool nor locks' owners; `RadixCache` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stretto.cache.base import CacheKey
from stretto.request import TokenArray

PageArray = npt.NDArray[np.int32]


class Node:
    """A run of whole pages that follow the parent's.

    Its arrays are its own: the caller's may be a row that is reused for another request.
    """

    __slots__ = ("children", "locks", "name", "newer", "older", "pages", "parent", "tokens")

    older: Node
    newer: Node
    """Neighbours in the order of use; not set while it is in none, so that what is dropped refers to nobody."""

    def __init__(self, parent: Node | None, name: bytes, tokens: TokenArray, pages: PageArray) -> None:
        self.parent = parent
        self.name = name
        """The bytes of the first page of tokens: its key among the parent's children."""
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        """By name, so no two children begin with the same page."""
        self.locks = 0
        """Locks that end here or below, so never fewer than a child's."""


class Root(Node):
    """Where the sequences of one key begin: no tokens, no pages, not in the order of use."""

    __slots__ = ("key",)

    def __init__(self, key: CacheKey) -> None:
        super().__init__(None, b"", np.empty(0, np.int32), np.empty(0, np.int32))
        self.key = key


class UseOrder:
    """Unlocked nodes from the least to the most recently used; a child always comes before its parent.

    Therefore the first node is a leaf. Locks and unlocks keep it so: they walk from a node up to its root, and what
    becomes unlocked on the way goes to the end. So there is no clock, wall or logical, and no heap: the order follows
    from the sequence of calls alone, and every rank that makes the same calls evicts the same pages.
    """

    def __init__(self) -> None:
        self._ends = Node(None, b"", np.empty(0, np.int32), np.empty(0, np.int32))
        self._ends.older = self._ends.newer = self._ends
        """Closes the ring: its `newer` is the first node, its `older` the last."""

    def first(self) -> Node | None:
        """The least recently used node."""
        node = self._ends.newer
        return None if node is self._ends else node

    def append(self, node: Node) -> None:
        """Put `node`, which is not in the order, at the most recently used end."""
        self._insert(node, self._ends)

    def insert_after(self, node: Node, older: Node) -> None:
        """Put `node`, which is not in the order, right after `older`, which is."""
        self._insert(node, older.newer)

    def remove(self, node: Node) -> None:
        """Take `node` out of the order."""
        node.older.newer = node.newer
        node.newer.older = node.older
        del node.older, node.newer

    def _insert(self, node: Node, newer: Node) -> None:
        node.older = newer.older
        node.newer = newer
        newer.older.newer = node
        newer.older = node

    def __iter__(self) -> Iterator[Node]:
        node = self._ends.newer
        while node is not self._ends:
            if node.newer.older is not node or node.newer is node:
                raise RuntimeError("the order of use is torn: a node's newer neighbour does not name it as the older")
            yield node
            node = node.newer
