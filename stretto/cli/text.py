"""Text that a user names or sends: files and standard input. What cannot be read is bad input, never a failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import InvalidRequest

_STDIN = "standard input"


def read_file(path: str | Path) -> str:
    """The text of a file; `-` is standard input. Raises InvalidRequest if it cannot be read or is not UTF-8."""
    if str(path) == "-":
        return read_stdin()
    try:
        return _decoded(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error


def read_stdin() -> str:
    """All of standard input. Raises InvalidRequest if it is not UTF-8. Blocks until it ends."""
    return _decoded(sys.stdin.buffer.read(), _STDIN)


def stdin_lines() -> Iterator[str]:
    """Standard input line by line, without line ends, each as it comes. Raises InvalidRequest as `read_stdin`."""
    for number, line in enumerate(iter(sys.stdin.buffer.readline, b""), 1):
        yield _decoded(line, _STDIN, number).rstrip("\n")


def prompt_lines(path: str | Path) -> list[str]:
    """The lines of a file (or `-`) that hold text. Raises InvalidRequest if there are none, and as `read_file`."""
    lines = [line for line in read_file(path).split("\n") if line.strip()]
    if not lines:
        raise InvalidRequest(f"{path} has no prompts; put one on each line")
    return lines


def _decoded(data: bytes, origin: str, first_line: int = 1) -> str:
    """The text, with line ends as Python has them. `data` begins at line `first_line` of its origin."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise InvalidRequest(
            f"{origin} is not UTF-8: byte 0x{data[error.start]:02x} in line {line}; convert it to UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
