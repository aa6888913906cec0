"""Log-probabilities in the two forms that OpenAI's endpoints have."""

from __future__ import annotations

from stretto.request import CompletionOutput, Logprob
from stretto.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from stretto.server.protocol.completions import CompletionLogprobs
from stretto.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON knows no minus infinity."""


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


def completion_logprobs(output: CompletionOutput, num_top: int, offset: int) -> CompletionLogprobs | None:
    """For completions: parallel lists. `offset` is where the text of the first token begins."""
    if output.logprobs is None:
        return None
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        own = row[token_id]
        text = own.decoded_token or ""
        tokens.append(text)
        logprobs.append(_finite(own))
        tops.append({entry.decoded_token or "": _finite(entry) for _, entry in _likeliest(row, num_top)})
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(tokens, logprobs, tops if num_top else None, offsets)


def token_bytes(token_id: int, tokenizer: Tokenizer) -> list[int] | None:
    """The bytes of a token, which need not be whole characters."""
    return list(tokenizer.token_bytes(token_id)) if tokenizer.has_token_bytes else None


def _likeliest(row: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    ranked = [(token_id, entry) for token_id, entry in row.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
