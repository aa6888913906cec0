"""Cost of the prefix cache: the radix tree against a hash for each page and against a tree of token tuples.

Run: python benchmarks/prefix_cache.py [--json FILE]. One core, about 20 s; prints microseconds. Every design serves the
same prompts from the same kind of pool, and must find the same number of cached tokens.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stretto.cache.base import NO_KEY
from stretto.cache.page_pool import PagePool
from stretto.cache.radix import RadixCache

PROMPT = 4096
CACHED = PROMPT * 9 // 10
TREE = 1_000_000
TURNS = 8
"""Pieces in which a prompt came into the cache: so many nodes are on its path at least."""
VOCAB = 150_000

Tokens = npt.NDArray[np.int32]


class Cache(Protocol):
    """What the three designs have in common."""

    def lock(self, token_ids: Tokens) -> Any: ...
    def store(self, token_ids: Tokens, pages: Sequence[int], prefix: Any) -> Any: ...
    def unlock(self, prefix: Any) -> None: ...
    def evict(self, num_pages: int) -> list[int]: ...


class Found:
    """A lock of the two designs below: the entries of each page on the path."""

    def __init__(self, entries: list[Any], pages: list[int], page_size: int) -> None:
        self.entries, self.pages, self.num_tokens = entries, pages, len(pages) * page_size


Hash = Callable[[Any, bytes], Any]


def chained_sha256(parent: bytes, page: bytes) -> bytes:
    """Safe against prompts made to collide."""
    return hashlib.sha256(parent + page).digest()


def chained_builtin(parent: int, page: bytes) -> int:
    """As fast as a hash gets in Python; 64 bits, so equal hashes are no proof of equal tokens."""
    return hash((parent, page))


class HashBlocks:
    """The hash of a page and all before it leads to the page; unlocked pages stand in one order of use."""

    def __init__(self, pool: PagePool, page_size: int, chained: Hash, seed: object) -> None:
        self.pool, self.page_size, self.chained, self.seed = pool, page_size, chained, seed
        self.page_of: dict[Any, int] = {}
        self.locks: dict[Any, int] = {}
        self.unlocked: OrderedDict[Any, None] = OrderedDict()

    def lock(self, token_ids: Tokens) -> Found:
        size, link = self.page_size, self.seed
        data, width = token_ids.tobytes(), 4 * self.page_size
        found: list[Any] = []
        pages: list[int] = []
        for start in range(0, (len(token_ids) - 1) // size * width, width):
            link = self.chained(link, data[start : start + width])
            page = self.page_of.get(link)
            if page is None:
                break
            found.append(link)
            pages.append(page)
        self._hold(found)
        return Found(found, pages, size)

    def _hold(self, links: list[Any]) -> None:
        locks = self.locks
        for link in links:
            if locks[link] == 0:
                del self.unlocked[link]
            locks[link] += 1

    def store(self, token_ids: Tokens, pages: Sequence[int], prefix: Found) -> Found:
        size, width = self.page_size, 4 * self.page_size
        link = prefix.entries[-1] if prefix.entries else self.seed
        data = token_ids.tobytes()
        new: list[int] = []
        links: list[Any] = []
        for i in range(len(prefix.entries), len(token_ids) // size):
            link = self.chained(link, data[i * width : (i + 1) * width])
            if link not in self.page_of:
                self.page_of[link] = pages[i]
                self.locks[link] = 0
                self.unlocked[link] = None
                new.append(pages[i])
            links.append(link)
        self.pool.share(new)
        self._hold(links)
        return Found(prefix.entries + links, [*prefix.pages, *(self.page_of[link] for link in links)], size)

    def unlock(self, prefix: Found) -> None:
        locks = self.locks
        for link in reversed(prefix.entries):
            locks[link] -= 1
            if locks[link] == 0:
                self.unlocked[link] = None

    def evict(self, num_pages: int) -> list[int]:
        pages: list[int] = []
        while self.unlocked and len(pages) < num_pages:
            link, _ = self.unlocked.popitem(last=False)
            del self.locks[link]
            pages.append(self.page_of.pop(link))
        return self.pool.give_back(pages)


class TupleNode:
    """One page of tokens."""

    __slots__ = ("children", "locks", "page", "parent", "tokens")

    def __init__(self, parent: TupleNode | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent, self.tokens, self.page, self.locks = parent, tokens, page, 0
        self.children: dict[tuple[int, ...], TupleNode] = {}


class TupleTree:
    """A tree with a node for each page, its children in a dict by their tuple of tokens."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self.root = TupleNode(None, (), 0)
        self.unlocked: OrderedDict[TupleNode, None] = OrderedDict()

    def lock(self, token_ids: Tokens) -> Found:
        size, node = self.page_size, self.root
        tokens = token_ids.tolist()
        found: list[TupleNode] = []
        for start in range(0, (len(tokens) - 1) // size * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            found.append(node)
        self._hold(found)
        return Found(found, [node.page for node in found], size)

    def _hold(self, nodes: list[TupleNode]) -> None:
        for node in nodes:
            if node.locks == 0:
                del self.unlocked[node]
            node.locks += 1

    def store(self, token_ids: Tokens, pages: Sequence[int], prefix: Found) -> Found:
        size = self.page_size
        node = prefix.entries[-1] if prefix.entries else self.root
        done = len(prefix.entries)
        tokens = token_ids[done * size :].tolist()
        new: list[int] = []
        nodes: list[TupleNode] = []
        for start in range(0, len(tokens) // size * size, size):
            name = tuple(tokens[start : start + size])
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = TupleNode(node, name, pages[done + start // size])
                self.unlocked[child] = None
                new.append(child.page)
            node = child
            nodes.append(node)
        self.pool.share(new)
        self._hold(nodes)
        return Found(prefix.entries + nodes, [*prefix.pages, *(node.page for node in nodes)], size)

    def unlock(self, prefix: Found) -> None:
        for node in reversed(prefix.entries):
            node.locks -= 1
            if node.locks == 0:
                self.unlocked[node] = None

    def evict(self, num_pages: int) -> list[int]:
        pages: list[int] = []
        while self.unlocked and len(pages) < num_pages:
            node, _ = self.unlocked.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.tokens]
            pages.append(node.page)
        return self.pool.give_back(pages)


DESIGNS: dict[str, Callable[[PagePool, int], Cache]] = {
    "radix": RadixCache,
    "hash per page, sha256": lambda pool, size: HashBlocks(pool, size, chained_sha256, b""),
    "hash per page, builtin": lambda pool, size: HashBlocks(pool, size, chained_builtin, NO_KEY),
    "tree of tuples": TupleTree,
}


class Load:
    """A cache of `TREE` tokens: conversations of `PROMPT` tokens, four of which share their first eighth."""

    def __init__(self, design: str, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(1 + (TREE + 64 * PROMPT) // page_size)
        self.cache = DESIGNS[design](self.pool, page_size)
        self.random = np.random.default_rng(0)
        self.prompts: list[Tokens] = []
        turn = PROMPT // TURNS
        num_tokens = 0
        while num_tokens < TREE:
            prompt = self.new_tokens(PROMPT)
            if len(self.prompts) % 4:
                prompt[:turn] = self.prompts[-1][:turn]
            num_tokens += PROMPT - turn if len(self.prompts) % 4 else PROMPT
            self.prompts.append(prompt)
            for length in range(turn, PROMPT + 1, turn):
                self.serve(prompt[:length])

    def new_tokens(self, n: int) -> Tokens:
        return self.random.integers(0, VOCAB, n).astype(np.int32)

    def serve(self, prompt: Tokens) -> dict[str, float]:
        """A request from arrival to release; microseconds of each call."""
        begin = time.perf_counter()
        prefix = self.cache.lock(prompt)
        locked = time.perf_counter()
        self.pool.share(prefix.pages)
        pages = [*prefix.pages, *self.pool.take(-(-len(prompt) // self.page_size) - len(prefix.pages))]
        self.num_cached = prefix.num_tokens
        took = time.perf_counter()
        prefix = self.cache.store(prompt, pages, prefix)
        stored = time.perf_counter()
        self.cache.unlock(prefix)
        unlocked = time.perf_counter()
        self.pool.give_back(pages)
        spans = {"match": locked - begin, "insert": stored - took, "unlock": unlocked - stored}
        return {name: seconds * 1e6 for name, seconds in spans.items()}

    def serve_mostly_cached(self, index: int) -> dict[str, float]:
        """A prompt of which 90 % are cached."""
        prompt = self.prompts[index * 37 % len(self.prompts)].copy()
        prompt[CACHED:] = self.new_tokens(PROMPT - CACHED)
        times = self.serve(prompt)
        expected = CACHED // self.page_size * self.page_size
        if self.num_cached != expected:
            raise RuntimeError(f"{self.num_cached} tokens were cached, not {expected}")
        return times

    def evict(self, num_pages: int) -> float:
        begin = time.perf_counter()
        freed = self.cache.evict(num_pages)
        seconds = time.perf_counter() - begin
        if len(freed) != num_pages:
            raise RuntimeError(f"{len(freed)} of {num_pages} pages were evicted")
        return seconds * 1e6


def measure(design: str, page_size: int, repeats: int) -> dict[str, float]:
    """Median microseconds: match, insert, both, the 99th percentile of both, unlock, and evicting 1,000 pages."""
    load = Load(design, page_size)
    gc.collect()
    times = [load.serve_mostly_cached(i) for i in range(repeats)][repeats // 10 :]
    both = [t["match"] + t["insert"] for t in times]
    row = {name: statistics.median(t[name] for t in times) for name in times[0]}
    row |= {"both": statistics.median(both), "both_p99": statistics.quantiles(both, n=100)[98]}
    num_pages = min(1000, TREE // page_size // 8)
    row["evict"] = statistics.median(load.evict(num_pages) for _ in range(7)) * 1000 / num_pages
    return row


def measure_scattered_eviction() -> float:
    """Median microseconds of evicting 1,000 pages, each a leaf of its own: the radix tree's worst case."""
    pool = PagePool(20_001)
    cache = RadixCache(pool, 16)
    random = np.random.default_rng(0)
    for _ in range(10_000):
        prompt = random.integers(0, VOCAB, 16).astype(np.int32)
        pages = pool.take(1)
        cache.unlock(cache.store(prompt, pages, cache.lock(prompt)))
        pool.give_back(pages)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        freed = cache.evict(1000)
        times.append((time.perf_counter() - begin) * 1e6)
        assert len(freed) == 1000
    return statistics.median(times)


def measure_pool() -> dict[str, float]:
    """Median microseconds of 1,000 pages in one call, from a pool of 62,500."""
    pool = PagePool(62_501)
    times: dict[str, list[float]] = {"take": [], "share": [], "give_back": []}
    for _ in range(200):
        begin = time.perf_counter()
        pages = pool.take(1000)
        took = time.perf_counter()
        pool.share(pages)
        shared = time.perf_counter()
        pool.give_back(pages)
        pool.give_back(pages)
        done = time.perf_counter()
        for name, seconds in (("take", took - begin), ("share", shared - took), ("give_back", (done - shared) / 2)):
            times[name].append(seconds * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    runs = [(design, 16) for design in DESIGNS] + [("radix", size) for size in (1, 2, 64, 256)]
    runs += [("tree of tuples", 1)]
    columns = ("match", "insert", "both", "both_p99", "unlock", "evict")
    print(f"prompt of {PROMPT} tokens, 90 % cached; {TREE:,} tokens in the cache; median us; evict: 1,000 pages")
    print(f"{'design':24} {'page':>4} " + " ".join(f"{name:>8}" for name in columns))
    rows = []
    for design, page_size in runs:
        row = measure(design, page_size, arguments.repeats)
        rows.append({"design": design, "page_size": page_size, **row})
        print(f"{design:24} {page_size:4d} " + " ".join(f"{row[name]:8.1f}" for name in columns), flush=True)
    scattered, pool = measure_scattered_eviction(), measure_pool()
    print(f"radix, evicting 1,000 leaves of one page each: {scattered:.0f} us")
    print("pool, 1,000 pages: " + ", ".join(f"{name} {value:.0f} us" for name, value in pool.items()))
    if arguments.json:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
        }
        figures = {"machine": machine, "microseconds": rows, "scattered_eviction": scattered, "pool": pool}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
