"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stretto.ipc.answer import Answer
from stretto.server.bodies import note, read_body
from stretto.server.delivery import DONE, EventStream, whole
from stretto.server.errors import ApiError, in_words_of, json_response
from stretto.server.frontend import NO_ANSWER, Frontend, OpenRequest
from stretto.server.logprobs import chat_logprobs, num_scores, prompt_scores
from stretto.server.protocol import chat as p
from stretto.server.protocol.fields import StreamOptions, check_stream_options, read
from stretto.server.protocol.prompt_scores import MaybeScores
from stretto.server.protocol.usage import Usage

_encode = msgspec.json.Encoder().encode


def event(chunk: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(chunk) + b"\n\n"


class ChatEndpoint:
    """Answers conversations."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, request: Request) -> Response:
        """Handle one request. Raises ApiError."""
        frontend = self._frontend
        frontend.check_ready()
        body = read(await read_body(request, frontend.config), p.ChatRequest, p.NOT_BUILT)
        check_stream_options(body.stream, body.stream_options)
        model = frontend.check_model(body.model)
        with in_words_of(body, body.words):
            params = body.sampling(
                n=body.n or 1,
                max_tokens=body.token_limit,
                logprobs=body.num_logprobs,
                prompt_logprobs=body.num_prompt_tops,
            )
            messages = [message.for_template() for message in body.messages]
            prompt = await frontend.encode_chat(messages, p.template_options(body))
            size = num_scores([prompt], params)
            opened = await frontend.submit([prompt], params, body.priority)
        note(request, opened.answer, body.user)
        reply = ChatReply(frontend, opened, model, body.top_logprobs or 0)
        if body.stream:
            return EventStream(frontend, opened, ChatEvents(reply, body.stream_options))
        await whole(frontend, opened, request)
        return await frontend.beside(size, lambda: json_response(reply.completion()))


class ChatReply:
    """What all parts of an answer have in common, and the answer as a whole."""

    def __init__(self, frontend: Frontend, opened: OpenRequest, model: str, num_top: int) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.num_top = num_top
        self.answer: Answer = opened.answer
        self.tokenizer = frontend.tokenizer

    def completion(self) -> p.ChatCompletion:
        """The complete answer."""
        choices = []
        for sample in self.answer.samples:
            output = sample.output()
            choices.append(
                p.ChatChoice(
                    index=sample.index,
                    message=p.AnswerMessage(output.text),
                    finish_reason=output.finish_reason,
                    logprobs=chat_logprobs(output, self.num_top, self.tokenizer),
                    stop_reason=output.stop_reason,
                )
            )
        first = self.answer.samples[0]
        scores: MaybeScores = msgspec.UNSET
        if first.request.prompt_logprobs is not None:
            scores = prompt_scores(first.prompt_logprobs())
        usage = Usage.of(self.answer)
        return p.ChatCompletion(self.id, self.created, self.model, choices, usage, prompt_logprobs=scores)


class ChatEvents:
    """The answer as a stream: first the role, then what is new, then what ended it, then usage if asked for."""

    def __init__(self, reply: ChatReply, options: StreamOptions | None) -> None:
        self._reply = reply
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    def begin(self) -> bytes:
        """The role of each choice."""
        choices = [p.ChunkChoice(sample.index, p.Delta("assistant", "")) for sample in self._reply.answer.samples]
        return b"".join([self._event(choice) for choice in choices])

    def new(self) -> bytes:  # hot path
        """New text of each choice; and the end of those that have ended."""
        reply = self._reply
        data = b""
        for sample in reply.answer.samples:
            if not sample.has_news:
                continue
            output = sample.take_delta()
            if output.text or output.logprobs:
                logprobs = chat_logprobs(output, reply.num_top, reply.tokenizer) if output.logprobs else None
                data += self._event(p.ChunkChoice(sample.index, p.Delta(None, output.text), logprobs))
            if output.finish_reason is not None and output.finish_reason not in NO_ANSWER:
                data += self._event(
                    p.LastChunkChoice(sample.index, p.Delta(), None, output.finish_reason, output.stop_reason)
                )
        return data

    def end(self) -> bytes:
        """Usage, and the end of the stream."""
        if not self._usage_at_end:
            return DONE
        reply = self._reply
        return event(p.ChatUsageChunk(reply.id, reply.created, reply.model, [], usage=Usage.of(reply.answer))) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return error.event()

    def _event(self, choice: p.ChunkChoice) -> bytes:  # hot path
        reply = self._reply
        if self._usage_at_end or self._usage_always:
            usage = Usage.of(reply.answer) if self._usage_always else None
            return event(p.ChatUsageChunk(reply.id, reply.created, reply.model, [choice], usage=usage))
        return event(p.ChatChunk(reply.id, reply.created, reply.model, [choice]))
