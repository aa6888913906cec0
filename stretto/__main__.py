"""`python -m stretto` is the command `stretto`."""

from stretto.cli import main

main()
