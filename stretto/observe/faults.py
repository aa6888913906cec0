"""Faults: what is to go wrong on purpose in every step, and how it is spelled. No torch here; `inject` commits them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stretto.errors import InvalidRequest

SPELLINGS = ("sync@sample", "pageable@stage", "slow-host=2ms", "slow-device=5ms")
MOST_S = 60.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in every step. Times in seconds."""

    sync_at_sample: bool = False
    pageable_at_stage: bool = False
    slow_host_s: float = 0.0
    slow_device_s: float = 0.0

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Faults:
        """From `sync@sample`, `slow-host=2ms`... one or several, also with commas. Raises InvalidRequest."""
        given = [texts] if isinstance(texts, str) else list(texts)
        found: dict[str, Any] = {}
        for text in (part.strip() for entry in given for part in entry.split(",")):
            name, _, value = text.partition("=")
            amount = _TIME.fullmatch(value)
            if text == "sync@sample":
                found["sync_at_sample"] = True
            elif text == "pageable@stage":
                found["pageable_at_stage"] = True
            elif name in ("slow-host", "slow-device") and amount and (seconds := _seconds(*amount.groups())) <= MOST_S:
                found[f"{name.replace('-', '_')}_s"] = seconds
            else:
                raise InvalidRequest(
                    f"inject is {text!r}; allowed: {', '.join(SPELLINGS)} (times in us, ms or s, up to {MOST_S:g} s)"
                )
        return cls(**found)

    def __bool__(self) -> bool:
        return self != Faults()


def _seconds(amount: str, unit: str) -> float:
    return float(amount) * _UNITS[unit]
