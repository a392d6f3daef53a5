"""The application that clients talk to. It forwards requests to replicas, and retries elsewhere if one dies."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.replicas.prefix_index import digests
from forerun.server.api_errors import ANTHROPIC_ADDRESS, ApiError
from forerun.server.app import disconnected
from forerun.server.replies import event

log = logging.getLogger(__name__)

REPLICA_LOST = (503, "the replica that wrote this answer has died; send the request again", "replica_lost")
"""Arguments of an ``ApiError``. A shared exception raised repeatedly would keep its requests alive."""
MAX_REPLICAS_TRIED = 3
"""Replicas that one request may lose before it fails."""
REMEMBERED_SUSPECTS = 1024
PROVEN = 2
"""Deaths of replicas that prove a request guilty. One death counts fully if the request was alone there."""
METRICS_SECONDS = 10.0

SECRET_HEADERS = (b"authorization", b"x-api-key", b"proxy-authorization", b"cookie")

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class ForwardedRequest:
    """A client's request, without keys, which have been checked; ``beginnings`` are its ``digests``."""

    method: str
    path: str
    query: bytes
    headers: Sequence[Header]
    body: bytes
    tenant: str = ""
    beginnings: Sequence[bytes] = field(default=(), repr=False)


class ResponseHead(NamedTuple):
    """The head of an answer, and the replica that sends it."""

    status: int
    headers: Sequence[Header]
    replica: str


Forward = Callable[[ForwardedRequest], AsyncIterator[str | ResponseHead | bytes]]
"""Sends a request to a replica, whose name comes first; closing the iterator cancels it."""


class Suspects:
    """A record of which requests made a replica die. A request that was alone there is guilty. Of several, each may be
    retried once; one under which a second replica dies is guilty. Equal requests from several clients count once."""

    def __init__(self) -> None:
        self._running: dict[str, list[bytes]] = {}
        self._deaths: dict[str, int] = {}  # requests that a dead replica had, until all have been told
        self._blame: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # of a request, by replicas that died under it

    def blamed(self, request: bytes) -> bool:
        """Return whether a request is guilty."""
        return sum(self._blame.get(request, {}).values()) >= PROVEN

    def begin(self, request: bytes, replica: str) -> None:
        self._running.setdefault(replica, []).append(request)

    def die(self, request: bytes, replica: str) -> None:
        """Record that a replica died while serving a request."""
        crowd = self._deaths.setdefault(replica, len(set(self._running[replica])))
        self._blame.setdefault(request, {})[replica] = PROVEN if crowd == 1 else 1
        while len(self._blame) > REMEMBERED_SUSPECTS:
            self._blame.popitem(last=False)

    def end(self, request: bytes, replica: str) -> None:
        self._running[replica].remove(request)
        if not self._running[replica]:
            del self._running[replica]
            self._deaths.pop(replica, None)  # its name may be used again


class Front:
    """The ASGI application in front of the replicas, wrapped by ``GuardMiddleware``; ``lost``: errors of dead replicas.

    A request whose replica dies goes to another, unless it is guilty (``Suspects``) or the client has received part of
    the answer. That ends with an error: sampling may continue differently elsewhere, so the rest would not fit.
    """

    def __init__(
        self,
        forward: Forward,
        metrics: Callable[[], Awaitable[Mapping[str, str]]],
        lost: tuple[type[BaseException], ...],
    ) -> None:
        self._forward, self._metrics, self._lost = forward, metrics, lost
        self._suspects = Suspects()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
        elif scope["type"] == "http" and scope["path"] == "/health":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/metrics":
            await (await self._merged_metrics())(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _merged_metrics(self) -> Response:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                return Response(merged_metrics(await self._metrics()), media_type=CONTENT_TYPE_LATEST)
        except Exception as error:
            if not isinstance(error, (TimeoutError, *self._lost)):
                raise
            return ApiError(503, "the replicas' metrics cannot be reached", "not_ready").response()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        tenant = scope.get("state", {}).get("tenant") or ""
        # in a thread: a large body needs 0.1 s and more, and streams would wait
        beginnings = await asyncio.to_thread(digests, tenant, body) if scope["method"] == "POST" else ()
        headers = [(name, value) for name, value in scope["headers"] if name not in SECRET_HEADERS]
        request = ForwardedRequest(
            scope["method"], scope["path"], scope["query_string"], headers, body, tenant, beginnings
        )
        relaying = asyncio.create_task(self._relay(request, send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait([relaying, leaving], return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                await relaying
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        finally:
            relaying.cancel()
            leaving.cancel()

    async def _relay(self, request: ForwardedRequest, send: Send) -> None:
        """Relay an answer; raise ApiError if replica after replica died, and the client has received nothing."""
        digest = hashlib.blake2b(request.body, digest_size=16, key=request.tenant.encode()).digest()
        for _ in range(MAX_REPLICAS_TRIED):
            if self._suspects.blamed(digest):
                message = "a replica died under this request, probably because of it; it is not retried"
                raise ApiError(500, message, "replica_killed", headers={"x-should-retry": "false"})
            if await self._tried(request, digest, send):
                return
        raise ApiError(*REPLICA_LOST)

    async def _tried(self, request: ForwardedRequest, digest: bytes, send: Send) -> bool:
        """Relay a replica's answer; return False if the replica was lost before the client received anything."""
        head: ResponseHead | None = None
        replica, begun = None, False
        try:
            async for part in self._forward(request):
                if isinstance(part, str):
                    self._suspects.begin(digest, replica := part)
                elif isinstance(part, ResponseHead):
                    head = part
                else:
                    if head is not None and not begun:  # only when there is a body to send
                        await _send_head(head, send)
                        begun = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if head is not None and not begun:
                await _send_head(head, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except self._lost:
            log.warning("a replica was lost while serving %s %s", request.method, request.path)
            if replica is not None:
                self._suspects.die(digest, replica)
            if not begun:
                return False
            assert head is not None
            last = _lost_event(request.path) if _is_stream(head) else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            if replica is not None:
                self._suspects.end(digest, replica)
        return True


async def _send_head(head: ResponseHead, send: Send) -> None:
    headers = [*head.headers, (b"x-forerun-replica", head.replica.encode())]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})


def _is_stream(head: ResponseHead) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in head.headers)


def _lost_event(path: str) -> bytes:
    """Return the event that ends a stream in its API's form; Anthropic's clients ignore unnamed events."""
    error = ApiError(*REPLICA_LOST)
    return (event(error.anthropic_body, "error") if path.startswith(ANTHROPIC_ADDRESS) else event(error.body)).encode()


def merged_metrics(metrics: Mapping[str, str]) -> bytes:
    """Merge the metrics of all replicas, labelled ``replica``."""
    families: dict[str, Metric] = {}
    for replica, text in metrics.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)

    class All:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    return generate_latest(All())
