"""Clients of a server, in this process: asyncio and httpx. While they wait they only note what came and when.

What came is understood later (``load_answers.py``), so that a client takes little time from a server on the same
computer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server.levels import Level, arrivals
from benchmarks.server.load_requests import LoadRequest

Extension = Mapping[str, str]
"""The field ``forerun`` of a request: whose texts it is drafted from (``namespace``), and ``drafter`` or none."""
PATIENCE = 600.0
"""Seconds without a byte after which a request counts as failed: as long as ``forerun serve`` may take for one."""


@dataclass(frozen=True)
class ServerEndpoint:
    """Where a server is asked, and how.

    Attributes:
        url: of the server.
        model: what it calls the model.
        chats: ask as one user message, through the model's template; else as a text to continue.
        ours: the server is Forerun's, and takes a field ``forerun``.
        exact: it promises that texts are the same bit for bit, whatever shares their passes.
        encode: makes token ids of a prompt, for a server that would make others; None to send text.
    """

    url: str
    model: str
    chats: bool = False
    ours: bool = True
    exact: bool = False
    encode: Callable[[str], list[int]] | None = None

    @property
    def address(self) -> str:
        """What requests are posted to."""
        return "/v1/chat/completions" if self.chats and self.encode is None else "/v1/completions"

    def step_seconds(self) -> dict[str, float]:
        """Where the time of the server's steps has gone so far, in seconds, in the mean of its replicas; empty if it is
        not Forerun's."""
        if not self.ours:
            return {}
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text)
        seconds: dict[str, list[float]] = {}
        for each in (sample for family in families for sample in family.samples):
            if each.name == "forerun:step_seconds_total":
                seconds.setdefault(each.labels["part"], []).append(each.value)
        return {part: mean(values) for part, values in seconds.items()}

    def body(self, request: LoadRequest, extension: Extension) -> dict[str, Any]:
        """A request as JSON."""
        said: dict[str, Any] = {"prompt": request.prompt}
        if self.encode is not None:
            said = {"prompt": self.encode(request.prompt)}
        elif self.chats:
            said = {"messages": [{"role": "user", "content": request.prompt}]}
        more = {"forerun": dict(extension)} if self.ours else {}
        return said | more | {
            "model": self.model,
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass
class Reply:
    """What came for one request.

    Attributes:
        request: the request.
        sent, ended: by ``time.perf_counter``.
        reads: bytes as they came, and when.
        status: of HTTP; None if nothing came.
        error: why the connection failed, or None.
    """

    request: LoadRequest
    sent: float = 0.0
    ended: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class LoadRun:
    """All replies under one load, and the seconds that it took: of this computer's time, and of this process's own."""

    replies: list[Reply]
    seconds: float
    own_seconds: float


@asynccontextmanager
async def connected(endpoint: ServerEndpoint) -> AsyncIterator[httpx.AsyncClient]:
    """A context with a client that opens as many connections as are wanted."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Accept-Encoding": "identity"}  # or there is nothing to read until a block is full
    async with httpx.AsyncClient(base_url=endpoint.url, limits=limits, timeout=PATIENCE, headers=headers) as http:
        yield http


async def answer(http: httpx.AsyncClient, endpoint: ServerEndpoint, reply: Reply, extension: Extension) -> Reply:
    """Send a request, and note all that comes."""
    body, clock = endpoint.body(reply.request, extension), time.perf_counter
    reply.sent = clock()
    try:
        async with http.stream("POST", endpoint.address, json=body) as response:
            reply.status = response.status_code
            async for part in response.aiter_raw():
                reply.reads.append((clock(), part))
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.ended = clock()
    return reply


def run(endpoint: ServerEndpoint, level: Level, extension: Extension) -> LoadRun:
    """LoadRequest all of a level's requests."""
    return asyncio.run(_run(endpoint, level, extension))


async def _run(endpoint: ServerEndpoint, level: Level, extension: Extension) -> LoadRun:
    async with connected(endpoint) as http:
        began, own = time.perf_counter(), time.process_time()
        asked = _opened if level.kind == "rate" else _closed
        replies = await asked(http, endpoint, level, extension)
        return LoadRun(replies, time.perf_counter() - began, time.process_time() - own)


async def _closed(http: httpx.AsyncClient, endpoint: ServerEndpoint, level: Level, extension: Extension) -> list[Reply]:
    left = iter(level.requests)
    found = await asyncio.gather(
        *(_one_after_another(http, endpoint, left, extension) for _ in range(int(level.value)))
    )
    return [reply for replies in found for reply in replies]


async def _one_after_another(
    http: httpx.AsyncClient, endpoint: ServerEndpoint, left: Iterable[LoadRequest], extension: Extension
) -> Sequence[Reply]:
    return [await answer(http, endpoint, Reply(request), extension) for request in left]


async def _opened(http: httpx.AsyncClient, endpoint: ServerEndpoint, level: Level, extension: Extension) -> list[Reply]:
    began = time.perf_counter()

    async def arrive(request: LoadRequest, at: float) -> Reply:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await answer(http, endpoint, Reply(request), extension)

    due = arrivals(level.value, len(level.requests), level.seed)
    return await asyncio.gather(*map(arrive, level.requests, due))
