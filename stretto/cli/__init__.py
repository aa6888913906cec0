"""The command `stretto`. Imports torch only when a command needs it: `stretto --help` answers at once."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code: 0, 1 (failed), 2 (bad input), 130 (Ctrl-C)."""
    from stretto.cli.app import run

    run()
