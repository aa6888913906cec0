"""/v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from stretto.ipc.answer import Answer
from stretto.output import PromptRows, Sample
from stretto.prompts import Prompt
from stretto.request import CompletionOutput, SamplingParams
from stretto.server.bodies import note, read_body
from stretto.server.delivery import DONE, EventStream, ready, whole
from stretto.server.endpoints_chat import event
from stretto.server.errors import ApiError, in_words_of, json_response
from stretto.server.frontend import NO_ANSWER, Frontend, OpenRequest
from stretto.server.logprobs import TextOffsets, completion_logprobs, joined, num_scores, prompt_scores
from stretto.server.protocol import completions as p
from stretto.server.protocol.fields import StreamOptions, check_stream_options, read
from stretto.server.protocol.prompt_scores import MaybeScores
from stretto.server.protocol.usage import Usage
from stretto.tokenizer import Tokenizer


class CompletionsEndpoint:
    """Goes on with prompts."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, request: Request) -> Response:
        """Handle one request. Raises ApiError."""
        frontend = self._frontend
        frontend.check_ready()
        data = await read_body(request, frontend.config)
        body = read(data, p.CompletionRequest, p.NOT_BUILT)
        check_stream_options(body.stream, body.stream_options)
        model = frontend.check_model(body.model)
        with in_words_of(body, body.words):
            params = self._params(body)
            frontend.check_room(body.num_prompts, params.n)
            prompts = await frontend.beside(len(data), lambda: self._prompts(body))
            size = num_scores(prompts, params)
            echoes = [""] * len(prompts)
            if body.echo:
                echoes = await frontend.beside(len(data), lambda: [_echo(frontend, prompt) for prompt in prompts])
            opened = await frontend.submit(prompts, params, body.priority)
        note(request, opened.answer, body.user)
        tokenizer = frontend.tokenizer if frontend.has_tokenizer else None
        reply = CompletionReply(opened.answer, model, body, params, echoes, tokenizer)
        if body.stream:
            events = CompletionEvents(reply, body.stream_options)
            if reply.wants_echo:
                await self._echo(opened, request, events, size)
            return EventStream(frontend, opened, events)
        await whole(frontend, opened, request)
        return await frontend.beside(size, lambda: json_response(reply.completion()))

    async def _echo(self, opened: OpenRequest, request: Request, events: CompletionEvents, size: int) -> None:
        """Prepare a stream's beginning; what is known of long prompts is written beside the event loop."""
        try:
            await ready(opened, request, events.may_echo)
            await self._frontend.beside(size, events.echo)
        except BaseException:
            self._frontend.close(opened)
            raise

    def _prompts(self, body: p.CompletionRequest) -> list[Prompt]:
        frontend = self._frontend
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return [
            frontend.encode(prompt, special) if isinstance(prompt, str) else Prompt(None, np.asarray(prompt, np.int32))
            for prompt in body.prompts(frontend.info.max_model_len)
        ]

    def _params(self, body: p.CompletionRequest) -> SamplingParams:
        max_tokens = p.DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.score_only:
            max_tokens = 1  # the engine has to give one, which nobody is told
        return body.sampling(
            n=body.checked_n(),
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.num_prompt_tops,
        )


def _echo(frontend: Frontend, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return frontend.tokenizer.decode(list(map(int, prompt.token_ids)), skip_special_tokens=False)


class CompletionReply:
    """What all parts of an answer have in common, and the answer as a whole."""

    def __init__(
        self,
        answer: Answer,
        model: str,
        body: p.CompletionRequest,
        params: SamplingParams,
        echoes: Sequence[str],
        tokenizer: Tokenizer | None,
    ) -> None:
        """`echoes`: the text before the answers of each prompt."""
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.answer = answer
        self.score_only = body.score_only
        self.wants_echo = bool(body.echo)
        self.waits_for_scores = self.wants_echo and body.logprobs is not None
        """What is echoed has log-probabilities, which are known with the prompt's first token only."""
        self._num_top = body.logprobs or 0
        self._wants_scores = body.prompt_logprobs is not None
        self._echoes = echoes
        self._tokenizer = tokenizer
        self._rows: dict[int, PromptRows] = {}
        self._offsets = [
            TextOffsets(
                tokenizer, len(echoes[index // params.n]), skip_special_tokens=sample.request.params.skip_special_tokens
            )
            for index, sample in enumerate(answer.samples)
        ]

    def completion(self) -> p.CompletionUsageChunk:
        """The complete answer."""
        choices = [self._whole(index, sample) for index, sample in enumerate(self.answer.samples)]
        return p.CompletionUsageChunk(self.id, self.created, self.model, choices, usage=self.usage())

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage.of(self.answer, score_only=self.score_only)

    def _whole(self, index: int, sample: Sample) -> p.CompletionChoice:
        choice = self.choice(index, sample.output())
        if self.wants_echo:
            echo = self.echo(index)
            before, after = echo.logprobs, choice.logprobs
            both = joined(before, after) if before is not None and after is not None else before or after
            choice = msgspec.structs.replace(choice, text=echo.text + choice.text, logprobs=both)
        scores: MaybeScores = msgspec.UNSET
        if self._wants_scores:
            scores = prompt_scores(self._prompt_rows(index))
        return msgspec.structs.replace(choice, prompt_logprobs=scores)

    def choice(self, index: int, output: CompletionOutput) -> p.CompletionChoice:
        """What follows the prompt, or what is new of it. Of each choice, everything passes here once and in order."""
        if self.score_only:
            return p.CompletionChoice(index, "", None, None if output.finish_reason is None else "length")
        logprobs, reason = None, output.finish_reason
        if output.logprobs:
            logprobs = completion_logprobs(output.token_ids, output.logprobs, self._num_top, self._offsets[index])
        return p.CompletionChoice(
            index, output.text, logprobs, None if reason in NO_ANSWER else reason, output.stop_reason
        )

    @property
    def may_echo(self) -> bool:
        """Whether `echo` has everything that belongs to it."""
        known = [sample.request.prompt_logprobs for sample in self.answer.samples]
        return not self.waits_for_scores or all(one is None or one.complete for one in known)

    def echo(self, index: int) -> p.CompletionChoice:
        """The prompt of a choice, with its log-probabilities if they are wanted."""
        first = self._first_of_prompt(index)
        text = self._echoes[self._prompt_of(index)]
        if not self.waits_for_scores:
            return p.CompletionChoice(index, text)
        token_ids = first.request.prompt_ids.tolist()
        offsets = TextOffsets.of_prompt(self._tokenizer, token_ids, text)
        logprobs = completion_logprobs(token_ids, self._prompt_rows(index), self._num_top, offsets)
        return p.CompletionChoice(index, text, logprobs)

    def _prompt_rows(self, index: int) -> PromptRows:
        """Of the prompt's tokens; made once for all its samples."""
        prompt = self._prompt_of(index)
        if prompt not in self._rows:
            self._rows[prompt] = self._first_of_prompt(index).prompt_logprobs() or []
        return self._rows[prompt]

    def _prompt_of(self, index: int) -> int:
        return index // (len(self.answer.samples) // len(self._echoes))

    def _first_of_prompt(self, index: int) -> Sample:
        """The sample that asked the engine about the prompt."""
        return self.answer.samples[self._prompt_of(index) * (len(self.answer.samples) // len(self._echoes))]


class CompletionEvents:
    """The answer as a stream."""

    def __init__(self, reply: CompletionReply, options: StreamOptions | None) -> None:
        self._reply = reply
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._echo = b""

    def may_echo(self) -> bool:
        """Whether all is known that `echo` tells."""
        return self._reply.may_echo

    def echo(self) -> None:
        """Let the stream begin with the prompts. Of an answer that ended before its prompts were known, it does not."""
        if self._reply.may_echo:
            choices = [self._reply.echo(index) for index in range(len(self._reply.answer.samples))]
            self._echo = b"".join([self._event(choice) for choice in choices if choice.text or choice.logprobs])

    def begin(self) -> bytes:
        """The prompts, if they are echoed."""
        return self._echo

    def new(self) -> bytes:  # hot path
        """New text of each choice; the last of each says what ended it."""
        data = b""
        for index, sample in enumerate(self._reply.answer.samples):
            if sample.has_news:
                data += self._new_of(index, sample)
        return data

    def _new_of(self, index: int, sample: Sample) -> bytes:
        output = sample.take_delta()
        choice = self._reply.choice(index, output)
        if not choice.text and not choice.logprobs and choice.finish_reason is None:
            return b""
        return self._event(choice)

    def end(self) -> bytes:
        """Usage, and the end of the stream."""
        if not self._usage_at_end:
            return DONE
        reply = self._reply
        return event(p.CompletionUsageChunk(reply.id, reply.created, reply.model, [], usage=reply.usage())) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return error.event()

    def _event(self, choice: p.CompletionChoice) -> bytes:
        reply = self._reply
        if self._usage_at_end or self._usage_always:
            usage = reply.usage() if self._usage_always else None
            return event(p.CompletionUsageChunk(reply.id, reply.created, reply.model, [choice], usage=usage))
        return event(p.CompletionChunk(reply.id, reply.created, reply.model, [choice]))
