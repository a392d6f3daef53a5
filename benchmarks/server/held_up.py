"""What a long prompt does to others: the time between chunks of streams while it is read, and before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import httpx

from benchmarks.server.client import Reply, ServerEndpoint, answer, connected
from benchmarks.server.figures import percentile, reasons
from benchmarks.server.load_answers import Answer, understand
from benchmarks.server.load_requests import LoadRequest
from forerun.bench.machine import Row

Window = tuple[float, float]
STREAMS = 4
"""Streams that run beside the long prompt."""
BEFORE = 16
"""Answers that end before the long prompt is sent, so that there is enough to compare with."""
LOOK = 0.005
"""Seconds between looks at whether something has come."""


def measure(endpoint: ServerEndpoint, requests: Sequence[LoadRequest], long: LoadRequest, namespace: str) -> Row:
    """Figures of the streams, without and with a long prompt; only its error, if it was not answered.

    Args:
        endpoint: the server's.
        requests: what the streams ask, over and over.
        long: the long prompt.
        namespace: where nothing is known yet.
    """
    return asyncio.run(_measure(endpoint, requests, long, namespace))


async def _measure(endpoint: ServerEndpoint, requests: Sequence[LoadRequest], long: LoadRequest, namespace: str) -> Row:
    async with connected(endpoint) as http:
        streams = _Streams(http, endpoint, requests, namespace)
        tasks = [asyncio.create_task(streams.run(number)) for number in range(STREAMS)]
        while streams.ended < BEFORE:
            await asyncio.sleep(LOOK)
        reply = Reply(long)
        reading = asyncio.create_task(answer(http, endpoint, reply, {"namespace": f"{namespace}-long"}))
        while not (reply.reads and understand(reply).grew) and not reading.done():
            await asyncio.sleep(LOOK)
        streams.over = True
        await asyncio.gather(reading, *tasks)
    return _row(understand(reply), [understand(each) for each in streams.replies])


class _Streams:
    """Streams that ask again when they have their answer, until it is over."""

    def __init__(
        self, http: httpx.AsyncClient, endpoint: ServerEndpoint, requests: Sequence[LoadRequest], namespace: str
    ) -> None:
        self._http, self._endpoint, self._requests, self._namespace = http, endpoint, requests, namespace
        self.replies: list[Reply] = []
        self.ended = 0
        self.over = False

    async def run(self, number: int) -> None:
        turn = number
        while not self.over:
            cycle, at = divmod(turn, len(self._requests))  # what is asked again is asked where nothing is known of it
            reply = Reply(self._requests[at])
            self.replies.append(reply)
            await answer(self._http, self._endpoint, reply, {"namespace": f"{self._namespace}-{cycle}"})
            self.ended += 1
            turn += STREAMS


def _row(long: Answer, others: Sequence[Answer]) -> Row:
    if long.error is not None:
        return {"error": long.error}
    read = (long.sent, long.sent + long.first)
    without, while_read = ended(others, read[0]), overlapping(others, read)
    row: Row = {
        "prompt": long.usage.get("prompt_tokens"),
        "first": long.first,
        "errors": sum(reasons([long, *others]).values()),
        "chunks": len(while_read),
        **{f"without_p{part}": percentile(without, part) for part in (50, 99)},
        **{f"with_p{part}": percentile(while_read, part) for part in (50, 99)},
    }
    known = row["with_p99"] is not None and row["without_p99"]
    return row | {"ratio": row["with_p99"] / row["without_p99"] if known else None}


def ended(answers: Sequence[Answer], moment: float) -> list[float]:
    """The times between chunks that were over by then."""
    return [after - before for each in answers for before, after in pairwise(each.grew) if after <= moment]


def overlapping(answers: Sequence[Answer], window: Window) -> list[float]:
    """The times between chunks of which a part lies within a window."""
    begin, end = window
    return [
        after - before for each in answers for before, after in pairwise(each.grew) if after > begin and before < end
    ]
