"""Request traces: public formats read, and loads generated. Lengths are in tokens, times in seconds.

Reads JSON lines as Mooncake publishes them ({"timestamp": ms, "input_length": n, "output_length": n, "hash_ids":
[...]}: equal ids mean equal blocks of 512 tokens) and CSV as Azure publishes them (TIMESTAMP, ContextTokens,
GeneratedTokens) or with the columns arrival_s, input_length, output_length.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import InvalidRequest
from stretto.simulate.values import MOST_TOKENS, number, whole_number

HASH_BLOCK_TOKENS = 512
MOST_REQUESTS = 10_000_000
MOST_RATE = 1e9
LEAST_RATE = 1e-6
_FURTHEST_MS = 1e14
"""From the time that the trace counts from: 3,000 years."""
_MOST_HASH = 2**256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    arrival_s: npt.NDArray[np.float64]
    input_length: npt.NDArray[np.int64]
    output_length: npt.NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    """Per request the ids of its prompt's blocks of 512 tokens; None: prompts share nothing.
    Ids are 0 to 2^31 - 1, as token ids are."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """int32 token ids that are equal exactly where the trace says that prompts are."""
        length = int(self.input_length[index])
        if self.hash_ids is None:
            return np.zeros(length, np.int32)
        blocks = np.asarray(self.hash_ids[index], np.int32)
        tokens = np.repeat(blocks, HASH_BLOCK_TOKENS)[:length]
        if len(tokens) < length:  # what the hashes do not cover is nobody else's
            tokens = np.concatenate([tokens, np.full(length - len(tokens), -1 - index, np.int32)])
        return tokens


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises InvalidRequest naming the file and the line that is wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(_csv_rows(lines) if path.suffix == ".csv" else _json_rows(lines))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequest(
            f"{path} is not a request trace: {error}; a trace is JSON lines with timestamp (ms), input_length, "
            "output_length and perhaps hash_ids, or CSV with arrival_s, input_length, output_length or Azure's columns"
        ) from error
    if not rows:
        raise InvalidRequest(f"{path} has no requests")
    rows.sort(key=lambda row: row.arrival_s)
    first = rows[0].arrival_s
    return Trace(
        np.array([row.arrival_s - first for row in rows]),
        np.array([row.input_length for row in rows], np.int64),
        np.array([row.output_length for row in rows], np.int64),
        _small_ids([row.hash_ids for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A request of a trace file, its values checked."""

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _small_ids(hash_ids: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...] | None:
    """The same with ids from 0 on, which token ids have room for: published ones are hashes of 64 bits or more."""
    if not any(hash_ids):
        return None
    small: dict[int, int] = {}
    return tuple(tuple(small.setdefault(block, len(small)) for block in blocks) for blocks in hash_ids)


def _json_rows(lines: Iterator[str]) -> Iterator[_Row]:
    for line, content in enumerate(lines, 1):
        if content.strip():
            with _in_line(line):
                yield _json_row(content)


def _json_row(content: str) -> _Row:
    try:
        fields = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply; allowed: a JSON object") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is {str(fields)[:60]!r}; allowed: a JSON object")
    hash_ids = fields.get("hash_ids")
    if hash_ids is None:
        hash_ids = []
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids is {str(hash_ids)[:60]!r}; allowed: a list of whole numbers")
    return _Row(
        number("timestamp", fields.get("timestamp"), -_FURTHEST_MS, _FURTHEST_MS) / 1000,
        _length("input_length", fields.get("input_length")),
        _length("output_length", fields.get("output_length")),
        tuple(whole_number(f"hash_ids[{i}]", block, -_MOST_HASH, _MOST_HASH) for i, block in enumerate(hash_ids)),
    )


def _csv_rows(lines: Iterator[str]) -> Iterator[_Row]:
    reader = csv.DictReader(lines)
    with _in_line(1):
        reader.fieldnames  # noqa: B018  # reads the header, so that a line's number is known from here on
    while True:
        with _in_line(reader.line_num + 1):
            fields = next(reader, None)
        if fields is None:
            return
        with _in_line(reader.line_num):
            yield _csv_row(fields)


def _csv_row(fields: dict[str | Any, str | Any]) -> _Row:
    if "TIMESTAMP" in fields:
        return _Row(
            _seconds(fields["TIMESTAMP"]),
            _length("ContextTokens", fields.get("ContextTokens")),
            _length("GeneratedTokens", fields.get("GeneratedTokens")),
        )
    return _Row(
        number("arrival_s", fields.get("arrival_s"), -_FURTHEST_MS / 1000, _FURTHEST_MS / 1000),
        _length("input_length", fields.get("input_length")),
        _length("output_length", fields.get("output_length")),
    )


@contextmanager
def _in_line(line: int) -> Iterator[None]:
    """Say of an error where it is."""
    try:
        yield
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {line}: {error}") from error


def _length(name: str, value: object) -> int:
    return whole_number(name, value, 1, MOST_TOKENS)


def _seconds(timestamp: str | None) -> float:
    """Of a date and time; without a time zone it is taken as UTC, where no hour comes twice."""
    try:
        moment = datetime.fromisoformat(timestamp or "")
    except ValueError as error:
        shown = "missing" if timestamp is None else repr(timestamp[:60])
        raise ValueError(f"TIMESTAMP is {shown}; allowed: a date and time as 2023-11-16 18:17:03.9799600") from error
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH).total_seconds()


WORKLOADS = ("sharegpt", "long-context", "shared-prefix")


def generate(workload: str, num_requests: int, rate: float, seed: int = 0) -> Trace:
    """A made-up load with Poisson arrivals at `rate` requests per second (0: all at once).

    `sharegpt`: log-normal lengths with the means of the ShareGPT conversations (about 220 in, 200 out);
    `long-context`: 2,000 to 30,000 in, 100 to 600 out; `shared-prefix`: 64 system prompts of 2,048 tokens, drawn by
    Zipf's law, each followed by a short question. Raises InvalidRequest naming what is not allowed.
    """
    if workload not in WORKLOADS:
        raise InvalidRequest(f"workload is {workload!r}; allowed: {', '.join(WORKLOADS)}")
    whole_number("num_requests", num_requests, 1, MOST_REQUESTS)
    whole_number("seed", seed, 0, 2**64 - 1)
    if rate:
        number("request_rate (0: all at once)", rate, LEAST_RATE, MOST_RATE)
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1 / rate, num_requests)) if rate else np.zeros(num_requests)
    if workload == "sharegpt":
        inputs = np.clip(random.lognormal(4.7, 1.2, num_requests), 4, 2048).astype(np.int64)
        outputs = np.clip(random.lognormal(4.9, 0.9, num_requests), 4, 1024).astype(np.int64)
        return Trace(arrival, inputs, outputs)
    if workload == "long-context":
        inputs = np.exp(random.uniform(np.log(2_000), np.log(30_000), num_requests)).astype(np.int64)
        return Trace(arrival, inputs, random.integers(100, 600, num_requests))
    systems = np.minimum(random.zipf(1.3, num_requests) - 1, 63)
    blocks = 2048 // HASH_BLOCK_TOKENS
    hashes = tuple(tuple(range(1 + s * blocks, 1 + (s + 1) * blocks)) for s in systems.tolist())
    return Trace(arrival, 2048 + random.integers(16, 256, num_requests), random.integers(32, 256, num_requests), hashes)
