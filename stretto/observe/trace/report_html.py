"""The picture: one self-contained HTML file that opens from disk without a network.

Owns the assembly of the page from its parts in `page/`. The page may load nothing: its policy forbids it.
"""

from __future__ import annotations

import html
from importlib import resources

from stretto.observe.trace.analysis import Analysis
from stretto.observe.trace.page_data import pack

_SCRIPTS = (
    "data.js",
    "theme.js",
    "lanes.js",
    "margins.js",
    "timeline.js",
    "overview.js",
    "pointer.js",
    "panels.js",
    "steps.js",
    "main.js",
)


def as_html(analysis: Analysis) -> str:
    """The page of a trace."""
    meta, columns = pack(analysis)
    title = analysis.trace.path.replace("\\", "/").rsplit("/", 1)[-1]
    # In a script element only "</" could end it early; JSON may write the slash escaped.
    parts = {
        "@TITLE@": html.escape(title),
        "@STYLE@": _part("page.css"),
        "@META@": meta.replace("</", "<\\/"),
        "@COLUMNS@": columns,
        "@SCRIPT@": "\n".join(_part(name) for name in _SCRIPTS),
    }
    page = _part("page.html")
    pieces = []
    while page:
        at = min((page.find(mark) for mark in parts if mark in page), default=-1)
        if at < 0:
            pieces.append(page)
            break
        mark = next(mark for mark in parts if page.startswith(mark, at))
        pieces += [page[:at], parts[mark]]
        page = page[at + len(mark) :]
    return "".join(pieces)


def _part(name: str) -> str:
    return resources.files("stretto.observe.trace").joinpath("page", name).read_text(encoding="utf-8")
