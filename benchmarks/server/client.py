"""Clients of a server, in this process: asyncio and httpx.

While they wait, clients only record bytes and times: the server needs the processor. ``parsed`` makes answers of that.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

Extension = Mapping[str, str]  # the field forerun of a request: the namespace that it drafts from, and drafter
PATIENCE = 600.0
"""Seconds without a byte after which a request counts as failed: the default ``timeout`` of ``forerun serve``."""
QUOTED = 200  # maximum characters of an error that a report quotes


@dataclass(frozen=True)
class LoadRequest:
    """A prompt, as text or token ids, of a task; ``tokens`` is the maximum of the answer, temperature 0 is greedy."""

    task: str
    prompt: str | Sequence[int]
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Level:
    """A load: ``clients`` that wait for each answer before the next request (closed loop), or requests at a ``rate``
    per second, whatever becomes of the others (open loop). ``seed`` is of the arrivals."""

    kind: Literal["clients", "rate"]
    value: float
    requests: Sequence[LoadRequest]
    seed: int = 0

    @property
    def name(self) -> str:
        unit = "per second" if self.kind == "rate" else "client" + "s" * (self.value != 1)
        return f"{self.value:g} {unit}"


@dataclass(frozen=True)
class ServerEndpoint:
    """How to reach a server.

    Attributes:
        chats: send prompts as one user message, through the model's template.
        ours: Forerun's server, which accepts the field ``forerun``.
        exact: the server promises equal bits, whatever shares a pass.
        encode: makes token ids of a prompt, for a server that would encode it otherwise; None sends text.
    """

    url: str
    model: str
    chats: bool = False
    ours: bool = True
    exact: bool = False
    encode: Callable[[str], list[int]] | None = None
    key: str = "none"

    @property
    def address(self) -> str:
        return "/v1/chat/completions" if self.chats and self.encode is None else "/v1/completions"

    def step_seconds(self) -> dict[str, float]:
        """Return the seconds of each part of all steps so far, as the mean of replicas; empty for other servers."""
        if not self.ours:
            return {}
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text)
        seconds: dict[str, list[float]] = {}
        for each in (sample for family in families for sample in family.samples):
            if each.name == "forerun:step_seconds_total":
                seconds.setdefault(each.labels["part"], []).append(each.value)
        return {part: mean(values) for part, values in seconds.items()}

    def body(self, request: LoadRequest, extension: Extension) -> dict[str, Any]:
        prompt: Any = request.prompt
        if self.encode is not None and isinstance(prompt, str):
            prompt = self.encode(prompt)
        chats = self.address.endswith("chat/completions")
        return {
            **({"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}),
            **({"forerun": dict(extension)} if self.ours else {}),
            "model": self.model, "max_tokens": request.tokens, "temperature": request.temperature,
            "seed": request.seed, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass
class Reply:
    """What came for one request: bytes with their times by ``time.perf_counter``, the HTTP status if any, and why the
    connection failed."""

    request: LoadRequest
    sent: float = 0.0
    ended: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class LoadRun:
    """All replies under a load, its seconds, and the processor seconds of the clients."""

    replies: list[Reply]
    seconds: float
    own_seconds: float


@dataclass(frozen=True)
class Answer:
    """A parsed reply: times at which text came (``grew``; chunks that came together count once), the server's counts,
    and why the answer is incomplete."""

    request: LoadRequest
    text: str
    sent: float
    ended: float
    grew: Sequence[float]
    usage: dict[str, Any]
    error: str | None = None

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def first(self) -> float:
        """Return the seconds to the first text, or to the end without any."""
        return (self.grew[0] if self.grew else self.ended) - self.sent

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.grew)]

    @property
    def each(self) -> float | None:
        """Return the seconds per token after the first text; None for fewer than two tokens."""
        return (self.ended - self.grew[0]) / (self.tokens - 1) if self.tokens > 1 and self.grew else None

    @property
    def digest(self) -> str | None:
        return None if self.error else hashlib.sha256(self.text.encode()).hexdigest()[:16]


def mixed(
    prompts: Mapping[str, Sequence[str]], lengths: Sequence[int], temperature: float, seed: int
) -> list[LoadRequest]:
    """Return all prompts, from each task in turn, with a seed and a drawn length each. Every second turn through the
    tasks is sampled at ``temperature``."""
    rng = Random(f"serving/{seed}")
    return [
        LoadRequest(task, found[turn], rng.choice(lengths), temperature if turn % 2 else 0.0, rng.randrange(1 << 31))
        for turn in range(max(map(len, prompts.values())))
        for task, found in prompts.items()
        if turn < len(found)
    ]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process, ``rate`` per second; the first is 0."""
    rng, at, found = Random(f"arrivals/{seed}"), 0.0, list[float]()
    for _ in range(count):
        found.append(at)
        at += rng.expovariate(rate)
    return found


@asynccontextmanager
async def connected(endpoint: ServerEndpoint) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client without a limit on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # compressed, there would be nothing to read until a block is full
    headers = {"Accept-Encoding": "identity", "Authorization": f"Bearer {endpoint.key}"}
    async with httpx.AsyncClient(base_url=endpoint.url, limits=limits, timeout=PATIENCE, headers=headers) as http:
        yield http


async def answer(http: httpx.AsyncClient, endpoint: ServerEndpoint, reply: Reply, extension: Extension) -> Reply:
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
    return asyncio.run(_run(endpoint, level, extension))


async def _run(endpoint: ServerEndpoint, level: Level, extension: Extension) -> LoadRun:
    async with connected(endpoint) as http:
        began, own = time.perf_counter(), time.process_time()

        async def in_turn(left: Iterable[LoadRequest]) -> list[Reply]:
            return [await answer(http, endpoint, Reply(request), extension) for request in left]

        async def arrive(request: LoadRequest, at: float) -> list[Reply]:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            return await in_turn([request])

        if level.kind == "rate":
            due = arrivals(level.value, len(level.requests), level.seed)
            found = await asyncio.gather(*map(arrive, level.requests, due))
        else:
            left = iter(level.requests)
            found = await asyncio.gather(*(in_turn(left) for _ in range(int(level.value))))
        replies = [reply for replies in found for reply in replies]
        return LoadRun(replies, time.perf_counter() - began, time.process_time() - own)


def parsed(reply: Reply) -> Answer:
    parts, grew, usage, done, error = list[str](), list[float](), dict[str, Any](), False, reply.error
    if error is None and reply.status != 200:
        error = f"status {reply.status}: {_short(b''.join(part for _, part in reply.reads).decode(errors='replace'))}"
    for at, event in events(reply.reads) if error is None else ():
        if "error" in event:
            error = _short(event["error"])
            break
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            done = done or choice.get("finish_reason") is not None
            if new := choice.get("text") or (choice.get("delta") or {}).get("content"):
                parts.append(new)
                if not grew or grew[-1] != at:
                    grew.append(at)
    if error is None and not done:
        error = "the stream ended before the answer did"
    return Answer(reply.request, "".join(parts), reply.sent, reply.ended, grew, usage, error)


def events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the server-sent events, without comments, each with the time at which its last byte came."""
    rest = b""
    for at, part in reads:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data:").strip()
            if data and data != b"[DONE]" and not data.startswith(b":"):
                yield at, json.loads(data)


def _short(message: Any) -> str:
    return " ".join(str(message).split())[:QUOTED]
