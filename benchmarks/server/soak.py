"""Whether a real server grows: half load for minutes or hours, and a look at the process every other second.

    python -m benchmarks server soak --minutes 60 --out runs/soak

Clients ask for every kind of text, and pause as long as each answer took. Samples go to ``samples.jsonl`` as they are
taken, and to ``soak.png``. The last line printed is the result as JSON. Exit status 1 if something grows by more than
its bound, or a request failed.

What a server keeps by design is full before the first sample: its index has learned a text that is larger than its
limit, and every request has been made, by more clients than later, so that the beginnings of prompts are kept, what is
made at first use is there, and the allocator holds what the most requests at once have freed.

Two things are judged then. *An hour adds*: the median of the slopes between all pairs of samples (Theil and Sen),
behind the first quarter. It finds what grows under load, and is as uncertain as the memory of those who happen to run.
*At rest*: before and after, when nobody is asked for, and the server has given its free memory back. What it holds then
it holds for good. Resident memory is judged at rest alone: under load, most of its growth is what the allocator keeps
of what was freed, anew after each rest.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.server.request_mixture import mixed, streamed
from benchmarks.server.server_process import ServerProcess, connect
from forerun.bench.machine import caption
from forerun.bench.report import figure
from forerun.cli.options import DebugOptions

BOUNDS = {"allocated": 64 << 20, "threads": 1, "files": 1, "tasks": 1, "index_bytes": 1 << 20}
"""What an hour may add. Of minutes, the slope of bytes in use is uncertain by some 30 MiB an hour."""
AT_REST = {"rss": 16 << 20, "allocated": 4 << 20, "threads": 1, "files": 1, "tasks": 1}
"""What there may be more of after a soak than before it, however long it was. Pages that still hold something differ by
some 5 MiB from one rest to the next; ``allocated``, which the allocator has handed out, by less than 1."""
TEXTS = 70
"""Different requests: ten of each kind."""
FIRST = 12
"""Times as many requests as there are texts come before the first sample, from twice the clients and without pauses.
After 280 requests a server at rest still grew by 28 MiB; from 600 on by 5."""
EVERY = 2.0
"""Seconds between samples."""
OPTIONS = ("--kv-memory", "1GiB", "--prefix-cache", "32MiB", "--index-limit", "1MiB", "--warm", typing.__file__)
"""So little for beginnings of prompts and for the index that both are full before the first sample: a module of
Python's own library has more tokens than a MiB of index."""
Samples = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SoakOptions(DebugOptions):
    """Mixed requests for minutes: does the server hold more and more?"""

    minutes: Annotated[float, typer.Option(help="How long.")] = 8
    clients: Annotated[int, typer.Option(help="At once.")] = 4
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0
    out: Annotated[Path, typer.Option(help="A folder.")] = Path("runs/soak")


def run(options: SoakOptions) -> None:
    """Soak; exit status 1 if something grows or a request fails."""
    options.out.mkdir(parents=True, exist_ok=True)
    with ServerProcess(OPTIONS, options.out / "server.log") as served:
        asyncio.run(_fill(served, 2 * options.clients))
        before = served.rest()
        samples, answered, failed = asyncio.run(_soak(served, options))
        after = served.rest()
    growth = {name: _slope(samples[len(samples) // 4 :], name) for name in BOUNDS}
    more = {name: after[name] - before[name] for name in AT_REST}
    beyond = faults(growth, more, answered)
    _plot(samples, options.out / "soak.png")
    result = {"answered": answered, "failed": failed, "an_hour_adds": growth, "at_rest_more": more, "beyond": beyond}
    print(json.dumps(result | {"before": before, "after": after}))
    if beyond or failed:
        raise typer.Exit(1)


def faults(growth: dict[str, float], more: dict[str, float], answered: int) -> list[str]:
    """What grows beyond its bound, under load by the hour and at rest; a soak without answers or samples shows nothing,
    and is a fault itself."""
    beyond = [f"{name} under load" for name, bound in BOUNDS.items() if not growth[name] <= bound]
    beyond += [f"{name} at rest" for name, bound in AT_REST.items() if not more[name] <= bound]
    return beyond if answered else [*beyond, "nothing was answered"]


async def _fill(served: ServerProcess, clients: int) -> None:
    """Ask for every text ``FIRST`` times."""
    left = FIRST * mixed(TEXTS, seed=0)

    async def ask() -> None:
        async with connect(served.port) as client:
            while left:
                await streamed(client, left.pop())

    await asyncio.gather(*(ask() for _ in range(clients)))


async def _soak(served: ServerProcess, options: SoakOptions) -> tuple[Samples, int, int]:
    """Samples, and how many requests were answered and failed."""
    until = time.monotonic() + 60 * options.minutes
    watching = asyncio.create_task(_watch(served, until, options.out / "samples.jsonl"))
    counts = await asyncio.gather(*(_ask(served.port, until, options.seed + each) for each in range(options.clients)))
    return await watching, sum(done for done, _ in counts), sum(failed for _, failed in counts)


async def _ask(port: int, until: float, seed: int) -> tuple[int, int]:
    done = failed = 0
    chance = random.Random(seed)
    pool = mixed(TEXTS, seed=0)
    async with connect(port) as client:
        while time.monotonic() < until:
            asked, began = chance.choice(pool), time.monotonic()
            try:
                await streamed(client, asked, chance.choice((None, None, None, 3)))
                done += 1
            except (httpx.HTTPError, RuntimeError) as error:
                print(f"{asked.kind}: {error!r}", file=sys.stderr)
                failed += 1
            await asyncio.sleep(time.monotonic() - began)
    return done, failed


async def _watch(served: ServerProcess, until: float, file: Path) -> Samples:
    samples: Samples = []
    with file.open("w") as out:
        while time.monotonic() < until:
            sample = {"at": round(time.monotonic(), 1), **await asyncio.to_thread(served.look)}
            samples.append(sample)
            out.write(json.dumps(sample) + "\n")
            out.flush()
            await asyncio.sleep(EVERY)
    return samples


def _slope(samples: Samples, name: str) -> float:
    """What an hour adds: the median of all slopes between two samples."""
    at, value = (np.array([each[key] for each in samples], float) for key in ("at", name))
    if len(at) < 2:
        return float("nan")
    first, second = np.triu_indices(len(at), 1)
    return round(float(np.median((value[second] - value[first]) / (at[second] - at[first]))) * 3600, 1)


def _plot(samples: Samples, file: Path) -> None:
    shown = ["rss", *BOUNDS, "kv_cache_usage_perc"]
    title, note = "A server under load for hours", caption({"model": "bundled"})
    with figure(file, len(shown), title=title, note=note, sharex=True, figsize=(8, 1.6 * len(shown))) as (_, axes):
        for axis, name in zip(axes, shown, strict=True):
            scale = 1 << 20 if name in ("rss", "allocated", "index_bytes") else 1
            minutes = [(each["at"] - samples[0]["at"]) / 60 for each in samples]
            axis.plot(minutes, [each[name] / scale for each in samples], linewidth=1)
            axis.set_ylabel(f"{name}{', MiB' if scale > 1 else ''}", rotation=0, ha="right")
        axes[-1].set_xlabel("minutes")
