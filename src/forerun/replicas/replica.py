"""One replica: the server's application in a Ray Serve actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.decoding.level import Level
from forerun.decoding.recipes import trie_of
from forerun.engine.engine import Engine
from forerun.replicas.exchange import ExchangeClient, ExchangeUpdate, LearnedText
from forerun.replicas.front import ForwardedRequest, ResponseHead
from forerun.server.app import create_app
from forerun.server.settings import ServerSettings

EXCHANGE_SECONDS = 1.0
EXCHANGE_TIMEOUT_SECONDS = 10.0


class Replica:
    """The class that Ray Serve runs; ``exchange`` is the handle of the actor ``Exchange``."""

    def __init__(self, settings: ServerSettings, build: Callable[[ServerSettings], Engine], exchange: Any) -> None:
        import ray
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = build(settings)

        def trade(texts: Sequence[LearnedText], since: int) -> ExchangeUpdate:
            metrics = self._service.metrics.text().decode()
            update = exchange.trade.remote(self._name, texts, since, metrics)
            return ray.get(update, timeout=EXCHANGE_TIMEOUT_SECONDS)  # type: ignore[no-any-return]

        def learn(namespace: str, texts: list[list[int]]) -> None:
            self._engine.warm([texts], namespace)

        self._exchange = ExchangeClient(trade, learn, EXCHANGE_SECONDS)
        limits = settings.limits(self._engine.target.device)
        on_finished = self._exchange.add if learns(self._engine.level) else None
        self._app = create_app(self._engine, settings, limits, on_finished)
        self._service = self._app.state.service
        self._exchange.start()

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[str | ResponseHead | bytes]:
        """Yield this replica's name, the answer's head, then pieces of its body."""
        yield self._name
        async for message in responses(self._app, request):
            if message["type"] == "http.response.start":
                yield ResponseHead(message["status"], list(message.get("headers", ())), self._name)
            elif message.get("body"):
                yield bytes(message["body"])

    def check_health(self) -> None:
        """Raise RuntimeError if the scheduler has ended, so that Ray replaces this replica."""
        if not self._service.scheduler.ready:
            raise RuntimeError("the scheduler has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()
            self._exchange.close()
            self._engine.close()


def learns(level: Level) -> bool:
    """Return whether a drafter indexes outputs."""
    try:
        trie_of(level)
    except ValueError:
        return False
    return True


async def responses(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[Message]:
    """Yield the messages of an application's answer. Closing the iterator disconnects the client."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": request.method, "path": request.path, "raw_path": request.path.encode(),
        "query_string": request.query,
        "headers": list(request.headers), "client": None, "server": None,
        "state": {"tenant": request.tenant},
    }  # fmt: skip
    task = asyncio.ensure_future(app(scope, receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
        task.result()
    finally:
        gone.set()
        await asyncio.wait([task])  # ends soon, as the client is gone
