"""One replica: the server's application in an actor of Ray Serve, which hands on what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.drafting.drafter import Drafter
from forerun.drafting.recipes import trie_of
from forerun.engine.engine import Engine
from forerun.replicas.exchange import News, Text, Trader
from forerun.replicas.replica_messages import Asked, Start
from forerun.server.app import create_app
from forerun.server.settings import ServerSettings

INTERVAL = 1.0
"""Seconds between trades with the other replicas."""


class Replica:
    """What Ray Serve runs.

    Args:
        told: the server's settings.
        build: makes the engine from them.
        exchange: the handle of the actor ``Exchange``.
    """

    def __init__(self, told: ServerSettings, build: Callable[[ServerSettings], Engine], exchange: Any) -> None:
        import ray
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = build(told)
        self._app = create_app(self._engine, told, told.limits(self._engine.target.device))
        self._service = self._app.state.service

        def trade(texts: Sequence[Text], since: int) -> News:
            figures = self._service.metrics.text().decode()
            return ray.get(exchange.trade.remote(self._name, texts, since, figures))  # type: ignore[no-any-return]

        self._trader = Trader(trade, lambda namespace, rows: self._engine.warm([rows], namespace), INTERVAL)
        if learns(self._engine.drafter):
            self._service.scheduler.on_finished = self._trader.take
        self._trader.start()

    async def answer(self, asked: Asked) -> AsyncIterator[Start | bytes]:
        """The answer's head, then its body in pieces."""
        async for message in played(self._app, asked):
            if message["type"] == "http.response.start":
                yield Start(message["status"], list(message.get("headers", ())), self._name)
            elif message.get("body"):
                yield bytes(message["body"])

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that is not healthy.

        Raises:
            RuntimeError: if no more texts are decoded.
        """
        if not self._service.scheduler.ready:
            raise RuntimeError("the scheduler has ended")

    def __del__(self) -> None:
        if hasattr(self, "_trader"):
            self._service.scheduler.close()
            self._trader.close()
            self._engine.close()


def learns(drafter: Drafter) -> bool:
    """Whether a drafter keeps anything of earlier texts."""
    try:
        trie_of(drafter)
    except ValueError:
        return False
    return True


async def played(app: ASGIApp, asked: Asked) -> AsyncIterator[Message]:
    """What an application sends for a request. It is told that the client has gone when nobody listens any more."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": asked.method, "path": asked.path, "raw_path": asked.path.encode(), "query_string": asked.query,
        "headers": list(asked.headers), "client": None, "server": None, "state": {},
    }  # fmt: skip
    task = asyncio.ensure_future(app(scope, receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        while (message := await sent.get()) is not None:
            yield message
        task.result()
    finally:
        gone.set()


_running: set[asyncio.Future[None]] = set()
"""Answers under way; a loop alone would not keep them."""
