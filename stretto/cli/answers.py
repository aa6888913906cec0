"""Prints answers that arrive side by side: in order, each as it comes as soon as the ones before it are complete."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

# A model's text must not move a terminal's cursor or change its colours.
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` as it may be shown on a terminal; unchanged where standard output is none."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


class AnswerPrinter:
    """The answers of `prompts`, `n` samples each, on standard output.

    One answer alone is printed as it is. Several get a heading each; on a terminal, the ones that still wait for their
    turn are shown growing below, and are printed in full in their turn.
    """

    def __init__(self, prompts: Sequence[str], n: int) -> None:
        self._keys = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(n)]
        self._headings = {key: self._heading(prompts, n, key) for key in self._keys}
        self._waiting: dict[tuple[int, int], list[str]] = {key: [] for key in self._keys}
        self._finished: set[tuple[int, int]] = set()
        self._turn = 0
        self._live: Any = None
        if len(self._keys) > 1 and sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(get_renderable=self._view, refresh_per_second=10, transient=True)

    def add(self, prompt: int, sample: int, text: str) -> None:
        """More text of one answer."""
        self._waiting[prompt, sample].append(printable(text))
        if self._live is None:
            self._print_turns()

    def finish(self, prompt: int, sample: int) -> None:
        """One answer is complete."""
        self._finished.add((prompt, sample))
        self._print_turns()

    def _print_turns(self) -> None:
        """Print what the answer whose turn it is has; go on with the next when it is complete."""
        while self._turn < len(self._keys):
            key = self._keys[self._turn]
            if self._live is None:
                self._write(self._headings.pop(key, "") + "".join(self._waiting[key]))
                self._waiting[key].clear()
            if key not in self._finished:
                break
            self._turn += 1  # before it is printed: what grows below is drawn again with it, without this one
            last = self._turn == len(self._keys)
            if self._live is None:
                self._write("\n" if last else "\n\n")
            else:
                self._print_above(self._headings[key], "".join(self._waiting[key]) + ("" if last else "\n"))

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _print_above(self, heading: str, text: str) -> None:
        """Print a complete answer above those that still grow: whole lines only, the others are drawn over."""
        from rich.text import Text

        self._live.console.print(Text.assemble((heading, "bold"), text))

    def _view(self) -> Any:
        """What is shown below the printed answers while they grow."""
        from rich.text import Text

        view = Text()
        for key in self._keys[self._turn :]:
            view.append(self._headings[key], style="bold")
            view.append("".join(self._waiting[key]) + "\n\n")
        return view

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @staticmethod
    def _heading(prompts: Sequence[str], n: int, key: tuple[int, int]) -> str:
        """Nothing for a single answer, else the number and the prompt."""
        if len(prompts) * n == 1:
            return ""
        number = f"{key[0] + 1}.{key[1] + 1}" if n > 1 else f"{key[0] + 1}"
        return f"[{number}] {printable(prompts[key[0]])}\n"
