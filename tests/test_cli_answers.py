"""How several answers are printed while they arrive: whole, in order, and harmless for a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from stretto.cli.answers import AnswerPrinter, printable


class Tty(io.StringIO):
    """Standard output as a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Let standard output be a terminal for the rest of the test."""
    out = Tty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", out)
    return out


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after this."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b"):
            lines[row] += part
    return lines


def arrive(printer: AnswerPrinter) -> None:
    """Two answers grow side by side; the second is complete first."""
    with printer:
        printer.add(0, 0, "The capital")
        printer.add(1, 0, "The sea is ")
        printer.add(1, 0, "vast.")
        printer.finish(1, 0)
        printer.add(0, 0, " is Paris.")
        printer.finish(0, 0)


def test_elsewhere_the_first_is_printed_as_it_comes_and_the_others_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    printer = AnswerPrinter(["capital?", "sea?"], 1)
    printer.add(0, 0, "The capital")
    printer.add(1, 0, "The sea")
    assert capsys.readouterr().out == "[1] capital?\nThe capital"
    printer.finish(1, 0)
    assert capsys.readouterr().out == ""
    printer.finish(0, 0)
    assert capsys.readouterr().out == "\n\n[2] sea?\nThe sea\n"


def test_a_terminal_shows_every_answer_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = on_terminal(monkeypatch)
    arrive(AnswerPrinter(["capital?", "sea?"], 1))
    expected = ["[1] capital?", "The capital is Paris.", "", "[2] sea?", "The sea is vast."]
    assert "\n".join(screen(tty.getvalue())).strip("\n").split("\n") == expected


def test_a_models_text_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = on_terminal(monkeypatch)
    assert printable("a\x1b[31mred\x07\x9b\r\n\tb") == "a[31mred\n\tb"
    printer = AnswerPrinter(["only \x1b[2J one"], 1)
    printer.add(0, 0, printable("x"))
    assert tty.getvalue() == "x"


def test_elsewhere_a_models_text_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with AnswerPrinter(["one"], 1) as printer:
        printer.add(0, 0, "a\x1b[31m\r")
        printer.finish(0, 0)
    assert capsys.readouterr().out == "a\x1b[31m\r\n"
