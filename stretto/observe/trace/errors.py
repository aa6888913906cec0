"""What goes wrong with a trace file. Each message names the file and says what to do."""

from __future__ import annotations

from stretto.errors import InvalidRequest


class TraceError(InvalidRequest):
    """A file that is no trace, is damaged or cut short, or holds nothing that can be analysed."""
