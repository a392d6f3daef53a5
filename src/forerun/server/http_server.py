"""uvicorn with bounds on connections, silence and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import socket
import sys
from contextlib import ExitStack
from typing import Any, Literal

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from forerun.server.api_errors import CLOSE, ApiError
from forerun.server.middleware import OPEN_ADDRESSES
from forerun.server.service import Service

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""Time limit for a request's head, from the connection or the end of reading the last answer."""
READING_SECONDS = 60.0
"""Interval at which a slow reader is checked."""
MIN_READING_RATE = 1024
"""Bytes per second that a client must read of waiting data."""
RESERVED_CONNECTIONS = 32
"""Connections beyond the limits, for health checks and errors. A further one replaces the oldest."""
CONNECTIONS_FOR_OTHERS = 1 / 8
"""Fraction of all connections that one address must leave to others."""
CLOSING_SECONDS = 5
"""Time for clients to read the end of their answers after decoding has stopped."""


class BoundedConnection(H11Protocol):
    """uvicorn's connection. Beyond ``limit_concurrency`` connections in all, or one address's part of them, it answers
    only health checks, and other requests with 503. A client that is silent for too long or reads too slowly is
    dropped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit, self.limit_concurrency = self.limit_concurrency, None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reserved_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limit is not None and self._is_beyond(self._limit):
            self.app, self._reserved_since = _health_alone(self.app), self.loop.time()
            reserved = [each for each in self._all() if each._reserved_since and not each.transport.is_closing()]
            if len(reserved) > RESERVED_CONNECTIONS:
                min(reserved, key=lambda each: each._reserved_since or 0.0).transport.abort()
        self._watch("head", HEAD_SECONDS)

    def _all(self) -> list[BoundedConnection]:
        return [each for each in self.connections if isinstance(each, BoundedConnection)]

    def _is_beyond(self, limit: int) -> bool:
        ordinary = [each for each in self._all() if each._reserved_since is None]
        address = (self.client or ())[:1]
        of_address = sum((each.client or ())[:1] == address for each in ordinary) if address else 0
        return len(ordinary) > limit or of_address > limit - int(CONNECTIONS_FOR_OTHERS * limit)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch("reading", READING_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        if "reading" in self._timers:
            self._timers["reading"].cancel()

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:  # no further request has begun
            self._watch("head", HEAD_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; after an answer has begun, just close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            found = sys.exc_info()[1]  # uvicorn calls this while handling h11's error
            too_large = isinstance(found, h11.RemoteProtocolError) and found.error_status_hint == 431
            status, why = (431, "the head is too large") if too_large else (400, "this is not an HTTP/1.1 request")
            error = ApiError(status, why, "invalid_http", headers=CLOSE).response()
            head = h11.Response(status_code=status, headers=error.raw_headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=bytes(error.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self, what: Literal["head", "reading"], seconds: float) -> None:
        """Check the client in ``seconds``; drop it if it is silent, or reads waiting data too slowly."""
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self.loop.call_later(seconds, self._check, what, seconds, self.cycle, self._unread)

    def _check(self, what: Literal["head", "reading"], seconds: float, last: object, unread: int) -> None:
        if what == "head" and self.cycle is not last:  # a request has come
            return
        if unread > 0 and self._unread <= max(0, unread - MIN_READING_RATE * seconds):
            self._watch(what, seconds)
        else:
            self.transport.abort()

    @property
    def _unread(self) -> int:
        return self.transport.get_write_buffer_size()


def _health_alone(app: Any) -> Any:
    """Restrict an application to the addresses without checks, one request per connection."""

    async def restricted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] in OPEN_ADDRESSES:
            await app(scope, receive, send_last)
            return
        with contextlib.suppress(TimeoutError):  # closing earlier would reset a client that still sends
            async with asyncio.timeout(HEAD_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        message = "this server has no free connection; try again"
        error = ApiError(503, message, "too_many_connections", headers={**CLOSE, "Retry-After": "1"})
        await error.response(scope["path"])(scope, receive, send)

    return restricted


class DrainingServer(uvicorn.Server):
    """uvicorn that ends with the scheduler. Running requests have ``patience`` seconds; cancelled ones get an error."""

    def __init__(self, app: FastAPI, patience: float, connections: int, page: bool = False) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            limit_concurrency=connections,
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(patience) + CLOSING_SECONDS,
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._patience, self._page = patience, page

    def serve_on(self, sockets: list[socket.socket]) -> None:
        """Serve on sockets from ``bound_sockets`` until a signal comes; raise OSError if the port is busy by now."""
        for one in sockets:
            one.listen(self.config.backlog)
        self.run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        gc.freeze()  # exclude all present objects from garbage collection
        await super().startup(sockets)
        for one in sockets or ():
            log.info("listening on %s%s", _address(one), f"; the page is at {_address(one)}/" if self._page else "")

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.scheduler.failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._service.close, self._patience))
        await super().shutdown(sockets)
        await closing
        gc.unfreeze()  # without this, native libraries report leaks at exit


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind sockets on all addresses of a host, without listening; port 0 is any free one. Raise OSError if busy."""
    sockets: list[socket.socket] = []
    with ExitStack() as opened:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            missing: OSError | None = None
            for family, kind, protocol, _, (address, _, *rest) in dict.fromkeys(addresses):
                try:
                    one = _bound_socket(family, kind, protocol, (address, port, *rest))
                except OSError as error:  # a computer without IPv6 may know IPv6 addresses
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    missing = error
                    continue
                sockets.append(opened.enter_context(one))
                port = port or one.getsockname()[1]
            if missing is not None and not sockets:
                raise missing
        except OSError as error:
            raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
        opened.pop_all()
    return sockets


def _address(one: socket.socket) -> str:
    host, port = one.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound_socket(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one
