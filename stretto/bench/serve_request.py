"""One streamed request to an OpenAI-compatible server, and when each part of its answer came. Knows no load."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what all of them have in common."""

    base_url: str
    model: str
    endpoint: Endpoint = "chat"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request's body, before those that the benchmark sets itself."""

    @property
    def url(self) -> str:
        """The endpoint's address; a base URL that ends with /v1 is the same as one without."""
        return self.base_url.rstrip("/").removesuffix("/v1") + PATHS[self.endpoint]

    def body(self, prompt: str, output_len: int) -> dict[str, Any]:
        """The body of one request."""
        given: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        if self.endpoint == "completions":
            given = {"prompt": prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **given, **self.extra_body, "max_tokens": output_len, **stream}


@dataclass(frozen=True, slots=True)
class Planned:
    """One request before it is sent."""

    prompt: str
    input_len: int
    """Prompt tokens that were meant."""
    output_len: int
    """Output tokens asked for."""


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are seconds of one monotonic clock; filled while the answer arrives."""

    planned: Planned
    sent: float
    """Just before the request goes out."""
    chunks: list[float] = field(default_factory=list)
    """When each event with text arrived."""
    text: str = ""
    input_tokens: int | None = None
    """As the server counts them; None where it does not say."""
    output_tokens: int | None = None
    error: str | None = None
    """Why it failed; None for a complete answer."""

    @property
    def num_input(self) -> int:
        """Prompt tokens: the server's count, else what was meant."""
        return self.planned.input_len if self.input_tokens is None else self.input_tokens

    @property
    def num_output(self) -> int:
        """Output tokens: the server's count, else the number of events with text."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Time to first token; 0 for an answer without text, as vLLM's `bench serve` has it."""
        return self.chunks[0] - self.sent if self.chunks else 0.0

    @property
    def latency(self) -> float:
        """From sending to the last token (E2E)."""
        return self.chunks[-1] - self.sent if self.chunks else 0.0

    @property
    def itl(self) -> list[float]:
        """Times between neighbouring events with text (inter-token latencies)."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None for answers of fewer than two tokens."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None


class EventSplitter:
    """Cuts a byte stream into the data of its server-sent events, wherever the network has cut it."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


async def send(session: aiohttp.ClientSession, target: Target, planned: Planned) -> Outcome:
    """Send the request and follow its answer to the end. Failures are part of the outcome, never raised."""
    body = json.dumps(target.body(planned.prompt, planned.output_len)).encode()
    outcome = Outcome(planned, time.perf_counter())
    try:
        async with session.post(target.url, data=body, headers={"content-type": "application/json"}) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {_message(await response.read())}"
            elif not await _follow(response, outcome):
                outcome.error = outcome.error or "the stream broke off"
    except TimeoutError:
        outcome.error = "no complete answer in time"
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return outcome


async def _follow(response: aiohttp.ClientResponse, outcome: Outcome) -> bool:
    """Whether the answer came to its end."""
    events = EventSplitter()
    finished = False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        for data in events.feed(piece):
            if data == b"[DONE]":
                return True
            finished |= take_event(outcome, json.loads(data), now)
            if outcome.error is not None:
                return False
    return finished


def take_event(outcome: Outcome, event: Mapping[str, Any], now: float) -> bool:
    """Note what an event says; whether it says that the answer has ended.

    An event counts as tokens if it carries text: the role that some servers send ahead is none.
    """
    if event.get("error"):
        outcome.error = _message(json.dumps(event).encode())
    if usage := event.get("usage"):
        outcome.input_tokens, outcome.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    finished = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or choice.get("text")
        if text:
            outcome.chunks.append(now)
            outcome.text += text
        finished |= choice.get("finish_reason") is not None
    return finished


def _message(body: bytes) -> str:
    """The words of an error, in OpenAI's form or any other."""
    try:
        error = json.loads(body)["error"]
        words = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        words = body.decode("utf-8", "replace")
    return " ".join(words.split())[:_LONGEST_ERROR]
