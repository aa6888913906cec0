"""Log-probabilities in the forms that the endpoints have, and where in a text its tokens begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from stretto.detokenizer import IncrementalDetokenizer
from stretto.output import PromptRows
from stretto.prompts import Prompt
from stretto.request import CompletionOutput, Logprob, SamplingParams
from stretto.server.errors import bad_request
from stretto.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from stretto.server.protocol.completions import CompletionLogprobs
from stretto.server.protocol.prompt_scores import PromptScores, TokenScore
from stretto.server.protocol.responses import EventLogprob, EventTopLogprob
from stretto.tokenizer import Tokenizer

Row: TypeAlias = Mapping[int, Logprob]

MAX_SCORES = 2**20
"""Log-probabilities of prompts that one answer may hold."""
_LOWEST = -9999.0
"""JSON knows no minus infinity."""


_NO_CHARACTER = "\ufffd"


def chat_logprobs(output: CompletionOutput, num_top: int, tokenizer: Tokenizer) -> ChoiceLogprobs | None:
    """For chat: one record per token; the likeliest `num_top` of each place with it."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        top = [
            TopLogprob(entry.decoded_token or "", _finite(entry), token_bytes(top_id, tokenizer))
            for top_id, entry in _likeliest(row, num_top)
        ]
        own = row[token_id]
        content.append(TokenLogprob(own.decoded_token or "", _finite(own), token_bytes(token_id, tokenizer), top))
    return ChoiceLogprobs(content)


def event_logprobs(content: Sequence[TokenLogprob]) -> list[EventLogprob]:
    """For events of a response."""
    return [
        EventLogprob(
            entry.token, entry.logprob, [EventTopLogprob(top.token, top.logprob) for top in entry.top_logprobs]
        )
        for entry in content
    ]


def completion_logprobs(
    token_ids: Sequence[int], rows: Sequence[Row | None], num_top: int, offsets: TextOffsets
) -> CompletionLogprobs:
    """For completions: parallel lists. With the likeliest `num_top` of each place comes the token itself.

    A place without a row (a prompt's first) has no log-probability.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, row in zip(token_ids, rows, strict=True):
        if row is None:
            tokens.append(offsets.text_of(token_id))
            logprobs.append(None)
            tops.append(None)
            continue
        own = row[token_id]
        tokens.append(own.decoded_token or "")
        logprobs.append(_finite(own))
        top: dict[str, float] = {}
        for entry in (*(entry for _, entry in _likeliest(row, num_top)), own):
            # Parts of characters all look alike: the likeliest of them is told.
            top.setdefault(entry.decoded_token or "", _finite(entry))
        tops.append(top)
    return CompletionLogprobs(tokens, logprobs, tops if num_top else None, offsets.of(token_ids))


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        tops,
        first.text_offset + second.text_offset,
    )


def prompt_scores(rows: PromptRows | None) -> PromptScores | None:
    """A prompt's log-probabilities for JSON."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token_id): TokenScore(_finite(entry), entry.rank, entry.decoded_token)
            for token_id, entry in row.items()
        }
        for row in rows
    ]


def num_scores(prompts: Sequence[Prompt], params: SamplingParams) -> int:
    """Log-probabilities of prompts that an answer holds at most. Raises ApiError for more than `MAX_SCORES`."""
    if params.prompt_logprobs is None:
        return 0
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * params.n
    count = num_tokens * (params.prompt_logprobs + 1)
    if count > MAX_SCORES:
        raise bad_request(
            f"the answer would hold {count} log-probabilities of prompts ({num_tokens} tokens, with "
            f"{params.prompt_logprobs} top tokens each); allowed: up to {MAX_SCORES}",
            "prompt_logprobs",
        )
    return count


class TextOffsets:
    """Where tokens begin in the text that they make, one portion after the other."""

    def __init__(self, tokenizer: Tokenizer | None, start: int, *, skip_special_tokens: bool) -> None:
        """`start`: characters before the first. Without a tokenizer there is no text."""
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._at = start

    @classmethod
    def of_prompt(cls, tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> TextOffsets:
        """For the tokens of a prompt, whose `text` may lack what the tokenizer puts before it."""
        whole = "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)
        added = len(whole) - len(text) if whole.endswith(text) else 0
        return cls(tokenizer, -added, skip_special_tokens=False)

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Where each of the next tokens begins. The parts of a character all begin where it does."""
        offsets = []
        for token_id in token_ids:
            text = "" if self._detokenizer is None else self._detokenizer.push((token_id,))
            begins = self._at
            if text.startswith(_NO_CHARACTER) and not self.text_of(token_id).startswith(_NO_CHARACTER):
                begins += len(text) - len(text.lstrip(_NO_CHARACTER))  # what the tokens before have left incomplete
            offsets.append(max(0, begins))
            self._at += len(text)
        return offsets

    def text_of(self, token_id: int) -> str:
        """The text of one token by itself."""
        return "" if self._tokenizer is None else self._tokenizer.decode((token_id,), skip_special_tokens=False)


def token_bytes(token_id: int, tokenizer: Tokenizer) -> list[int] | None:
    """The bytes of a token, which need not be whole characters."""
    return list(tokenizer.token_bytes(token_id)) if tokenizer.has_token_bytes else None


def _likeliest(row: Row, count: int) -> list[tuple[int, Logprob]]:
    ranked = [(token_id, entry) for token_id, entry in row.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
