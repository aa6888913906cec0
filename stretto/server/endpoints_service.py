"""What is not an answer: models, tokens, health, metrics, version."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from stretto.prompts import Prompt
from stretto.server.bodies import read_body
from stretto.server.errors import ApiError, bad_request, in_words_of, json_response
from stretto.server.frontend import Frontend
from stretto.server.metrics import CONTENT_TYPE
from stretto.server.protocol.chat import ChatMessage
from stretto.server.protocol.fields import MAX_LIST, Name, TokenId, read
from stretto.version import __version__

MAX_DETOKENIZE = 1 << 20
_FRESH_SECONDS = 0.5
"""How long /metrics waits for the engine's newest figures before it shows those of a second ago."""


class Model(msgspec.Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "stretto"


class ModelList(msgspec.Struct, frozen=True):
    """All of them."""

    data: list[Model]
    object: str = "list"


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize: a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_LIST)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Token ids, and how many may be."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZE)]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text, special tokens included."""

    prompt: str


class ServiceEndpoints:
    """The small endpoints of one front end."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def live(self, request: Request) -> Response:
        """200 as long as this front end answers at all."""
        return json_response({"status": "live"})

    async def health(self, request: Request) -> Response:
        """200 if the engine is loaded and answers, else 503."""
        assert self._frontend.engine is not None
        return json_response({"status": "healthy"})

    async def ready(self, request: Request) -> Response:
        """200 if new requests are taken, else 503 (loading, shutting down, engine dead)."""
        self._frontend.check_ready()
        return json_response({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Figures in Prometheus' text form."""
        figures: dict[str, float] = {}
        try:
            engine = self._frontend.engine
            await engine.ping(_FRESH_SECONDS)
            figures = engine.stats
        except ApiError:
            pass  # loading or dead: the front end's own figures are still right
        return Response(self._frontend.metrics.show(figures), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """The names under which the model is served."""
        return json_response(ModelList([self._model(name) for name in self._frontend.names]))

    async def model(self, request: Request) -> Response:
        """One of them, or 404."""
        return json_response(self._model(self._frontend.check_model(request.path_params["model"])))

    def _model(self, name: str) -> Model:
        return Model(name, self._frontend.started, self._frontend.info.max_model_len)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        frontend = self._frontend
        frontend.check_ready()
        body = read(await read_body(request, frontend.config), TokenizeRequest, {})
        frontend.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        with in_words_of(body, {} if body.messages is None else {"prompt": "messages"}):
            prompt = await self._prompt(body)
        ids = list(map(int, prompt.token_ids))
        texts = None
        if body.return_token_strs:
            tokenizer = frontend.tokenizer
            texts = await frontend.beside(
                len(ids), lambda: [tokenizer.decode((token_id,), skip_special_tokens=False) for token_id in ids]
            )
        return json_response(TokenizeResponse(len(ids), frontend.info.max_model_len, ids, texts))

    async def _prompt(self, body: TokenizeRequest) -> Prompt:
        frontend = self._frontend
        if body.prompt is not None:
            if body.add_generation_prompt is not None:
                raise bad_request("add_generation_prompt is for messages, not for prompt", "add_generation_prompt")
            special = True if body.add_special_tokens is None else body.add_special_tokens
            text = body.prompt
            return await frontend.beside(len(text), lambda: frontend.encode(text, special))
        if body.add_special_tokens is not None:
            raise bad_request(
                "add_special_tokens is for prompt; with messages the chat template writes them", "add_special_tokens"
            )
        messages = [message.for_template() for message in body.messages or ()]
        start = True if body.add_generation_prompt is None else body.add_generation_prompt
        return await frontend.encode_chat(messages, {"add_generation_prompt": start})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        frontend = self._frontend
        frontend.check_ready()
        body = read(await read_body(request, frontend.config), DetokenizeRequest, {})
        frontend.check_model(body.model)
        size = frontend.info.vocab_size
        bad: Any = next((token_id for token_id in body.tokens if token_id >= size), None)
        if bad is not None:
            raise bad_request(f"token id {bad} is not in the vocabulary: allowed are 0 to {size - 1}", "tokens")
        with in_words_of(body, {"prompt": "tokens"}):
            tokenizer = frontend.tokenizer
        text = await frontend.beside(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response(DetokenizeResponse(text))
