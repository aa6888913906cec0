"""Numbers in scripts, traces and options of the simulator: one rule for what is taken, one wording for what is not."""

from __future__ import annotations

import re

from stretto.config import SchedulerConfig
from stretto.errors import InvalidRequest

MOST_TOKENS = 2**31 - 1
"""Longest length that may be written down; what is too long for the scheduler's config is another question."""
MOST_PRIORITY = 2**31
_MOST_PAGES = 20_000_000
_MOST_TABLE = 2**31
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MOST_DIGITS = 400
_SHOWN = 60


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """`value`, an int or its decimal digits, if it is from `least` to `most`. Raises InvalidRequest naming `name`."""
    if isinstance(value, str) and len(value) <= _MOST_DIGITS and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{name} is {_shown(value)}; allowed: a whole number from {least} to {most}")
    return value


def number(name: str, value: object, least: float, most: float) -> float:
    """`value`, a number or its decimal text, if it is from `least` to `most` (so never NaN). Raises InvalidRequest."""
    if isinstance(value, str) and len(value) <= _MOST_DIGITS and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{name} is {_shown(value)}; allowed: a number from {least:g} to {most:g}")
    return float(value)


def check_size(config: SchedulerConfig) -> None:
    """Raise InvalidRequest if the tables of a simulated scheduler would not fit into a machine's memory."""
    if config.num_pages > _MOST_PAGES:
        raise InvalidRequest(f"num_pages is {config.num_pages}; allowed: up to {_MOST_PAGES}")
    if config.num_slots * config.max_model_len > _MOST_TABLE:
        raise InvalidRequest(
            f"max_num_seqs is {config.max_num_seqs} and max_model_len {config.max_model_len}; allowed: a table of "
            f"(2 x max_num_seqs + 1) x max_model_len tokens of up to {_MOST_TABLE}"
        )


def _shown(value: object) -> str:
    text = repr(value)
    if value is None:
        return "missing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
