"""Text to token ids and back, and chats to text, for one model.

Owns the vocabulary's two directions. How text appears bit by bit while tokens arrive is detokenizer.py.
Importing this module is cheap; the libraries it stands on are imported when a tokenizer is built.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.chat_template import ChatTemplate
from stretto.errors import InvalidRequest
from stretto.tokenizer_gguf import vocabulary_from_gguf

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; nothing changes after construction but a cache.

    `bos_id`, `eos_id`: int or None. `eos_ids`: every id that ends an answer. `special_ids`: ids that decoding hides.
    `vocab_size`: ids are below it (the model's embedding may have more rows, which have no text).
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`prefix_ids` and `suffix_ids` go around a text in addition to what the backend's own post-processor adds."""
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids) | ({eos_id} if eos_id is not None else set())
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = vocab_size or max(backend.get_vocab_size(), max(added, default=-1) + 1)
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._special_tokens = dict(special_tokens or {})
        self._templates = {
            name: ChatTemplate(source, self._special_tokens) for name, source in (chat_templates or {}).items()
        }
        self._added_text = {index: token.content for index, token in added.items()}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._byte_level = _contains(decoder, "ByteLevel")
        self.has_token_bytes = self._byte_level or _is_sentencepiece(decoder)
        self.leading_spaces_dropped = int(self.has_token_bytes and _contains(decoder, "Strip"))
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """From the metadata of a GGUF file. Raises ModelLoadError or NotSupported (kind of tokenizer not known)."""
        vocabulary = vocabulary_from_gguf(metadata)
        return cls(
            vocabulary.backend,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            eos_ids=vocabulary.eos_ids,
            prefix_ids=vocabulary.prefix_ids,
            suffix_ids=vocabulary.suffix_ids,
            special_tokens=vocabulary.special_tokens,
            chat_templates=vocabulary.chat_templates,
            vocab_size=vocabulary.size,
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face model directory. Raises ModelLoadError if it has no usable tokenizer."""
        from stretto.tokenizer_directory import tokenizer_arguments

        backend, arguments = tokenizer_arguments(Path(path))
        return cls(backend, **arguments)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Names of special tokens in the text become these tokens.

        `add_special_tokens` adds what the model expects around a text (mostly BOS). Raises InvalidRequest if `text` is
        no string or not valid Unicode (half a surrogate pair).
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"a text to tokenize must be a string, not {type(text).__name__}")
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:  # what the library makes of half a surrogate pair
            raise InvalidRequest(f"the text is not valid Unicode (half a surrogate pair?): {text!r:.60}") from error
        if add_special_tokens and (self._prefix_ids or self._suffix_ids):
            return [*self._prefix_ids, *ids, *self._suffix_ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Bytes that are no UTF-8 become U+FFFD; ids without a token have no text."""
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        if not self.has_token_bytes:
            return self.decode_window(list(ids))
        data = b"".join(map(self.token_bytes, ids))
        return data.removeprefix(b" " * self.leading_spaces_dropped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for, b"" if there is no such token. Only if `has_token_bytes`.

        They need not be whole characters. A leading space that decoding drops at the very beginning is still there.
        """
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        text = self._added_text.get(token_id)
        if text is not None:
            return text.encode()
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return token.translate(_BYTE_LEVEL).encode("latin-1")
            except UnicodeEncodeError:  # no byte-level token: its text is what it says
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def decode_window(self, ids: Sequence[int]) -> str:
        """The decoder's own idea of these tokens as one text, special ones included. For vocabularies without bytes."""
        known = [token_id for token_id in ids if self.has_token(token_id)]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def has_token(self, token_id: int) -> bool:
        """Whether there is a token with this id; a model may have ids beyond the vocabulary (padded embeddings)."""
        return self._token(token_id) is not None

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. `chat_template` replaces the model's own; `variables` are for the
        template.

        Raises InvalidRequest if the model has no template, the given one is no Jinja, or the template rejects the
        conversation (with its own words); ModelLoadError if the model's own is no Jinja.
        """
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise InvalidRequest(f"chat_template is a {type(chat_template).__name__}; allowed: a Jinja template")
            template = ChatTemplate(chat_template, self._special_tokens, on_syntax_error=InvalidRequest)
        elif tools and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        elif "default" in self._templates:
            template = self._templates["default"]
        else:
            raise InvalidRequest("the model has no chat template: give one with chat_template=, or use a plain prompt")
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; options as in apply_chat_template. Only the template adds BOS: never twice."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)


def _byte_level_table() -> dict[int, str]:
    """GPT-2's alphabet writes each byte as a printable character; maps that to the character of the byte's number."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {
        **{byte: chr(byte) for byte in printable},
        **{0x100 + index: chr(byte) for index, byte in enumerate(others)},
    }


_BYTE_LEVEL = _byte_level_table()
# The decoders of converted sentencepiece vocabularies, and the one that undoes the space put before a text.
_SENTENCEPIECE = (
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
_DROP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _contains(decoder: Mapping[str, Any], kind: str) -> bool:
    return decoder.get("type") == kind or any(_contains(part, kind) for part in decoder.get("decoders", ()))


def _is_sentencepiece(decoder: Mapping[str, Any]) -> bool:
    """Whether tokens are plain text with "▁" for spaces and <0xAB> for bytes: then each token has its bytes."""
    parts = decoder.get("decoders", ())
    return tuple(parts[:3]) == _SENTENCEPIECE and parts[3:] in ([], [_DROP_ONE_SPACE])
