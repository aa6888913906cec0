"""/v1/responses: text, whole or as typed events."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stretto.ipc.answer import Answer
from stretto.request import CompletionOutput
from stretto.server.bodies import note, read_body
from stretto.server.delivery import EventStream, whole
from stretto.server.errors import ApiError, in_words_of, json_response
from stretto.server.frontend import Frontend
from stretto.server.logprobs import chat_logprobs, event_logprobs
from stretto.server.protocol import responses as p
from stretto.server.protocol.chat import TokenLogprob
from stretto.server.protocol.fields import read, template_variables
from stretto.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


class ResponsesEndpoint:
    """Answers through the Responses API."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, request: Request) -> Response:
        """Handle one request. Raises ApiError."""
        frontend = self._frontend
        frontend.check_ready()
        body = read(await read_body(request, frontend.config), p.ResponsesRequest, p.NOT_BUILT)
        model = frontend.check_model(body.model)
        with in_words_of(body, p.WORDS):
            params = body.sampling(n=1, max_tokens=body.max_output_tokens, logprobs=body.num_logprobs)
            prompt = await frontend.encode_chat(body.messages(), template_variables(body.chat_template_kwargs))
            opened = await frontend.submit([prompt], params, body.priority)
        note(request, opened.answer, body.user)
        reply = Reply(opened.answer, model, body, frontend.tokenizer)
        if body.stream:
            return EventStream(frontend, opened, ResponseEvents(reply))
        await whole(frontend, opened, request)
        return json_response(reply.complete())


class Reply:
    """The answer in its states."""

    def __init__(self, answer: Answer, model: str, body: p.ResponsesRequest, tokenizer: Tokenizer) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.sample = answer.samples[0]
        self._created = int(time.time())
        self._answer = answer
        self._model = model
        self._body = body
        self._tokenizer = tokenizer

    def started(self) -> p.ResponseObject:
        """Before the first token."""
        return self._state("in_progress", [], None, None)

    def complete(self) -> p.ResponseObject:
        """After the last token."""
        item = self.item()
        details = None if item.status == "completed" else p.IncompleteDetails("max_output_tokens")
        return self._state(item.status, [item], details, None)

    def failed(self, error: ApiError) -> p.ResponseObject:
        """When it cannot be completed."""
        return self._state("failed", [], None, p.ResponseError("server_error", error.body.message))

    def item(self) -> p.OutputMessage:
        """The one item of the output, complete."""
        output = self.sample.output()
        status = "completed" if output.finish_reason == "stop" else "incomplete"
        return p.OutputMessage(self.item_id, status, [p.OutputText(output.text, logprobs=self.logprobs(output))])

    def logprobs(self, output: CompletionOutput) -> list[TokenLogprob]:
        """Of the tokens of `output`; nothing unless they are asked for."""
        found = chat_logprobs(output, self._body.top_logprobs or 0, self._tokenizer)
        return [] if found is None else found.content

    def _state(
        self,
        status: str,
        output: list[p.OutputMessage],
        details: p.IncompleteDetails | None,
        error: p.ResponseError | None,
    ) -> p.ResponseObject:
        body, answer = self._body, self._answer
        num_in, num_out = answer.num_prompt_tokens, answer.num_output_tokens
        cached = p.InputDetails(answer.num_cached_tokens)
        return p.ResponseObject(
            id=self.id,
            created_at=self._created,
            model=self._model,
            status=status,
            output=output,
            usage=p.ResponseUsage(num_in, num_out, num_in + num_out, cached) if output else None,
            error=error,
            incomplete_details=details,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
            top_logprobs=body.top_logprobs or 0,
        )


class ResponseEvents:
    """The answer as typed events, numbered."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._number = 0

    def begin(self) -> bytes:
        """The response, its one item and the item's one part, all still empty."""
        reply = self._reply
        item = p.OutputMessage(reply.item_id, "in_progress", [])
        return (
            self._event("response.created", response=reply.started())
            + self._event("response.in_progress", response=reply.started())
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=p.OutputText(""))
        )

    def new(self) -> bytes:  # hot path
        """New text; also a delta without text where a token is only a part of a character, if tokens are told."""
        sample = self._reply.sample
        if not sample.has_news:
            return b""
        output = sample.take_delta()
        if not output.text and not output.logprobs:
            return b""
        logprobs = event_logprobs(self._reply.logprobs(output))
        return self._part_event("response.output_text.delta", delta=output.text, logprobs=logprobs)

    def end(self) -> bytes:
        """Everything once more, complete."""
        reply = self._reply
        item = reply.item()
        part = item.content[0]
        kind = "response.completed" if item.status == "completed" else "response.incomplete"
        return (
            self._part_event("response.output_text.done", text=part.text, logprobs=event_logprobs(part.logprobs))
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(kind, response=reply.complete())
        )

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return self._event("response.failed", response=self._reply.failed(error))

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._reply.item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
