"""Builds a tokenizer from the vocabulary in a GGUF file's metadata.

Owns the mapping of `tokenizer.ggml.*` keys to one of two kinds: byte-level BPE ("gpt2") and sentencepiece's BPE
("llama"). For the first, how a text is cut into words before merging is not in the file, only a name for it
(`tokenizer.ggml.pre`); the families known here are listed in _PRE_TOKENIZERS, and any
other name is refused, since a wrong guess gives wrong ids without any other sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.errors import ModelLoadError, NotSupported

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# The words of GPT-2, of Llama 3 and of Qwen2, as their authors published them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Control tokens that end an answer in every chat format that uses them, whatever the file's eos id is.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)


@dataclass(frozen=True, slots=True)
class _Family:
    patterns: tuple[str, ...]
    """Regular expressions, applied one after the other, each cutting the pieces further."""
    whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, without merging."""
    add_bos: bool = False
    """Whether a prompt begins with BOS if the file does not say."""
    nfc: bool = False
    """The text is brought into Unicode's composed form first."""


_PRE_TOKENIZERS = {
    "smollm": _Family((r"\p{N}", _GPT2)),
    "llama-bpe": _Family((_LLAMA3,), whole_words=True, add_bos=True),
    "llama3": _Family((_LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": _Family((_LLAMA3,), whole_words=True, add_bos=True),
    "qwen2": _Family((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Family((_QWEN2,), nfc=True),
    "gpt-2": _Family((_GPT2,)),
    "default": _Family((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_SENTENCEPIECE = _Family((), add_bos=True)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """What the metadata says about the tokenizer; `backend` is complete but for BOS and EOS around a text."""

    backend: "tokenizers.Tokenizer"
    size: int
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> GGUFVocabulary:
    """Raises ModelLoadError for missing or contradictory keys, NotSupported for an unknown kind of tokenizer."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelLoadError("the file has no tokenizer: metadata key 'tokenizer.ggml.model' is missing")
    if model not in ("gpt2", "llama"):
        known = "'gpt2' (byte-level BPE) and 'llama' (sentencepiece)"
        raise NotSupported(f"tokenizer.ggml.model {model!r} is not supported; supported are {known}")
    # Sentencepiece cuts no words; what llama.cpp writes here for it has no meaning.
    pre = metadata.get("tokenizer.ggml.pre") if model == "gpt2" else "sentencepiece"
    if model == "gpt2" and pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise NotSupported(
            f"tokenizer.ggml.pre is {pre!r}, which is not known; a wrong guess would give wrong ids. Known: {known}"
        )
    family = _PRE_TOKENIZERS[str(pre)] if model == "gpt2" else _SENTENCEPIECE
    tokens, types = _tokens_and_types(metadata)
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, types, family)
    else:
        backend = _sentencepiece(metadata, tokens, types)
    bos_id, eos_id = (_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    special_ids = {"bos_token": bos_id, "eos_token": eos_id}
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        special_ids[name] = _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens))
    ends = {eos_id, *(_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eot", "eom"))}
    ends.update(
        index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[index] in _END_OF_TURN
    )
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", family.add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return GGUFVocabulary(
        backend=backend,
        size=len(tokens),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(index for index in ends if index is not None),
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        suffix_ids=(eos_id,) if add_eos and eos_id is not None else (),
        special_tokens={name: tokens[index] for name, index in special_ids.items() if index is not None},
        chat_templates=_chat_templates(metadata),
    )


def _tokens_and_types(metadata: Mapping[str, object]) -> tuple[list[str], list[int]]:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if "tokenizer.ggml.token_type" not in metadata:
        return tokens, [1] * len(tokens)
    types = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return tokens, types


def _list(metadata: Mapping[str, object], key: str, kind: type) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ModelLoadError(f"metadata key {key!r} is missing or no list of {kind.__name__}")
    return values


def _token_id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < size):
        raise ModelLoadError(f"{key} is {value!r}, but the vocabulary has {size} tokens")
    return value


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    # "tokenizer.chat_template" is the default one, "tokenizer.chat_template.NAME" those for a purpose, like tool use.
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }


def _byte_level(
    metadata: Mapping[str, object], tokens: list[str], types: list[int], family: _Family
) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = _vocabulary(tokens, types)
    merges = []
    for line in _list(metadata, "tokenizer.ggml.merges", str):
        left, space, right = line.partition(" ")
        if not space:
            raise ModelLoadError(f"tokenizer.ggml.merges has {line!r}, which is no pair of tokens")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.whole_words)
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = Tokenizer(model)
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in family.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, types)
    return backend


def _sentencepiece(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(tokens, types)
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(vocabulary, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback="<0x00>" in vocabulary,
    )
    backend = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    text_decoders: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        text_decoders.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(text_decoders)
    _add_special_tokens(backend, tokens, types)
    return backend


def _merges_by_score(vocabulary: Mapping[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score of the piece first.

    Sentencepiece keeps no merges: it joins the neighbours whose union has the highest score, the leftmost of equals.
    """
    mergeable = {piece: index for piece, index in vocabulary.items() if types[index] == _NORMAL}
    found = []
    for piece, index in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                found.append((-scores[index], index, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    # Entries without use only fill the matrix up; they have no text and must not shadow a token that has the same name.
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if len(vocabulary) != len(tokens) - types.count(_UNUSED):
        twice = next(
            token for index, token in enumerate(tokens) if types[index] != _UNUSED and vocabulary[token] != index
        )
        raise ModelLoadError(f"tokenizer.ggml.tokens has the token {twice!r} twice")
    return vocabulary


def _add_special_tokens(backend: "tokenizers.Tokenizer", tokens: list[str], types: list[int]) -> None:
    """Have control and user-defined tokens found in the raw text, before any normalisation, as one token each."""
    from tokenizers import AddedToken

    special = (_CONTROL, _UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(tokens[index], special=kind in special, normalized=False)
            for index, kind in enumerate(types)
            if kind in (*special, _USER_DEFINED)
        ]
    )
