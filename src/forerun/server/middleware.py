"""Check a request's id, host, origin, key and size before it is parsed."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import uuid
from collections.abc import Collection
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.core.fairness import background
from forerun.server.admission import FairShare
from forerun.server.api_errors import ANTHROPIC_ADDRESS, CLOSE, ApiError
from forerun.server.bodies import SMALL_BYTES, check_parts
from forerun.server.tenants import ApiKeys

OPEN_ADDRESSES = ("/health", "/ready")
"""Addresses without checks."""
ADMIN_ADDRESS = "/metrics"
"""The address that needs the admin key, as it covers all tenants."""
BODIES_IN_MEMORY = 32
"""Bytes that all requests may hold, in bodies of the largest size: until they are parsed, and later for answers."""
RESERVED_BODIES = 16
"""The part of these reserved for tenants who hold none."""
BODY_SECONDS = 10.0
"""Time for a body to arrive, in addition to that for its bytes."""
MIN_BODY_RATE = 1 << 17
"""Bytes per second at which a body must arrive: a slow line of one megabit per second."""
READ_RATE = 32 << 20
"""Bytes per second at which a tenant's large bodies are read: a quarter second for the largest. At 1.4 ms of the event
loop per MiB, a tenant has 5 % of it, not the 30 % of a loopback without limit."""
REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._-]{1,64}")

request_id: ContextVar[str] = ContextVar("forerun_request_id", default="-")
"""The current request's id, for log lines."""


class HeldBytes:
    """One request's part of the bytes that all requests may hold."""

    def __init__(self, share: FairShare, tenant: str) -> None:
        self._share, self._tenant, self._held = share, tenant, 0

    def acquire(self, nbytes: int, what: str = "bytes") -> None:
        """Hold more bytes. Raises ApiError: 503 if other requests hold too much, 400 beyond the total."""
        if nbytes > self._share.capacity:
            message = f"the request may take {nbytes:,} {what}; this server has {self._share.capacity:,} for all"
            raise ApiError(400, message, "too_large")
        if not self._share.allows(self._tenant, nbytes):
            wait = "other requests hold all bytes that this server allows; try again"
            raise ApiError(503, wait, "too_many_bytes", headers={"Retry-After": "1"})
        self._share.acquire(self._tenant, nbytes)
        self._held += nbytes

    def release(self, keep: int = 0) -> None:
        """Release all but ``keep`` bytes."""
        if self._held > keep:
            self._share.release(self._tenant, self._held - keep)
            self._held = keep


class ReadPace:
    """Spreads the bytes of each tenant's large bodies over time."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due: dict[str, float] = {}

    async def wait(self, tenant: str, nbytes: int) -> float:
        """Wait until a tenant's bytes so far are due, these last; return the seconds."""
        now = asyncio.get_running_loop().time()
        self._due[tenant] = due = max(now, self._due.get(tenant, now)) + nbytes / self._rate
        await asyncio.sleep(due - now)
        return due - now


class GuardMiddleware:
    """Middleware that adds ``tenant``, ``request_id`` and ``held`` to a request's state, and refuses bad requests.

    Those have wrong keys (401), foreign hosts or origins (403), or a body that is too large or has too many parts
    (413), slow (408) or compressed (415). The rest of a refused body is discarded: closing the connection would reset a
    client that still sends, and lose the answer. The application gets complete bodies in one piece.

    Without keys, a web page could use this computer's server from another origin or by a domain that points here (DNS
    rebinding). So requests need one of ``hosts`` (or localhost, or an IP address) and the server's origin or one of
    ``origins``; ``*`` is any, and ``hosts`` None checks neither.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        body_limit: int,
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
        open_addresses: Collection[str] = OPEN_ADDRESSES,
    ) -> None:
        self._app, self._keys, self._limit, self._open = app, keys, body_limit, frozenset(open_addresses)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)
        check_parts(b" " * 2 * SMALL_BYTES, body_limit)  # compiles it, so that no request waits for that
        self._pace, self._background = ReadPace(READ_RATE), background("forerun-counts")
        self._share = FairShare(BODIES_IN_MEMORY * body_limit, len(keys.tenants), RESERVED_BODIES * body_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_id(scope, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn, which knows the original method, sends no body
        held = HeldBytes(self._share, "")
        try:
            if not scope["state"].get("tenant"):
                self._check_source(scope)
            if scope["path"] in self._open:  # without reading a body
                await self._app(scope, receive, send)
                return
            self._authenticate(scope)
            held = scope["state"]["held"] = HeldBytes(self._share, scope["state"]["tenant"])
            whole = await self._read(scope, receive, held)
            if whole is not None:
                await self._app(scope, whole, send)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        finally:
            held.release()

    def _check_source(self, scope: Scope) -> None:
        if self._hosts is None or scope["path"] in OPEN_ADDRESSES:
            return
        host = (_header(scope, b"host") or b"").decode("latin-1").lower()
        if not self._is_own(host):
            message = "this server does not answer to the name in the Host header; --allowed-host adds one"
            raise ApiError(403, message, "host_not_allowed")
        origin = _header(scope, b"origin")
        if origin is None or "*" in self._origins or origin.decode("latin-1") in self._origins:
            return
        if origin.decode("latin-1").lower().partition("://")[2] != host:
            message = "web pages of another origin may not use this server; --cors-origin allows one"
            raise ApiError(403, message, "origin_not_allowed")

    def _is_own(self, host: str) -> bool:
        assert self._hosts is not None
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self._hosts and name != "localhost" and "*" not in self._hosts:
                ipaddress.ip_address(name)  # no domain, which a page could point here
        except ValueError:
            return False
        return True

    def _authenticate(self, scope: Scope) -> None:
        """Find the request's tenant, unless the replicas' front has done so."""
        if scope["state"].get("tenant"):
            return
        if scope["path"] == ADMIN_ADDRESS:
            if not self._keys.admits(_header(scope, b"authorization")):
                message = "the metrics of all tenants are for the admin key (--admin-key)"
                raise ApiError(403, message, "admin_only")
            scope["state"]["tenant"] = ""
            return
        own = _header(scope, b"x-api-key")  # from Anthropic's clients
        tenant = self._keys.tenant(_header(scope, b"authorization") if own is None else b"Bearer " + own)
        if tenant is None:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope["state"]["tenant"] = tenant

    async def _read(self, scope: Scope, receive: Receive, held: HeldBytes) -> Receive | None:
        """Return messages that begin with the complete body; None if the client goes before that."""
        if (_header(scope, b"content-encoding") or b"identity").lower() != b"identity":
            raise ApiError(415, "the body is compressed; send it as it is", "unsupported_encoding")
        declared = _header(scope, b"content-length") or b"0"
        if declared.isdigit():
            self._check_size(int(declared))
        try:
            async with asyncio.timeout(BODY_SECONDS) as timeout:
                body = await self._collect(receive, scope["state"]["tenant"], held, timeout)
        except TimeoutError:
            limit = f"{BODY_SECONDS:g} seconds and a second for {MIN_BODY_RATE:,} bytes"
            raise ApiError(408, f"the body did not arrive within {limit}", "request_timeout", headers=CLOSE) from None
        if body is None:
            return None
        if len(body) > SMALL_BYTES:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._background, check_parts, body, self._limit)
        return _replay(body, receive)

    async def _collect(self, receive: Receive, tenant: str, held: HeldBytes, timeout: asyncio.Timeout) -> bytes | None:
        parts, size, more, until = list[bytes](), 0, True, asyncio.get_running_loop().time() + BODY_SECONDS
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(part := message.get("body", b""))
            size += len(part)
            self._check_size(size)
            held.acquire(len(part))
            more = message.get("more_body", False)
            until += len(part) / MIN_BODY_RATE
            if size > SMALL_BYTES:
                timeout.reschedule(None)  # the client does not pay for this wait
                until += await self._pace.wait(tenant, len(part))
            timeout.reschedule(until)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            message = f"the body has {size:,} bytes or more; this server takes {self._limit:,}"
            raise ApiError(413, message, "request_too_large")


def _with_id(scope: Scope, send: Send) -> Send:
    """Add its client's id, or a new one, to a request and to its response."""
    given = _header(scope, REQUEST_ID_HEADER) or b""
    number = given if REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex.encode()
    others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID_HEADER]
    scope["headers"] = [*others, (REQUEST_ID_HEADER, number)]
    scope.setdefault("state", {})["request_id"] = number.decode()
    request_id.set(number.decode())

    own = [REQUEST_ID_HEADER, *([b"request-id"] if scope["path"].startswith(ANTHROPIC_ADDRESS) else [])]

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in own]
            message = {**message, "headers": [*headers, *((name, number) for name in own)]}
        await send(message)

    return send_with_id


def _replay(body: bytes, receive: Receive) -> Receive:
    read: list[Message] = [{"type": "http.request", "body": body}]

    async def replay() -> Message:
        return read.pop() if read else await receive()

    return replay


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
