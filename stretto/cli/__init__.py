"""The command `stretto`. Imports torch only when a command needs it: `stretto --help` answers at once."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code: 0, 1 (failed), 2 (bad input), 130 (Ctrl-C)."""
    import os
    import shutil

    # Narrower, the help would cut the names of options.
    os.environ.setdefault("TERMINAL_WIDTH", str(max(110, shutil.get_terminal_size().columns)))
    from stretto.cli.app import run

    run()
