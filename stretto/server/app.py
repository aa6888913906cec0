"""The application: which path leads where, and how it is documented. Owns no state but the front end it is given."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from stretto.errors import InvalidRequest, NotSupported
from stretto.server.endpoints_chat import ChatEndpoint
from stretto.server.endpoints_completions import CompletionsEndpoint
from stretto.server.endpoints_responses import ResponsesEndpoint
from stretto.server.endpoints_service import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelList,
    ServiceEndpoints,
    TokenizeRequest,
    TokenizeResponse,
)
from stretto.server.errors import ApiError, as_api_error
from stretto.server.frontend import Frontend
from stretto.server.gate import Gate
from stretto.server.openapi import Operation, document
from stretto.server.page_route import add_page
from stretto.server.protocol.chat import ChatCompletion, ChatRequest
from stretto.server.protocol.completions import CompletionRequest, CompletionUsageChunk
from stretto.server.protocol.responses import ResponseObject, ResponsesRequest
from stretto.version import __version__


def build_app(frontend: Frontend) -> ASGIApp:
    """The whole application of one front end."""
    app = FastAPI(
        title="Stretto",
        version=__version__,
        description="OpenAI-compatible API of a Stretto server.",
        redirect_slashes=False,  # a redirect would lead to the host that the client names
    )
    service = ServiceEndpoints(frontend)
    operations: list[Operation] = []

    def route(method: str, path: str, endpoint: Any, *, body: Any = None, answer: Any = None, **also: Any) -> None:
        operation = Operation(method, path, (endpoint.__doc__ or type(endpoint).__doc__ or "").strip(), body, answer)
        operations.append(operation)

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(request)
            return response

        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, handle, methods=methods, name=path, include_in_schema=False, **also)

    chat, completions, responses = ChatEndpoint(frontend), CompletionsEndpoint(frontend), ResponsesEndpoint(frontend)
    route("POST", "/v1/chat/completions", chat, body=ChatRequest, answer=ChatCompletion)
    route("POST", "/v1/completions", completions, body=CompletionRequest, answer=CompletionUsageChunk)
    route("POST", "/v1/responses", responses, body=ResponsesRequest, answer=ResponseObject)
    route("GET", "/v1/models", service.models, answer=ModelList)
    route("GET", "/v1/models/{model:path}", service.model)
    route("POST", "/tokenize", service.tokenize, body=TokenizeRequest, answer=TokenizeResponse)
    route("POST", "/detokenize", service.detokenize, body=DetokenizeRequest, answer=DetokenizeResponse)
    route("GET", "/health", service.health)
    route("GET", "/ready", service.ready)
    route("GET", "/live", service.live)
    route("GET", "/version", service.version)
    route("GET", "/metrics", service.metrics)
    add_page(app, frontend)

    schema = document(operations, bool(frontend.config.api_keys))
    app.openapi = lambda: schema  # type: ignore[method-assign]  # FastAPI's documented way to give another document
    for kind in (ApiError, InvalidRequest, NotSupported):
        app.add_exception_handler(kind, _client_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _client_error)
    wrapped: ASGIApp = Gate(app, app.routes, frontend.config, frontend.metrics)
    if frontend.config.allowed_origins:
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=frontend.config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),  # clients send headers of their own, such as OpenAI's x-stainless-...
            expose_headers=("x-request-id", "retry-after"),
        )
    return wrapped


async def _client_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    texts = {404: "there is nothing at this path", 405: "this path does not take this method"}
    response = ApiError(status, texts.get(status, "the request cannot be handled")).response()
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response
