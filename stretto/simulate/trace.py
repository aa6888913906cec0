"""Request traces: public formats read, and loads generated. Lengths are in tokens, times in seconds.

Reads JSON lines as Mooncake publishes them ({"timestamp": ms, "input_length": n, "output_length": n, "hash_ids":
[...]}: equal ids mean equal blocks of 512 tokens) and CSV as Azure publishes them (TIMESTAMP, ContextTokens,
GeneratedTokens) or with the columns arrival_s, input_length, output_length.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stretto.errors import InvalidRequest

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    arrival_s: npt.NDArray[np.float64]
    input_length: npt.NDArray[np.int64]
    output_length: npt.NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    """Per request the ids of its prompt's blocks of 512 tokens; None: prompts share nothing."""

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
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is not a request trace: {error}; allowed: JSON lines with timestamp (ms), input_length, "
            "output_length and perhaps hash_ids, or CSV with arrival_s, input_length, output_length or Azure's columns"
        ) from error
    if not rows:
        raise InvalidRequest(f"{path} has no requests")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    hashes = tuple(row[3] for row in rows)
    return Trace(
        np.array([row[0] - first for row in rows]),
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
        hashes if any(hashes) else None,
    )


Row = tuple[float, int, int, tuple[int, ...]]


def _json_rows(lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            yield _checked(
                float(fields["timestamp"]) / 1000,
                fields["input_length"],
                fields["output_length"],
                tuple(fields.get("hash_ids") or ()),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error!r}") from error


def _csv_rows(lines: Iterator[str]) -> Iterator[Row]:
    for number, fields in enumerate(csv.DictReader(lines), 2):
        try:
            if "TIMESTAMP" in fields:
                arrival = datetime.fromisoformat(fields["TIMESTAMP"][:26]).timestamp()
                yield _checked(arrival, fields["ContextTokens"], fields["GeneratedTokens"], ())
            else:
                yield _checked(float(fields["arrival_s"]), fields["input_length"], fields["output_length"], ())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error!r}") from error


def _checked(arrival: float, input_length: object, output_length: object, hash_ids: tuple[int, ...]) -> Row:
    lengths = int(str(input_length)), int(str(output_length))
    if min(lengths) < 1:
        raise ValueError(f"lengths are {lengths}; both must be at least 1")
    return arrival, *lengths, hash_ids


WORKLOADS = ("sharegpt", "long-context", "shared-prefix")


def generate(workload: str, num_requests: int, rate: float, seed: int = 0) -> Trace:
    """A made-up load with Poisson arrivals at `rate` requests per second (0: all at once).

    `sharegpt`: log-normal lengths with the means of the ShareGPT conversations (about 220 in, 200 out);
    `long-context`: 2,000 to 30,000 in, 100 to 600 out; `shared-prefix`: 64 system prompts of 2,048 tokens, drawn by
    Zipf's law, each followed by a short question. Raises InvalidRequest for an unknown name or a negative rate.
    """
    if workload not in WORKLOADS:
        raise InvalidRequest(f"workload is {workload!r}; allowed: {', '.join(WORKLOADS)}")
    if num_requests < 1 or rate < 0:
        raise InvalidRequest(f"{num_requests} requests at {rate} per second; allowed: at least 1, and a rate from 0")
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
