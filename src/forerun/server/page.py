"""The page at ``/``: fixed files of this package. They need no key, for nothing in them is secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response

import forerun.reference

_HERE = Path(__file__).parent / "static"
FILES = {
    "/": _HERE / "index.html",
    "/page/page.css": _HERE / "page.css",
    "/page/page.js": _HERE / "page.js",
    "/page/column.js": _HERE / "column.js",
    "/page/stream.js": _HERE / "stream.js",
    "/page/icon.svg": _HERE / "icon.svg",
    "/page/prompts.json": Path(forerun.reference.__file__).parent / "demo.json",
}
"""Addresses, and what is there."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser may load: these files, and answers of this server; nothing that is written into the page."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}
"""Of files; a computer's own list may say otherwise, and no browser runs a script of another type."""


def add_page(app: FastAPI) -> None:
    """Let an application answer with the page."""
    for address, file in FILES.items():
        app.add_api_route(address, _answering(file), methods=["GET", "HEAD"], include_in_schema=False)


def _answering(file: Path) -> Callable[[], Awaitable[Response]]:
    kind = TYPES.get(file.suffix, "text/html")

    async def answer() -> Response:
        return FileResponse(file, media_type=kind, headers=HEADERS)

    return answer
