"""How a command fails: one readable line on standard error, an exit code, and no traceback unless it was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.errors import InvalidRequest, NotSupported, StrettoError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def fail(message: str, code: int) -> SystemExit:
    """Say what is wrong; raise the result."""
    sys.stdout.flush()
    print(f"stretto: error: {' '.join(message.split())}", file=sys.stderr)
    return SystemExit(code)


def usage_message(error: Exception) -> str | None:
    """What was wrong with the command line itself (empty where its help was shown); None for any other error."""
    # Known by what such errors offer: their class lives in click or inside typer, by typer's version.
    tell = getattr(error, "format_message", None)
    return None if tell is None else str(tell())


@contextmanager
def reported_failures(debug: bool) -> Iterator[None]:
    """Turn exceptions of this block into a line and an exit code; `debug` lets them through with their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nstretto: stopped", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has left, as `| head` does; Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None
    except Exception as error:
        if debug or usage_message(error) is not None:  # app.py tells usage errors, with the command that they are about
            raise
        if isinstance(error, (InvalidRequest, NotSupported, UnicodeDecodeError)):
            raise fail(str(error), BAD_INPUT) from None
        if isinstance(error, (StrettoError, OSError)):
            raise fail(str(error), FAILED) from None
        raise fail(f"internal error, {type(error).__name__}: {error} (--debug shows where)", FAILED) from None
