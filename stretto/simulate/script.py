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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from stretto.config import SchedulerConfig
from stretto.errors import InvalidRequest
from stretto.request import PRIORITY_STEP
from stretto.simulate.values import MOST_PRIORITY, MOST_TOKENS, check_size, whole_number

Verb = Literal["arrive", "abort", "finish", "fail"]
_VERBS = ("arrive", "abort", "finish", "fail")
_ARRIVAL_OPTIONS = {
    "prompt": (1, MOST_TOKENS),
    "max_tokens": (1, MOST_TOKENS),
    "priority": (-MOST_PRIORITY, MOST_PRIORITY),
}
"""Least and most of each."""

MAX_TURNS = 100_000
EOS = 0
OTHER = 1


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of a script."""

    turn: int
    verb: Verb
    name: str
    options: dict[str, int] = field(default_factory=dict)
    line: int = 0
    """Where it stands in the script, from 1."""

    def refusal(self, why: str) -> InvalidRequest:
        """The error that this line earns."""
        return InvalidRequest(f"line {self.line}, 'at {self.turn} {self.verb} {self.name}': {why}")


@dataclass(frozen=True, slots=True)
class Script:
    """A scheduler and what happens to it."""

    config: SchedulerConfig
    happenings: tuple[Happening, ...]


def parse_script(text: str) -> Script:
    """Read a script. Raises InvalidRequest naming the line and what is allowed there."""
    options: dict[str, Any] = {}
    config_lines: list[int] = []
    happenings: list[Happening] = []
    for line, content in enumerate(text.splitlines(), 1):
        try:
            words = _words(content)
            if not words:
                continue
            if words[0] == "config":
                _take_options(options, words[1:], _CONFIG_OPTIONS)
                config_lines.append(line)
            elif words[0] == "at" and len(words) >= 4:
                happenings.append(_happening(words, line))
            else:
                raise InvalidRequest("allowed: 'config NAME=VALUE ...' or 'at TURN arrive|abort|finish|fail NAME ...'")
        except InvalidRequest as error:
            raise InvalidRequest(f"line {line}, {content.strip()!r}: {error}") from error
    config = _config(options, config_lines)
    _check_arrivals(happenings, config)
    _check_order(happenings)
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


_CONFIG_OPTIONS = dict.fromkeys(_CONFIG_DEFAULTS, (0, MOST_TOKENS)) | {"enable_prefix_caching": (0, 1)}
"""Least and most of each; `SchedulerConfig` knows better."""


def _words(content: str) -> list[str]:
    try:
        return shlex.split(content, comments=True)
    except ValueError as error:
        raise InvalidRequest(f"{str(error)[:1].lower()}{str(error)[1:]}; allowed: quotes in pairs, or none") from None


def _config(options: dict[str, Any], lines: list[int]) -> SchedulerConfig:
    try:
        config = SchedulerConfig(**{**_CONFIG_DEFAULTS, **options}, eos_ids=(EOS,), vocab_size=2 + PRIORITY_STEP)
        check_size(config)
    except InvalidRequest as error:
        raise InvalidRequest(f"config (line {', '.join(map(str, lines))}): {error}") from error
    return config


def _happening(words: list[str], line: int) -> Happening:
    turn, verb, name = words[1:4]
    if verb not in _VERBS:
        raise InvalidRequest(f"{verb!r} is not known; allowed: {', '.join(_VERBS)}")
    options: dict[str, Any] = {}
    _take_options(options, words[4:], _ARRIVAL_OPTIONS if verb == "arrive" else {})
    if verb == "arrive" and "prompt" not in options:
        raise InvalidRequest("a request that arrives needs prompt=TOKENS")
    return Happening(whole_number("the turn", turn, 0, MAX_TURNS - 1), cast(Verb, verb), name, options, line)


def _take_options(options: dict[str, Any], words: Iterable[str], known: Mapping[str, tuple[int, int]]) -> None:
    """Add the options written as `words` to `options`, each of which may be given once."""
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise InvalidRequest(f"{word!r} is not known; allowed: {', '.join(f'{k}=...' for k in known) or 'nothing'}")
        if name in options:
            raise InvalidRequest(f"{name} is given twice, {options[name]!r} and {value!r}; allowed: once")
        options[name] = value if name == "batch_policy" else whole_number(name, value, *known[name])


def _check_arrivals(happenings: list[Happening], config: SchedulerConfig) -> None:
    """Every request arrives once, with a prompt that leaves room for a token."""
    seen: dict[str, Happening] = {}
    for happening in happenings:
        if happening.verb != "arrive":
            continue
        name, most = happening.name, config.max_model_len - 1
        if name in seen:
            raise happening.refusal(f"{name} arrives twice (line {seen[name].line}); allowed: a name for each request")
        if happening.options["prompt"] > most:
            given = happening.options["prompt"]
            raise happening.refusal(f"prompt is {given}; allowed: up to {most}, as max_model_len is {most + 1}")
        seen[name] = happening


def _check_order(happenings: list[Happening]) -> None:
    """Nothing happens to a request before it arrives, nor twice at once. In a turn, lines count from the top."""
    arrivals = {happening.name: happening for happening in happenings if happening.verb == "arrive"}
    seen: dict[tuple[int, str, bool], Happening] = {}
    for happening in happenings:
        if happening.verb == "arrive":
            continue
        arrival = arrivals.get(happening.name)
        if arrival is None:
            raise happening.refusal(f"{happening.name} never arrives")
        if (arrival.turn, arrival.line) > (happening.turn, happening.line):
            raise happening.refusal(
                f"{happening.name} arrives later, at turn {arrival.turn} in line {arrival.line}; allowed: from then on"
            )
        # `finish` and `fail` both say what one token is, so there can be but one of them.
        other = seen.setdefault((happening.turn, happening.name, happening.verb == "abort"), happening)
        if other is not happening:
            raise happening.refusal(f"line {other.line} already says {other.verb!r} of it then; allowed: one of them")
