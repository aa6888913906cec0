"""Prompts and arrival times of a serving benchmark. Knows no server: prompts are texts of a wanted number of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.bench.serve_request import Planned
from stretto.errors import InvalidRequest
from stretto.simulate.trace import HASH_BLOCK_TOKENS, Trace
from stretto.tokenizer import Tokenizer

FloatArray = npt.NDArray[np.float64]
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
_MOST_WORDS = 5000
_WORD = re.compile(r" [a-z]{2,12}")


@dataclass(frozen=True, slots=True)
class Words:
    """Words that are one token each when a space stands before them."""

    words: tuple[str, ...]
    exact: bool
    """Whether a tokenizer has said so; otherwise it is only likely."""

    @classmethod
    def common(cls) -> Words:
        """Short English words: one token each in about every vocabulary of a large model."""
        return cls(tuple(_COMMON.split()), False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        """The vocabulary's own words; common English ones if it has almost none."""
        found = []
        for token_id in range(tokenizer.vocab_size):
            text = tokenizer.decode((token_id,))
            if _WORD.fullmatch(text) and tokenizer.encode(f"a{text}{text}", False)[-2:] == [token_id, token_id]:
                found.append(text[1:])
                if len(found) == _MOST_WORDS:
                    break
        return cls(tuple(found), True) if len(found) >= 16 else cls.common()

    def text(self, count: int, rng: np.random.Generator) -> str:
        """`count` words, each after a space."""
        return "".join([f" {self.words[index]}" for index in rng.integers(0, len(self.words), count)])


def random_prompts(
    count: int, input_len: int, output_len: int, *, range_ratio: float, words: Words, seed: int
) -> list[Planned]:
    """Prompts that share nothing; both lengths are drawn evenly from `[len * (1 - ratio), len * (1 + ratio)]`."""
    if min(count, input_len, output_len) < 1 or not 0 <= range_ratio < 1:
        raise InvalidRequest(
            f"{count} prompts of {input_len} tokens for {output_len} new ones, range ratio {range_ratio}; "
            "allowed: at least 1 each, and a ratio from 0 to below 1"
        )
    rng = np.random.default_rng(seed)

    def lengths(middle: int) -> list[int]:
        low, high = int(middle * (1 - range_ratio)), int(np.ceil(middle * (1 + range_ratio)))
        drawn: list[int] = rng.integers(max(1, low), high + 1, count).tolist()
        return drawn

    inputs, outputs = lengths(input_len), lengths(output_len)
    return [Planned(words.text(n, rng), n, m) for n, m in zip(inputs, outputs, strict=True)]


def trace_prompts(trace: Trace, count: int | None = None, *, words: Words, seed: int) -> list[Planned]:
    """The trace's first `count` requests. Prompts begin alike exactly as far as the trace's blocks are the same."""
    planned = []
    for index in range(len(trace) if count is None else min(count, len(trace))):
        length = int(trace.input_length[index])
        blocks = trace.hash_ids[index] if trace.hash_ids is not None else ()
        rngs = [np.random.default_rng([seed, 0, block]) for block in blocks[: -(-length // HASH_BLOCK_TOKENS)]]
        parts = []
        left = length
        for rng in rngs:
            parts.append(words.text(min(left, HASH_BLOCK_TOKENS), rng))
            left -= min(left, HASH_BLOCK_TOKENS)
        parts.append(words.text(left, np.random.default_rng([seed, 1, index])))
        planned.append(Planned("".join(parts), length, int(trace.output_length[index])))
    return planned


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> FloatArray:
    """Seconds after the start at which requests are sent; an infinite `rate` sends all at once.

    Intervals are gamma distributed with shape `burstiness`: 1 is Poisson, less is burstier, more is more even. As
    vLLM's `bench serve` does, they are stretched so that the last request is sent at exactly `count / rate`.
    """
    if not rate > 0 or not burstiness > 0:
        raise InvalidRequest(f"request rate is {rate}, burstiness {burstiness}; allowed: above 0 (inf: all at once)")
    if np.isinf(rate):
        return np.zeros(count)
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count))
    return times * (count / rate / times[-1]) if times[-1] > 0 else times
