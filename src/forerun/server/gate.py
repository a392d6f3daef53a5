"""Before anything is parsed: who asks, and how much they send."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import CLOSE, ApiError
from forerun.server.keys import Keys

OPEN = ("/health", "/ready")
"""Addresses that need no key: they say nothing but whether the server is there."""
BODIES = 32
"""Of the largest size, whose bytes all requests may hold together, from their coming to their end."""
PATIENCE = 60.0
"""Seconds that a body may take to come: enough for 8 MiB over a slow line of 1.2 Mbit/s."""


class Gate:
    """Middleware that refuses wrong keys (401), large bodies (413) and slow ones (408); the rest is told its tenant.

    What is behind it gets a body in one piece, and nothing of one that does not come in full. The rest of a body that
    is refused is read and thrown away, for as long as the connection may be silent. If the connection were closed under
    a client that still sends, it would be reset, and the client could lose the answer.

    Args:
        app: what is behind it; finds ``tenant`` in the scope's state.
        keys: who may ask.
        limit: bytes of a body, at most.
        free: addresses that need no key.
        patience: seconds that a body may take.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, limit: int, free: Collection[str] = OPEN, patience: float = PATIENCE
    ) -> None:
        self._app, self._keys, self._limit, self._free = app, keys, limit, frozenset(free)
        self._patience = patience
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or scope["path"] in self._free:  # what is there reads no body
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            self._admit(scope)
            if await self._read(scope, receive, body):
                await self._app(scope, _replay(bytes(body), receive), send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            self._held -= len(body)

    def _admit(self, scope: Scope) -> None:
        tenant = self._keys.tenant(_header(scope, b"authorization"))
        if tenant is None:
            told = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, told, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope.setdefault("state", {})["tenant"] = tenant

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Collect the body; whether all of it has come before the client went."""
        declared = _header(scope, b"content-length") or b"0"
        if declared.isdigit():
            self._check(int(declared))
        try:
            async with asyncio.timeout(self._patience):
                return await self._collect(receive, body)
        except TimeoutError:
            told = f"the body did not come within {self._patience:g} seconds"
            raise ApiError(408, told, "request_timeout", headers=CLOSE) from None

    async def _collect(self, receive: Receive, body: bytearray) -> bool:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            body += part
            self._held += len(part)
            self._check(len(body))
            if self._held > BODIES * self._limit:
                told = "the requests that are here hold as many bytes as this server takes; try again"
                raise ApiError(503, told, "too_many_bytes", headers={"Retry-After": "1"})
            more = message.get("more_body", False)
        return True

    def _check(self, size: int) -> None:
        if size > self._limit:
            told = f"the body has {size:,} bytes or more; this server takes {self._limit:,}"
            raise ApiError(413, told, "request_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, and then what else comes."""
    read: list[Message] = [{"type": "http.request", "body": body}]

    async def replay() -> Message:
        return read.pop() if read else await receive()

    return replay


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
