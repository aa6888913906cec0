"""/v1/completions."""

from __future__ import annotations

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from stretto.ipc.client import Answer
from stretto.output import Sample
from stretto.prompts import Prompt
from stretto.request import CompletionOutput
from stretto.server.bodies import note, read_body
from stretto.server.delivery import DONE, EventStream, whole
from stretto.server.endpoints_chat import event
from stretto.server.errors import ApiError, bad_request, json_response
from stretto.server.frontend import Frontend
from stretto.server.logprobs import completion_logprobs
from stretto.server.protocol import completions as p
from stretto.server.protocol.fields import StreamOptions, read
from stretto.server.protocol.usage import Usage


class CompletionsEndpoint:
    """Goes on with prompts."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, request: Request) -> Response:
        """Handle one request. Raises ApiError, InvalidRequest or NotSupported for what the client did wrong."""
        frontend = self._frontend
        frontend.check_ready()
        body = read(await read_body(request, frontend.config), p.CompletionRequest, p.NOT_BUILT)
        model = frontend.check_model(body.model)
        if body.echo and body.logprobs is not None:
            raise bad_request(
                "echo with logprobs is not supported: the prompt's log-probabilities are not kept", "echo"
            )
        max_tokens = p.DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling(n=body.checked_n(), max_tokens=max_tokens, logprobs=body.logprobs)
        special = True if body.add_special_tokens is None else body.add_special_tokens
        prompts = [
            await frontend.encode(prompt, special) if isinstance(prompt, str) else Prompt(None, prompt)
            for prompt in body.prompts()
        ]
        opened = await frontend.submit(prompts, params, body.priority)
        note(request, opened.answer, body.user)
        echoes = [_echo(frontend, prompt) if body.echo else "" for prompt in prompts for _ in range(params.n)]
        reply = CompletionReply(opened.answer, model, body.logprobs or 0, echoes)
        if body.stream:
            return EventStream(frontend, opened, CompletionEvents(reply, body.stream_options))
        await whole(frontend, opened, request)
        return json_response(reply.completion())


def _echo(frontend: Frontend, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return frontend.tokenizer.decode(list(map(int, prompt.token_ids)), skip_special_tokens=False)


class CompletionReply:
    """What all parts of an answer have in common, and the answer as a whole."""

    def __init__(self, answer: Answer, model: str, num_top: int, echoes: list[str]) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.num_top = num_top
        self.answer = answer
        self.echoes = echoes

    def completion(self) -> p.CompletionUsageChunk:
        """The complete answer."""
        choices = []
        for index, (sample, echo) in enumerate(zip(self.answer.samples, self.echoes, strict=True)):
            choices.append(self.choice(index, sample.output(), echo, 0))
        return p.CompletionUsageChunk(self.id, self.created, self.model, choices, usage=Usage.of(self.answer))

    def choice(self, index: int, output: CompletionOutput, echo: str, offset: int) -> p.CompletionChoice:
        """One answer, or what is new of it; `offset` characters of it came before."""
        return p.CompletionChoice(
            index,
            echo + output.text,
            completion_logprobs(output, self.num_top, offset) if output.logprobs else None,
            output.finish_reason,
            output.stop_reason,
        )


class CompletionEvents:
    """The answer as a stream."""

    def __init__(self, reply: CompletionReply, options: StreamOptions | None) -> None:
        self._reply = reply
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._offsets = [0] * len(reply.answer.samples)

    def begin(self) -> bytes:
        """The prompts, if they are to be echoed."""
        return b"".join(
            [self._event(p.CompletionChoice(index, echo)) for index, echo in enumerate(self._reply.echoes) if echo]
        )

    def new(self) -> bytes:  # hot path
        """New text of each choice; the last of each says what ended it."""
        data = b""
        for index, sample in enumerate(self._reply.answer.samples):
            if sample.has_news:
                data += self._new_of(index, sample)
        return data

    def _new_of(self, index: int, sample: Sample) -> bytes:
        output = sample.take_delta()
        if not output.text and not output.logprobs and output.finish_reason in (None, "error", "abort"):
            return b""
        choice = self._reply.choice(index, output, "", self._offsets[index])
        if output.logprobs and choice.logprobs is not None:
            self._offsets[index] += sum(map(len, choice.logprobs.tokens))
        return self._event(choice)

    def end(self) -> bytes:
        """Usage, and the end of the stream."""
        if not self._usage_at_end:
            return DONE
        reply = self._reply
        usage = Usage.of(reply.answer)
        return event(p.CompletionUsageChunk(reply.id, reply.created, reply.model, [], usage=usage)) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return error.event()

    def _event(self, choice: p.CompletionChoice) -> bytes:
        reply = self._reply
        if self._usage_at_end or self._usage_always:
            usage = Usage.of(reply.answer) if self._usage_always else None
            return event(p.CompletionUsageChunk(reply.id, reply.created, reply.model, [choice], usage=usage))
        return event(p.CompletionChunk(reply.id, reply.created, reply.model, [choice]))
