"""Checks the values of a dataclass against the types that its fields are declared with: one rule for all options."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stretto.errors import InvalidRequest

_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
}


def check_types(options: Any) -> None:
    """Raise InvalidRequest naming the first field of this dataclass whose value has another type than declared.

    Knows what options are made of: str, int, float, bool, None, Literal, Sequence of these, and unions. A whole number
    is a number, but True is none, and a text is no sequence of texts. NaN is no number.
    """
    cls: type = type(options)
    for name, declared in _declared(cls).items():
        value = getattr(options, name)
        if not _is(value, declared):
            allowed = list(dict.fromkeys(word for part in _parts(declared) for word in _words(part)))
            shown = f"{value!r:.200}" if name in _shown(cls) else f"of type {type(value).__name__}"
            raise InvalidRequest(f"{name} is {shown}; allowed: {', '.join(allowed)}")


_declared = functools.cache(get_type_hints)
"""The fields' types by name; resolving annotations takes a millisecond."""


def _shown(cls: Any) -> set[str]:
    """Fields whose values may be shown: not the secrets, which `repr` leaves out too."""
    return {field.name for field in fields(cls) if field.repr}


def _parts(declared: Any) -> tuple[Any, ...]:
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def _is(value: object, declared: Any) -> bool:
    origin = get_origin(declared)
    if origin in (Union, UnionType):
        return any(_is(value, part) for part in get_args(declared))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(declared)
    if origin is Sequence:
        (element,) = get_args(declared)
        return (
            isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(_is(x, element) for x in value)
        )
    if isinstance(value, bool):
        return declared is bool
    if declared is float:
        return isinstance(value, int | float) and value == value
    return isinstance(value, declared)


def _words(declared: Any) -> list[str]:
    origin = get_origin(declared)
    if origin is Literal:
        return [str(choice) for choice in get_args(declared)]
    if origin is Sequence:
        return [f"a list with {word} each" for word in _words(get_args(declared)[0])]
    return [_WORDS[declared]]
