"""Cuts a long JSON array into pieces of whole elements, so that a trace of any size is parsed in little memory.

Owns the search for the boundaries (vectorised over bytes); parsing the pieces is the caller's. Expects the two forms of
the Trace Event Format: an object with the key "traceEvents", or the bare array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 8 << 20
_HEAD_LIMIT = 64 << 20
_KEY = b'"traceEvents"'
_QUOTE, _BACKSLASH = 0x22, 0x5C
_SPACE = b" \t\r\n"


class NotAnEventList(ValueError):
    """The text is not a list of trace events."""


class Truncated(ValueError):
    """The text ends inside the list."""


def split_head(read: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """What comes before the list of events, and the first bytes of the list (after its bracket).

    The head is completed to a JSON object of its own; it is empty for a bare array. Raises NotAnEventList.
    """
    data = bytearray()
    while True:
        more = read(PIECE_BYTES)
        data += more
        text = data.lstrip(_SPACE + b"\xef\xbb\xbf")
        if text[:1] == b"[":
            return b"", bytes(text[1:])
        if text and text[:1] != b"{":
            raise NotAnEventList("not JSON")
        at = data.find(_KEY)
        if at >= 0:
            after = data[at + len(_KEY) :].lstrip(_SPACE)
            value = after[1:].lstrip(_SPACE)
            if after[:1] == b":" and value[:1] == b"[":
                return bytes(data[:at]) + _KEY + b":[]}", bytes(value[1:])
            if value:
                raise NotAnEventList('"traceEvents" is not a list')
        if not more:
            if text and not _balanced(bytes(text)):
                raise Truncated("ends before its list of events")
            raise NotAnEventList('no "traceEvents"')
        if len(data) > _HEAD_LIMIT:
            raise NotAnEventList(f'no "traceEvents" in the first {_HEAD_LIMIT >> 20} MiB')


def pieces(first: bytes, read: Callable[[int], bytes], *, bare: bool) -> Iterator[bytes]:
    """JSON arrays that together hold the events, in order. Raises Truncated, NotAnEventList.

    `first` follows the opening bracket. A bare array may lack its closing bracket, as the format allows.
    """
    rest = first
    ended = False
    while True:
        cut, closed = _last_boundary(rest)
        if cut:
            body = rest[:cut].lstrip(_SPACE + b",")
            if body:
                yield b"[" + body + b"]"
            rest = rest[cut:]
        if closed:
            return
        if ended:
            if bare and not rest.strip(_SPACE + b","):
                return
            raise Truncated("ends inside its list of events")
        more = read(PIECE_BYTES)
        ended = not more
        rest += more


def _structure(data: bytes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Positions of the brackets outside strings, and the depth after each, from a start outside strings at depth 0."""
    text = np.frombuffer(data, dtype=np.uint8)
    quotes = np.flatnonzero(text == _QUOTE)
    slashes = np.flatnonzero(text == _BACKSLASH)
    if len(slashes):
        # In a run of backslashes every second one is escaped; a quote after an odd run is.
        breaks = np.flatnonzero(np.diff(slashes) != 1)
        ends = slashes[np.append(breaks, len(slashes) - 1)]
        starts = slashes[np.append(0, breaks + 1)]
        escaped = ends[(ends - starts) % 2 == 0] + 1
        quotes = quotes[~np.isin(quotes, escaped, assume_unique=True)]
    lower = text | 0x20  # '[' and '{', ']' and '}' differ in this bit only
    brackets = np.flatnonzero((lower == 0x7B) | (lower == 0x7D))
    brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    depth = np.cumsum(np.where(lower[brackets] == 0x7B, 1, -1))
    return brackets, depth


def _last_boundary(data: bytes) -> tuple[int, bool]:
    """The end of the last whole element in `data`, and whether the list's own bracket closes in it."""
    positions, depth = _structure(data)
    closing = np.flatnonzero(depth < 0)
    if len(closing):
        stop = int(closing[0])
        if data[int(positions[stop])] != 0x5D:
            raise NotAnEventList("brackets do not match")
        return int(positions[stop]), True
    ends = np.flatnonzero(depth == 0)
    return (int(positions[ends[-1]]) + 1, False) if len(ends) else (0, False)


def _balanced(data: bytes) -> bool:
    _, depth = _structure(data)
    return bool(len(depth)) and int(depth[-1]) == 0
