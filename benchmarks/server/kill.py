"""A server that is killed under load, again and again, and started over the same index and the same stored texts.

    python -m benchmarks server kill --kills 10 --out runs/kills

Each time, clients ask for every kind of text, and the server is killed (SIGKILL) after a random time, with requests
running, snapshots of the index every half second, and texts being stored. The next one must start, without a warning
about a file, with what was learned and stored before, and must answer some fixed questions with the same texts. Files
that a killed server was writing may lie there until they are removed at a later start; they may not pile up. A line of
JSON a kill is written as it is done, the last line printed is the result. Exit status 1 if something is wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server.request_mixture import TEXT, MixedRequest, TextAnswer, mixed, streamed, whole
from benchmarks.server.server_process import ServerProcess, connect
from forerun.cli.options import DebugOptions

CLIENTS = 6
LEVEL = re.compile(r"\d{4}-\d\d-\d\dT\S+ ([A-Z]+) ")
"""Time and level of a line of a server's log, as ``forerun.cli.log`` writes them."""
MAX_UNFINISHED = 2
"""Files that a killed server may have been writing: one of the index and one of the store."""
QUIET = ("DEBUG", "INFO")
KNOWN = {"model": "bundled", "max_tokens": 48, "seed": 1}
FIXED = [
    MixedRequest("text", {**KNOWN, "prompt": TEXT[at : at + 6000], "temperature": heat})
    for at, heat in ((0, 0), (900, 0), (3000, 1))
]
"""Questions whose answers are known; their prompts are long enough to be stored."""


@dataclass(frozen=True, kw_only=True)
class KillOptions(DebugOptions):
    """A server that is killed under load, again and again, over the same index and stored texts."""

    kills: Annotated[int, typer.Option(help="How many.")] = 10
    seed: Annotated[int, typer.Option(help="Of the times.")] = 0
    out: Annotated[Path, typer.Option(help="A folder; it is emptied first.")] = Path("runs/kills")


def run(options: KillOptions) -> None:
    """Kill; exit status 1 if something is wrong."""
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    chance = random.Random(options.seed)
    rows, right = [], None
    with (options.out / "kills.jsonl").open("w") as lines:
        for number in range(options.kills + 1):
            row = _life(options.out, number, chance, last=number == options.kills)
            right = right or row["said"]
            row["wrong"] = sum(said != known for said, known in zip(row.pop("said"), right, strict=True))
            rows.append(row)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
    result = {
        "kills": options.kills,
        "wrong": sum(row["wrong"] for row in rows),
        "warnings": [line for row in rows for line in row["warnings"]],
        "started_empty": sum(not row["learned_before"] or not row["read_before"] for row in rows[2:]),
        "tokens_not_read_again": [row["read_before"] for row in rows],
        "unfinished_files": [row["unfinished"] for row in rows],
        "seconds_to_ready": [row["seconds_to_ready"] for row in rows],
    }
    print(json.dumps(result))
    if faults(result):
        raise typer.Exit(1)


def faults(result: dict[str, Any]) -> list[str]:
    """Which of the figures are wrong."""
    wrong = [name for name in ("wrong", "warnings", "started_empty") if result[name]]
    return wrong + (["unfinished_files"] if max(result["unfinished_files"][1:], default=0) > MAX_UNFINISHED else [])


def _life(out: Path, number: int, chance: random.Random, last: bool) -> dict[str, Any]:
    """One server, from its start to its end."""
    store, index, log = out / "store", out / "index", out / f"server-{number}.log"
    options = ("--kv-store", str(store), "--index", str(index), "--index-interval", "0.5", "--kv-memory", "512MiB")
    with ServerProcess(options, log) as served:
        row: dict[str, Any] = {
            "unfinished": len(_unfinished(out)),
            "learned_before": served.metrics()["index_bytes"],
            "seconds_to_ready": round(served.seconds_to_ready, 2),
        }
        row["said"] = asyncio.run(_questions(served.port))
        row["read_before"] = _hits(served.port)
        if not last:
            asyncio.run(_load(served, chance))
    row["warnings"] = warnings_in(log.read_text())
    return row


def warnings_in(log: str) -> list[str]:
    """The lines of a server's log that are warnings, errors, or part of a traceback.

    Raises:
        ValueError: if no line has a level, so that there is nothing to find warnings by.
    """
    levels = [(LEVEL.match(line), line) for line in log.splitlines()]
    if not any(level for level, _ in levels):
        raise ValueError(f"no line of the server's log has a time and a level: {log[:200]!r}")
    return [line for level, line in levels if (level and level[1] not in QUIET) or line.startswith("Traceback")]


async def _questions(port: int) -> list[TextAnswer]:
    async with connect(port) as client:
        return [await whole(client, asked) for asked in FIXED]


async def _load(served: ServerProcess, chance: random.Random) -> None:
    """Clients ask until the server is killed."""

    async def ask(seed: int) -> None:
        asked = mixed(50, seed)
        async with connect(served.port) as client:
            with suppress(httpx.HTTPError):
                while True:
                    await streamed(client, asked[seed % len(asked)])
                    seed += 1

    clients = [asyncio.create_task(ask(chance.randrange(10**6))) for _ in range(CLIENTS)]
    await asyncio.sleep(chance.uniform(1, 6))
    served.process.send_signal(signal.SIGKILL)
    await asyncio.gather(*clients)


def _hits(port: int) -> int:
    """Tokens of the questions that did not have to be read."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("forerun:prefix_cache_hits_total")))


def _unfinished(out: Path) -> list[Path]:
    """Files that somebody was writing when it was killed."""
    return [each for each in out.rglob(".*") if each.is_file() and each.name != ".lock"]
