"""GET /: the page, one HTML document made of the files in page/. It loads nothing else, and holds nothing secret."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stretto.server.frontend import Frontend
from stretto.server.live import LiveFeed

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("dom.js", "sse.js", "markdown.js", "settings.js", "chat.js", "lanes.js", "figures.js", "live.js", "main.js")


def add_page(app: FastAPI, frontend: Frontend) -> None:
    """Serve the page at `/`, and what it shows of the engine at `/engine/live`."""
    page, live = Page(), LiveFeed(frontend)

    async def show(request: Request) -> Response:
        return page.response(request)

    async def watch(request: Request) -> Response:
        return await live(request)

    app.add_api_route("/", show, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/engine/live", watch, methods=["GET"], include_in_schema=False)


class Page:
    """The document and the headers that go with it. Built once."""

    def __init__(self) -> None:
        style = _read("page.css")
        parts = "\n".join(map(_read, _SCRIPTS))
        script = f'\n"use strict";\n(() => {{\n{parts}}})();\n'
        html = _read("index.html").replace("@STYLE@", style).replace("@SCRIPT@", script)
        self._body = html.encode()
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "etag": self._etag,
            "cache-control": "no-cache",
            "content-security-policy": (
                f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def response(self, request: Request) -> Response:
        """The page, or 304 for a browser that has it."""
        if request.headers.get("if-none-match") == self._etag:
            return Response(None, 304, self._headers)
        return Response(self._body, 200, self._headers, media_type="text/html")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
