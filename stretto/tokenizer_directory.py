"""Finds the tokenizer of a Hugging Face model directory: tokenizer.json and the small JSON files around it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_arguments(directory: Path) -> tuple["tokenizers.Tokenizer", dict[str, Any]]:
    """The backend and the keyword arguments of Tokenizer. Raises ModelLoadError, naming the file."""
    from tokenizers import Tokenizer

    config = _read_json(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ModelLoadError(f"{path}: no valid tokenizer: {error}") from error
    else:
        backend = _converted_by_transformers(directory)
    # Stored defaults of training that would cut prompts short or pad them.
    backend.no_truncation()
    backend.no_padding()
    special_tokens = _special_tokens(directory, config)
    ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    return backend, {
        "bos_id": ids.get("bos_token"),
        "eos_id": ids.get("eos_token"),
        "eos_ids": _eos_ids(directory),
        "special_tokens": special_tokens,
        "chat_templates": _chat_templates(directory, config),
    }


def _converted_by_transformers(directory: Path) -> "tokenizers.Tokenizer":
    """The way for models with only vocab.json and merges.txt or tokenizer.model; slow: it imports transformers."""
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # depends on the model's files, and raises nearly anything
        raise ModelLoadError(
            f"{directory}: there is no tokenizer.json, and transformers finds no tokenizer: {error}"
        ) from error
    backend: tokenizers.Tokenizer | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(
            f"{directory}: there is no tokenizer.json, and {type(converted).__name__} cannot be converted to one"
        )
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: a JSON object is expected")
    return content


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = {**_read_json(directory / "special_tokens_map.json"), **config}
    found = {}
    for name in _SPECIAL_TOKENS:
        value = merged.get(name)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            return [index for index in value if isinstance(index, int)]
    return []


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    stored = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        templates.update({entry["name"]: entry["template"] for entry in stored})
    # Files of their own are the newer convention and win.
    main = directory / "chat_template.jinja"
    named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for path in [*([main] if main.exists() else []), *named]:
        templates["default" if path == main else path.stem] = path.read_text("utf-8")
    return templates
