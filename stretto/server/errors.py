"""ApiError and its form in HTTP: OpenAI's error object. Texts are fixed or about the client's own input.

Nothing internal is ever echoed: what is no ApiError or StrettoError about the input becomes "internal error".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import msgspec
from starlette.responses import Response

from stretto.errors import InvalidRequest, NotSupported
from stretto.ipc.client import EngineBusy, EngineDead

LOADING_RETRY = 5
BUSY_RETRY = 1
DRAIN_RETRY = 10


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for programs (type, param, code) and people (message)."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorBody


class ApiError(Exception):
    """An HTTP error that the client is to see."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, kind, param, code)
        self.retry_after = retry_after

    def headers(self) -> Mapping[str, str]:
        """Headers that go with it."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"  # what is left of the body is not waited for
        return headers

    def response(self) -> Response:
        """The whole answer."""
        return json_response(ErrorResponse(self.body), self.status, self.headers())

    def event(self) -> bytes:
        """The error as the last event of a stream whose status is sent already."""
        return b"data: " + msgspec.json.encode(ErrorResponse(self.body)) + b"\n\n"


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of anything that msgspec encodes."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be done as it is."""
    return ApiError(400, message, param=param, code=code)


CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code by which OpenAI's clients know that a prompt is too long."""


def prompt_too_long(num_tokens: int, limit: int) -> ApiError:
    """400: the prompt does not fit into the context length of `limit` tokens."""
    return bad_request(
        f"the prompt has {num_tokens} tokens; at most {limit - 1} fit into the context length of {limit} with one new "
        "token",
        "prompt",
        CONTEXT_EXCEEDED,
    )


def too_many(message: str) -> ApiError:
    """429: later perhaps."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=BUSY_RETRY)


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """503: not now."""
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after=retry_after)


def engine_dead() -> ApiError:
    """503: the engine is gone and the server is about to stop."""
    return unavailable("the engine has stopped; the server is going down", "engine_dead", DRAIN_RETRY)


def internal_error() -> ApiError:
    """500 that tells nothing."""
    return ApiError(500, "internal error", kind="internal_error", code="internal_error")


def as_api_error(error: BaseException) -> ApiError:
    """The error for the client. Errors about its input keep their words; of anything else it learns nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusy):
        return too_many("the queue is full; try again later")
    if isinstance(error, EngineDead):
        return engine_dead()
    if isinstance(error, (InvalidRequest, NotSupported)):
        return bad_request(str(error))
    return internal_error()


_FIRST_WORD = re.compile(r"(?:an entry of )?([a-z]+(?:_[a-z]+)*)")


@contextmanager
def in_words_of(body: msgspec.Struct, words: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a request is told in its endpoint's words: every 400 names a field of `body`.

    `words`: how `body` calls what the engine calls `prompt`, `logprobs` and so on, where that differs. Messages about a
    parameter begin with its name; one that names nothing is about the prompt. Raises ApiError.
    """
    try:
        yield
    except (ApiError, InvalidRequest, NotSupported) as error:
        raise _named(as_api_error(error), body.__struct_fields__, words) from None


def _named(error: ApiError, fields: tuple[str, ...], words: Mapping[str, str]) -> ApiError:
    if error.status != 400:
        return error
    message, match = error.body.message, _FIRST_WORD.match(error.body.message)
    named = error.body.param or (match[1] if match else "")
    param = words.get(named, named)
    if param not in fields:
        param = words.get("prompt", "prompt")
    if match is not None and match[1] == named and named in words:
        message = param + message[match.end() :]
    code = error.body.code
    return bad_request(message, param, None if code is None else str(code))


_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_MEMBER = re.compile(r"Object (?:missing required|contains unknown) field `([^`]*)`")


def raise_invalid(error: msgspec.ValidationError) -> NoReturn:
    """A 400 that names the field of a validation error; a field that is missing, too."""
    path, member = _PATH.search(str(error)), _MEMBER.match(str(error))
    parts = [part for part in (path and path[1].removesuffix("[...]"), member and member[1][:100]) if part]
    param = ".".join(parts)
    message = _PATH.sub("", str(error)).replace("`", "'")
    raise bad_request(f"{param}: {message}" if param else message, param or None) from None
