"""The progress bar of LLM.generate. Owns nothing but the bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class AnswerProgress:
    """Counts the answers that have ended, with their tokens per second, on standard error."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """`use_tqdm`: False shows nothing; a callable is used in place of tqdm's own class."""
        self._bar: Any = None
        self._started = time.perf_counter()
        self._num_tokens = 0
        if use_tqdm and total:
            self._bar = _bar_class(use_tqdm)(total=total, desc="Answers", unit="answer", dynamic_ncols=True)

    def ended(self, num_tokens: int) -> None:
        """One more answer is there, of this many tokens."""
        if self._bar is None:
            return
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar_class(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm import tqdm

    bar: Callable[..., Any] = tqdm
    return bar
