"""Prompts as a user may give them: a text, token ids, or a mapping with either. Owns the forms that are allowed.

Whether the engine can run the token ids is the runtime's check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import numpy as np

from stretto.errors import InvalidRequest, NotSupported
from stretto.request import TokenArray


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class _OptionalText(TypedDict, total=False):
    prompt: str


class TokensPrompt(_OptionalText):
    """A prompt as token ids; `prompt` is then only repeated in the output."""

    prompt_token_ids: Sequence[int]


PromptType: TypeAlias = str | TextPrompt | TokensPrompt | Sequence[int]
Encode: TypeAlias = Callable[[str], list[int]]

_FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text, if there is one, and its token ids."""

    text: str | None
    token_ids: Sequence[int] | TokenArray


def parse_prompts(prompts: PromptType | Sequence[PromptType], encode: Encode) -> list[Prompt]:
    """One or many prompts, in order. Raises InvalidRequest (it names the prompt) or NotSupported."""
    if _is_one_prompt(prompts):
        return [parse_prompt(prompts, encode)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts is a {type(prompts).__name__}; allowed: {_FORMS}, or a list of these")
    return [parse_prompt(prompt, encode, f"prompt {index}") for index, prompt in enumerate(prompts)]


def parse_prompt(prompt: object, encode: Encode, name: str = "the prompt") -> Prompt:
    """One prompt; `name` is what an error calls it. Raises InvalidRequest or NotSupported."""
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, encode, name)
    if isinstance(prompt, str):
        return Prompt(prompt, encode(prompt))
    if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray)):
        return Prompt(None, prompt)
    raise InvalidRequest(f"{name} is a {type(prompt).__name__}; allowed: {_FORMS}")


def _parse_mapping(prompt: Mapping[str, object], encode: Encode, name: str) -> Prompt:
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
    if unknown:
        raise NotSupported(f"{name}: {', '.join(map(repr, unknown))} not built; allowed: {_FORMS}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"{name}: 'prompt' is a {type(text).__name__}; allowed: a text")
    if ids is None:
        if text is None:
            raise InvalidRequest(f"{name} has neither 'prompt' nor 'prompt_token_ids'; allowed: {_FORMS}")
        return Prompt(text, encode(text))
    return Prompt(text, parse_prompt(ids, encode, f"{name}: 'prompt_token_ids'").token_ids)


def _is_one_prompt(prompts: object) -> bool:
    """A text, a mapping or an array is one prompt, and so is a list that starts with a number."""
    if isinstance(prompts, (str, bytes, Mapping, np.ndarray)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], (int, float, np.number))
