"""Before anything is parsed: who asks, and how much they send."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError
from forerun.server.keys import Keys

OPEN = ("/health", "/ready")
"""Addresses that need no key: they say nothing but whether the server is there."""


class Gate:
    """Middleware that refuses wrong keys (401) and large bodies (413); the rest is told its tenant.

    Args:
        app: what is behind it; finds ``tenant`` in the scope's state.
        keys: who may ask.
        limit: bytes of a body, at most.
        free: addresses that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Keys, limit: int, free: Collection[str] = OPEN) -> None:
        self._app, self._keys, self._limit, self._free = app, keys, limit, frozenset(free)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
            messages = await self._read(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] in self._free:
            return
        tenant = self._keys.tenant(_header(scope, b"authorization"))
        if tenant is None:
            told = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, told, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope.setdefault("state", {})["tenant"] = tenant

    async def _read(self, scope: Scope, receive: Receive) -> list[Message]:
        """The body, as it came."""
        declared = _header(scope, b"content-length") or b"0"
        if declared.isdigit():
            self._check(int(declared))
        messages, size, more = [], 0, True
        while more:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            self._check(size)
            more = message.get("more_body", False)
        return messages

    def _check(self, size: int) -> None:
        if size > self._limit:
            told = f"the body has {size:,} bytes or more; this server takes {self._limit:,}"
            raise ApiError(413, told, "request_too_large", headers={"Connection": "close"})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
