"""Many streams of every kind at once, some of whose clients go: each text is its request's alone, without drafts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.live_server import PATIENCE, TEMPLATE, LiveServer, tasks, until
from support.request_mixture import MixedRequest, TextAnswer, mixed, streamed, whole

from forerun.engine.engine import Engine
from forerun.models.loading.load import load
from forerun.server.admission import SchedulerLimits

STREAMS = 14


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, LiveServer]]:
    """One that decodes one text at a time, without drafts, and one that decodes many, with them."""
    model, tokenizer = load("bundled", device="cpu")
    tokenizer.chat_template = TEMPLATE
    limits = {"none": SchedulerLimits(1 << 30, rows=1), "trie": SchedulerLimits(1 << 30, rows=8)}
    built = {
        name: LiveServer(Engine(model, name, tokenizer=tokenizer, prefix_cache=1 << 24 if name == "trie" else 0), limit)
        for name, limit in limits.items()
    }
    yield built
    for server in built.values():
        server.close()


def client(server: LiveServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE, limits=limits)


async def alone(server: LiveServer, asked: list[MixedRequest]) -> list[TextAnswer]:
    async with client(server) as one:
        return [await whole(one, each) for each in asked]


async def together(server: LiveServer, asked: list[MixedRequest], pieces: list[int | None]) -> list[TextAnswer]:
    async with client(server) as one:
        streams = [streamed(one, each, count) for each, count in zip(asked, pieces, strict=True)]
        return await asyncio.gather(*streams)


@pytest.mark.matrix
def test_each_of_many_streams_is_its_text_alone_and_nothing_is_left(servers):
    asked = mixed(STREAMS, seed=3, longest=12)
    pieces = [3 if place % 4 == 3 else None for place in range(STREAMS)]
    many = servers["trie"]
    before = tasks()
    with ThreadPoolExecutor(1) as pool:
        wanted: list[Any] = pool.submit(asyncio.run, alone(servers["none"], asked)).result(PATIENCE)
        for _ in range(2):  # the second time with drafts out of the first
            said = pool.submit(asyncio.run, together(many, asked, pieces)).result(PATIENCE)
            for each, count, text, right in zip(asked, pieces, said, wanted, strict=True):
                assert count is not None or text == right, each
    until(lambda: not many.scheduler.busy)
    until(lambda: tasks() <= before)
    assert (many.scheduler.usage, many.scheduler.waiting, many.scheduler.running) == (0, 0, 0)
    assert many.metric("forerun:spec_decode_num_accepted_tokens_total") > 0
    assert many.metric('forerun:request_ended_total{reason="cancelled"}') > 0
