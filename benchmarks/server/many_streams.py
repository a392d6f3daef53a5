"""Whether many streams at once are each, bit for bit, the text of their request alone without drafts.

    python -m benchmarks server streams --streams 64 --rounds 3 --out runs/streams.json

First a server without drafts, which decodes one text at a time, answers each request. Then a server with drafts gets
all of them at once, as streams of every kind, of which one client in four goes in the midst of its own. In the end it
must have what it had at its start. The result is written as JSON and printed. Exit status 1 if a text differs, a
request fails, or something is left.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.server.request_mixture import MixedRequest, TextAnswer, mixed, streamed, whole
from benchmarks.server.server_process import ServerProcess, connect
from forerun.cli.options import DebugOptions

ALONE = ("--drafter", "none", "--rows", "1", "--prefix-cache", "0", "--kv-memory", "1GiB")
TOGETHER = ("--kv-memory", "1GiB", "--waiting", "512")
LEAVING = 0.25
"""Of the clients."""


@dataclass(frozen=True, kw_only=True)
class StreamsOptions(DebugOptions):
    """Many streams at once: is each, bit for bit, the text of its request alone without drafts?"""

    streams: Annotated[int, typer.Option(help="At once.")] = 64
    rounds: Annotated[int, typer.Option(help="How often.")] = 3
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0
    out: Annotated[Path, typer.Option(help="The result.")] = Path("runs/streams.json")


def run(options: StreamsOptions) -> None:
    """Ask; exit status 1 if a text differs, a request fails, or something is left."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    asked = mixed(options.streams, options.seed)
    with ServerProcess(ALONE) as served:
        wanted = asyncio.run(_alone(served.port, asked))
    result = _together(asked, wanted, options.rounds, options.seed)
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    if faults(result):
        raise typer.Exit(1)


def faults(result: dict[str, Any]) -> list[str]:
    """Which of the figures are wrong; a round in which nothing was compared shows nothing."""
    wrong = [name for name in ("different", "failed", "left") if result[name]]
    return wrong if result["texts_compared"] else [*wrong, "texts_compared"]


def _together(asked: list[MixedRequest], wanted: list[TextAnswer], rounds: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    compared, left_early, different, failed = 0, 0, [], []
    with ServerProcess(TOGETHER) as served:
        asyncio.run(_round(served.port, asked, [None] * len(asked)))  # threads and what is kept are there from now on
        before = served.rest()
        for number in range(rounds):
            pieces = [chance.randrange(1, 12) if chance.random() < LEAVING else None for _ in asked]
            for place, said in enumerate(asyncio.run(_round(served.port, asked, pieces))):
                name = f"round {number}, request {place}, {asked[place].kind}"
                if isinstance(said, BaseException):
                    failed.append(f"{name}: {said!r}")
                elif pieces[place] is not None:
                    left_early += 1
                else:
                    compared += len(said)
                    different += [] if said == wanted[place] else [name]
        after = served.rest()
    names = ("tasks", "threads", "files", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    left = {name: (before[name], after[name]) for name in names if after[name] > before[name]}
    return {
        "streams": len(asked),
        "rounds": rounds,
        "texts_compared": compared,
        "clients_gone": left_early,
        "different": different,
        "failed": failed,
        "left": left,
        "before": before,
        "after": after,
    }


async def _alone(port: int, asked: list[MixedRequest]) -> list[TextAnswer]:
    async with connect(port) as client:
        return [await whole(client, each) for each in asked]


async def _round(port: int, asked: list[MixedRequest], pieces: list[int | None]) -> list[TextAnswer | BaseException]:
    """Each client has a connection of its own."""
    async with connect(port) as client:
        streams = [streamed(client, each, count) for each, count in zip(asked, pieces, strict=True)]
        return await asyncio.gather(*streams, return_exceptions=True)
