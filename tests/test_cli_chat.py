"""`stretto chat` on a terminal: Ctrl-C stops an answer and keeps the session, Ctrl-D leaves."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dummy_model import write_dummy_model

PATIENCE_SECONDS = 60.0


class Terminal:
    """A command on a pseudo-terminal; `piped`: but for its standard output, which alone is looked at then."""

    def __init__(self, *arguments: str, piped: bool = False) -> None:
        self._fd, child = pty.openpty()
        self._output, output = os.pipe() if piped else (os.dup(self._fd), os.dup(child))
        command = [sys.executable, "-m", "stretto", *arguments]
        environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "utf-8:strict"}  # as in any locale but C
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=output,
            stderr=child,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_tty,
        )
        os.close(child)
        os.close(output)
        self._shown = ""
        self._waited = 0

    def type(self, text: str) -> None:
        """Type `text`; a lone surrogate is the byte that it stands for (`surrogateescape`)."""
        os.write(self._fd, text.encode(errors="surrogateescape"))

    def modes(self) -> list[Any]:
        """As `termios.tcgetattr` gives them."""
        return termios.tcgetattr(self._fd)

    def wait_for(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until `text` appears after what was waited for before."""
        deadline = time.monotonic() + seconds
        while (found := self._shown.find(text, self._waited)) < 0:
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{text!r} did not appear in {self._shown[self._waited :]!r}")
            try:
                shown = os.read(self._output, 65536)
            except OSError:
                shown = b""
            if not shown:
                raise AssertionError(f"the command ended before {text!r}: {self._shown!r}")
            self._shown += shown.decode(errors="replace")
        self._waited = found + len(text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)
        os.close(self._output)


def _own_tty() -> None:
    """Make the terminal the controlling one, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def chat(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    model = str(write_dummy_model(tmp_path, endless=True))
    # 30,000 tokens take this model half a minute: no answer ends by itself while the test looks.
    terminal = Terminal(
        "chat", "--model", model, "--load-format", "dummy", "--dtype", "float32", "--temperature", "0",
        "--max-tokens", "30000", "--max-model-len", "32000", piped=getattr(request, "param", False),
    )  # fmt: skip
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("the fox\n")
    chat.wait_for("the fox")  # the terminal's echo
    time.sleep(0.3)
    chat.type("\x03")
    chat.wait_for("(stopped)")
    chat.wait_for("> ")
    chat.type("/help\n")
    chat.wait_for("/reset  forget the conversation")
    chat.wait_for("> ")
    chat.type("half a mess")
    chat.type("\x03")
    chat.wait_for("(/quit or Ctrl-D leaves)")
    chat.type("/reset\n")
    chat.wait_for("(conversation forgotten)")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.process.wait(PATIENCE_SECONDS) == 0


def test_prompt_keeps_unread_keys_when_ctrl_c_comes_and_restores_the_terminal(chat: Terminal) -> None:
    before = chat.modes()
    chat.wait_for("> ")
    assert chat.modes()[tty.LFLAG] & termios.NOFLSH
    chat.type("/quit\n")
    assert chat.process.wait(PATIENCE_SECONDS) == 0
    assert chat.modes() == before


@pytest.mark.parametrize("chat", [True], indirect=True, ids=["piped"])
def test_ctrl_c_drops_what_was_typed_where_the_answers_go_into_a_pipe(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("half a mess")
    chat.type("\x03")
    chat.wait_for("(/quit or Ctrl-D leaves)")
    chat.wait_for("> ")
    chat.type("/help\n")
    chat.wait_for("/reset  forget the conversation")
    chat.type("/quit\n")
    assert chat.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("chat", [True], indirect=True, ids=["piped"])  # readline drops such bytes by itself
def test_typing_what_is_not_utf8_keeps_the_session(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("the f\udcf6x\n")
    chat.wait_for("(what was typed is not UTF-8)")
    chat.wait_for("> ")
    chat.type("/quit\n")
    assert chat.process.wait(PATIENCE_SECONDS) == 0


def test_quit_leaves(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("/quit\n")
    assert chat.process.wait(PATIENCE_SECONDS) == 0
