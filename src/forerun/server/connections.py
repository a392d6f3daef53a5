"""Connections: how many there may be, how long each may be silent, and OpenAI's shape for what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.errors import CLOSE, ApiError

HEAD = 10.0
"""Seconds that a request's head may take to come, from the connection on, or from when the last answer was read."""
STUCK = 60.0
"""Seconds after which a client that reads slowly is looked at."""
SLOW = 1024
"""Bytes a second that a client has to read of what is waiting for it, at least."""
SPARE = 32
"""Connections beyond the limit that are still told so. Those beyond them are dropped at once."""


class Connection(H11Protocol):
    """uvicorn's connection, with bounds. uvicorn's ``limit_concurrency`` is the number of connections.

    One beyond it has its requests answered by 503. A client that says nothing for too long, or reads too slowly, is
    dropped.
    """

    head, stuck = HEAD, STUCK

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None
        self._full: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app = _refuse
            if len(self.connections) > self._most + SPARE:
                transport.abort()
                return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        for timer in (self._timer, self._full):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Of asyncio: the client reads more slowly than it is told."""
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        """Of asyncio."""
        super().resume_writing()
        if self._full is not None:
            self._full.cancel()

    def on_response_complete(self) -> None:
        """Of uvicorn: an answer has been sent, and the next request may have begun."""
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn: what came is no HTTP. In the midst of an answer there is nothing to say."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            told = ApiError(400, "this is not a request in HTTP/1.1", "invalid_http", headers=CLOSE).response()
            head = h11.Response(status_code=400, headers=told.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(told.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.head, self._look, self.cycle, self._unread)

    def _look(self, last: object, unread: int) -> None:
        """If no request has come since the last one, and its answer is not being read any more, this is the end."""
        if self.cycle is not last:
            return
        if self._reads(unread, self.head):
            self._wait_for_head()
        else:
            self.transport.abort()

    def _wait_for_reading(self) -> None:
        self._full = self.loop.call_later(self.stuck, self._look_at_reading, self._unread)

    def _look_at_reading(self, unread: int) -> None:
        if self._reads(unread, self.stuck):
            self._wait_for_reading()
        else:
            self.transport.abort()

    @property
    def _unread(self) -> int:
        """Bytes that wait for the client."""
        return self.transport.get_write_buffer_size()

    def _reads(self, unread: int, seconds: float) -> bool:
        """Whether of so many bytes the client has read enough, or all, in so many seconds."""
        return self._unread <= max(0, unread - SLOW * seconds) and unread > 0


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for those who are too many. It reads what they send first: see `Gate`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAD):
            while (await receive()).get("more_body", False):
                pass
    told = "there are as many connections as this server takes; try again"
    error = ApiError(503, told, "too_many_connections", headers={**CLOSE, "Retry-After": "1"})
    await error.response()(scope, receive, send)
