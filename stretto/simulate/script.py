"""Scripts: what happens at which turn of the loop, one line each, run step by step into an exact schedule.

# options of the scheduler, as in SchedulerConfig
config max_num_seqs=2 page_size=4 num_pages=9 overlap_depth=1
at 0 arrive A prompt=10 max_tokens=5
at 1 arrive B prompt=3 max_tokens=8 priority=-1
at 4 abort A
at 3 finish B      # the token that B samples in the step launched at turn 3 ends it
at 5 fail B        # its logits in the step launched at turn 5 are not numbers
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from stretto.config import SchedulerConfig
from stretto.errors import InvalidRequest
from stretto.request import PRIORITY_STEP

Verb = Literal["arrive", "abort", "finish", "fail"]
_VERBS = ("arrive", "abort", "finish", "fail")
_ARRIVAL_OPTIONS = ("prompt", "max_tokens", "priority")

EOS = 0
OTHER = 1


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of a script."""

    turn: int
    verb: Verb
    name: str
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """A scheduler and what happens to it."""

    config: SchedulerConfig
    happenings: tuple[Happening, ...]


def parse_script(text: str) -> Script:
    """Read a script. Raises InvalidRequest naming the line and what is allowed there."""
    options: dict[str, Any] = {}
    happenings: list[Happening] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            if words[0] == "config":
                options.update(_options(words[1:], tuple(_CONFIG_DEFAULTS)))
            elif words[0] == "at" and len(words) >= 4:
                happenings.append(_happening(words))
            else:
                raise InvalidRequest("allowed: 'config NAME=VALUE ...' or 'at TURN arrive|abort|finish|fail NAME ...'")
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}, {line.strip()!r}: {error}") from error
    _check_names(happenings)
    config = SchedulerConfig(**{**_CONFIG_DEFAULTS, **options}, eos_ids=(EOS,), vocab_size=2 + PRIORITY_STEP)
    return Script(config, tuple(happenings))


_CONFIG_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 65,
    "overlap_depth": 1,
    "batch_policy": "mixed",
    "enable_prefix_caching": 1,
}


def _happening(words: list[str]) -> Happening:
    turn, verb, name = words[1:4]
    if not turn.isdigit():
        raise InvalidRequest(f"the turn is {turn!r}; allowed: a whole number from 0")
    if verb not in _VERBS:
        raise InvalidRequest(f"{verb!r} is not known; allowed: {', '.join(_VERBS)}")
    options = _options(words[4:], _ARRIVAL_OPTIONS if verb == "arrive" else ())
    if verb == "arrive" and "prompt" not in options:
        raise InvalidRequest("a request that arrives needs prompt=TOKENS")
    return Happening(int(turn), cast(Verb, verb), name, options)


def _options(words: Iterable[str], known: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise InvalidRequest(f"{word!r} is not known; allowed: {', '.join(f'{k}=...' for k in known) or 'nothing'}")
        try:
            options[name] = value if name == "batch_policy" else int(value)
        except ValueError:
            raise InvalidRequest(f"{name} is {value!r}; allowed: a whole number") from None
    return options


def _check_names(happenings: list[Happening]) -> None:
    arrivals = [happening.name for happening in happenings if happening.verb == "arrive"]
    for happening in happenings:
        if happening.name not in arrivals:
            raise InvalidRequest(
                f"'at {happening.turn} {happening.verb} {happening.name}': {happening.name} never arrives"
            )
    for name in arrivals:
        if arrivals.count(name) > 1:
            raise InvalidRequest(f"{name} arrives twice; every request needs a name of its own")
