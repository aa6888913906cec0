"""From tokens to what the user gets: text, stop strings, log-probabilities, samples and their prompts.

Owns the state of one answer between its first and last token. It is the same code whether the answer is streamed or
handed over at its end, so both are equal to the byte. Never touches the scheduler: it says that a stop string is
complete, and its caller ends the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from stretto.detokenizer import IncrementalDetokenizer, StopChecker
from stretto.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from stretto.prompts import Prompt
    from stretto.tokenizer import Tokenizer

PromptRows: TypeAlias = list[dict[int, Logprob] | None]
"""For each prompt token its own log-probability and the top tokens', by token id; None for the first."""


class AnswerText:
    """The text of one answer while its tokens arrive. Work per token does not grow with the answer."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._unchecked_tokens = params.min_tokens if params.stop_strings else 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached; no more tokens are wanted then."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. Stop strings count from the token after the first `min_tokens`.

        Where there are stop strings, one token at a time: the token that completes one is the last that counts.
        """
        text = self._detokenizer.push(token_ids)
        if self._unchecked_tokens > 0:
            self._unchecked_tokens -= len(token_ids)
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What was held back; call once, after the last token. May itself complete a stop string (of U+FFFD)."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text + self._stops.finish()


class Sample:
    """One sample of a prompt: its request, and the part of its output that the user has or has not seen."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None, *, watched: bool) -> None:
        """`watched`: its tokens are looked at as they come; otherwise only at its end. No tokenizer: no text."""
        self.index = index
        self.request = request
        self.watched = watched or bool(request.params.stop_strings)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else AnswerText(tokenizer, request.params)
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprob_sum = 0.0
        self._num_summed = 0
        """Tokens whose log-probabilities are in the sum."""
        self._seen_parts = 0
        self._seen_tokens = 0
        self._seen_finish = False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would give something that it has not given before."""
        return self._seen_tokens < len(self._token_ids) or (self.finish_reason is not None and not self._seen_finish)

    def push(self, token_id: int, *, is_stop_token: bool = False) -> bool:  # hot path
        """Take the next token; True if it completes a stop string: then the request is to be ended with it."""
        self._take((token_id,), is_stop_token)
        return self._text is not None and self._text.stop_string is not None

    def push_all(self, token_ids: Sequence[int], *, ends_with_stop_token: bool) -> None:
        """Take all tokens of a finished request at once; only of a sample that is not watched."""
        self._take(token_ids, ends_with_stop_token)

    def _take(self, token_ids: Sequence[int], ends_with_stop_token: bool) -> None:
        self._token_ids += token_ids
        if self._text is None:
            return
        if ends_with_stop_token and not self.request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        text = self._text.push(token_ids)
        if text:
            self._parts.append(text)

    def finish(self, reason: FinishReason) -> None:
        """No more tokens will come. A stop string wins over the reason that fell on the same token."""
        if self._text is not None:
            rest = self._text.finish()
            if rest:
                self._parts.append(rest)
            if self._text.stop_string is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._text.stop_string
                return
        self.finish_reason = reason
        request = self.request
        if reason is FinishReason.STOP and request.stop_token in (request.params.stop_token_ids or ()):
            self.stop_reason = request.stop_token

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def take_delta(self) -> CompletionOutput:
        """What came since the last call. `cumulative_logprob` is that of the whole sample so far."""
        output = self._output(self._seen_parts, self._seen_tokens)
        self._seen_parts, self._seen_tokens = len(self._parts), len(self._token_ids)
        self._seen_finish = self.finish_reason is not None
        return output

    def _output(self, first_part: int, first_token: int) -> CompletionOutput:
        tokens = self._token_ids[first_token:]
        known, logprobs, total = self.request.logprobs, None, None
        if known is not None:
            rows = known[first_token : len(self._token_ids)]
            logprobs = [self._logprobs(token, row) for token, row in zip(tokens, rows, strict=True)]
            total = self._sum_logprobs(known)
        return CompletionOutput(
            index=self.index,
            text="".join(self._parts[first_part:]),
            token_ids=tokens,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )

    def _sum_logprobs(self, known: Sequence[TokenLogprobs]) -> float:
        """Of all tokens so far; looks only at those that came since the last call."""
        for row in known[self._num_summed : len(self._token_ids)]:
            self._logprob_sum += row.logprob
        self._num_summed = len(self._token_ids)
        return self._logprob_sum

    def prompt_logprobs(self) -> PromptRows | None:
        """Of each prompt token; None where nobody asked, or as long as not all are known."""
        known = self.request.prompt_logprobs
        if known is None or not known.complete:
            return None
        scored = known.known()
        rows: PromptRows = [None]
        for token_id, *row in zip(
            self.request.prompt_ids[1:].tolist(),
            scored.logprob_Q.tolist(),
            scored.rank_Q.tolist(),
            scored.top_ids_QL.tolist(),
            scored.top_logprobs_QL.tolist(),
            strict=True,
        ):
            rows.append(self._logprobs(token_id, TokenLogprobs(*row)))
        return rows

    def _logprobs(self, token_id: int, row: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the likeliest. Ids below 0 stand for nothing."""
        result = {token_id: Logprob(row.logprob, row.rank, self._token_text(token_id))}
        for rank, (top_id, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
            if top_id >= 0 and top_id not in result:
                result[int(top_id)] = Logprob(float(logprob), rank, self._token_text(int(top_id)))
        return result

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode((token_id,), skip_special_tokens=False)


class Job:
    """One prompt and its samples."""

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.samples: list[Sample] = []
        self._prompt_ids = list(map(int, prompt.token_ids))
        self._prompt_told = False

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def has_news(self) -> bool:
        return any(sample.has_news for sample in self.samples)

    def output(self) -> RequestOutput:
        """Everything so far, all samples."""
        return self._output([sample.output() for sample in self.samples], self.samples[0].prompt_logprobs())

    def take_delta(self) -> RequestOutput:
        """What came since the last call, of the samples that have something new."""
        rows = None if self._prompt_told else self.samples[0].prompt_logprobs()
        self._prompt_told |= rows is not None
        return self._output([sample.take_delta() for sample in self.samples if sample.has_news], rows)

    def _output(self, outputs: list[CompletionOutput], prompt_logprobs: PromptRows | None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.samples[0].request.num_cached,
            prompt_logprobs=prompt_logprobs,
        )
