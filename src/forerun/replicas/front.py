"""What clients talk to: hands requests on to replicas, and hides that one has died as far as that can be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.replicas.prefix_index import digests
from forerun.replicas.replica_messages import Asked, Start
from forerun.server.errors import ApiError
from forerun.server.replies import event

log = logging.getLogger(__name__)

LOST = ApiError(503, "the replica that wrote this answer has died; ask again", "replica_lost")
TRIES = 3
"""Replicas that may die under one request before it is given up."""

Answer = Callable[[Asked], AsyncIterator[Start | bytes]]
"""Asks some replica; closing the iterator cancels the request."""


class Front:
    """An ASGI application in front of the replicas, behind a ``Gate``.

    A request whose replica dies goes to another one, unless the client has received some of the answer. Then the answer
    ends with an error: the rest of a text cannot be joined to it, as a sampled one may go on otherwise.

    Args:
        answer: asks a replica.
        figures: the metrics of each replica.
        lost: what is raised when a replica has died.
    """

    def __init__(
        self,
        answer: Answer,
        figures: Callable[[], Awaitable[Mapping[str, str]]],
        lost: tuple[type[BaseException], ...],
    ) -> None:
        self._answer, self._figures, self._lost = answer, figures, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/metrics":
            text = merged(await self._figures())
            await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        elif scope["type"] == "http":
            await self._hand_on(scope, receive, send)

    async def _hand_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        tenant = scope.get("state", {}).get("tenant")
        # in another thread: a large body takes 0.1 s and more, in which streams would wait
        beginnings = await asyncio.to_thread(digests, tenant or "", body) if scope["method"] == "POST" else ()
        asked = Asked(
            scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body, tenant, beginnings
        )
        listening = asyncio.create_task(self._listen(asked, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait([listening, leaving], return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                await listening
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            listening.cancel()
            leaving.cancel()

    async def _listen(self, asked: Asked, send: Send) -> None:
        """Send an answer on.

        Raises:
            ApiError: if replica after replica died, and the client has received nothing.
        """
        for _ in range(TRIES):
            start: Start | None = None
            begun = False
            try:
                async for part in self._answer(asked):
                    if isinstance(part, Start):
                        start = part
                        continue
                    if start is not None and not begun:  # not before there is something to read
                        await _begin(start, send)
                        begun = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                if start is not None and not begun:
                    await _begin(start, send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            except self._lost:
                log.warning("a replica died under %s %s", asked.method, asked.path)
                if begun:
                    assert start is not None
                    last = event(LOST.body).encode() if _streams(start) else b""
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    return
        raise LOST


async def _begin(start: Start, send: Send) -> None:
    headers = [*start.headers, (b"x-forerun-replica", start.replica.encode())]
    await send({"type": "http.response.start", "status": start.status, "headers": headers})


def _streams(start: Start) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start.headers)


async def _left(receive: Receive) -> None:
    """Until the client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    """Begin and end with the server; there is nothing to do."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


def merged(figures: Mapping[str, str]) -> bytes:
    """The metrics of all replicas, each under the label ``replica``."""
    families: dict[str, Metric] = {}
    for replica, text in figures.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)

    class All:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    return generate_latest(All())
