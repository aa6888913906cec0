"""Answer: what one HTTP request has got of its samples so far, and whoever waits for more of it.

Owns its own end (all samples ended, abort, error); samples and their tokens are EngineClient's. One event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from stretto.errors import StrettoError
from stretto.output import Sample
from stretto.prompts import Prompt


class Answer:
    """The samples of one HTTP request, as their tokens arrive. Whoever waits for it is woken once per step."""

    def __init__(
        self, first_id: int, prompts: Sequence[Prompt], samples: list[Sample], abort: Callable[[Answer], None]
    ) -> None:
        """`abort` ends at the engine what still runs of it."""
        self.first_id = first_id
        self.prompts = prompts
        self.samples = samples
        """In the order of the prompts, and n of each."""
        self.error: StrettoError | None = None
        """Why no more will come, if not because all samples have ended."""
        self.aborted = False
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_open = len(samples)
        self._abort = abort
        self._news = False
        self._waiter: asyncio.Future[None] | None = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.num_open == 0 or self.aborted or self.error is not None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        count = len(self.samples) // len(self.prompts)
        return sum(sample.request.num_cached for sample in self.samples[::count])

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    async def news(self) -> None:
        """Wait until something new is there (tokens, an end, an error, an abort)."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._news = False

    async def end(self) -> None:
        """Wait until nothing more will come."""
        while not self.finished:
            await self.news()

    def wake(self) -> None:  # hot path
        """There is something new."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: StrettoError) -> None:
        """Nothing more will come, because of `error`."""
        if not self.finished:
            self.error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self.wake()

    def abort(self) -> None:
        """The client has left: end what still runs. Idempotent."""
        self._abort(self)
