"""What a real server makes of nonsense: thousands of requests out of its own description, and bytes that are none.

    python -m benchmarks server fuzz --requests 10000 --out runs/fuzz.json

Each must be answered in time, none by 5xx, each error in OpenAI's shape; and in the end the server has what it had at
its start: no requests, no memory for keys and values, as many tasks, threads and open files. The result is written as
JSON, and printed but for what was wrong. Exit status 1 if anything was.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.server.malformed_requests import RawRequest, RequestFuzzer
from benchmarks.server.response_checks import ask_all, wrong
from benchmarks.server.server_process import ServerProcess
from forerun.cli.options import DebugOptions
from forerun.server.grammar_pool import COMPILING_PROCESSES

KEYS, ADMIN_KEY = ("key-of-a", "key-of-b", "key-of-c"), "key-of-admin"
OPTIONS = (
    "--max-tokens", "64", "--kv-memory", "1GiB", "--namespaces", "8", "--admin-key", ADMIN_KEY,
    *(part for key in KEYS for part in ("--api-key", key)), "--allowed-host", "example.com",
)  # fmt: skip
"""Of the server: answers so short that thousands take minutes, several tenants, and hosts that are checked."""
WARM = 200
"""Requests before the server is looked at first: by then it has the threads that it keeps."""
LATE = {
    "threads": COMPILING_PROCESSES + min(32, (os.cpu_count() or 1) + 4),
    "files": 2 * COMPILING_PROCESSES,
}
"""What starts when it is needed first, and stays: processes that compile schemas, and asyncio's threads."""
MIN_ANSWERED = 0.1
"""Part of the requests that are right, and get an answer."""
INDEX = 64 << 20
"""Bytes of indexes, at most, after all requests: each of some 10 namespaces learns a few thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class FuzzOptions(DebugOptions):
    """Thousands of requests out of the server's own description, and bytes that are none."""

    requests: Annotated[int, typer.Option(help="How many.")] = 10_000
    clients: Annotated[int, typer.Option(help="At once.")] = 16
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0
    out: Annotated[Path, typer.Option(help="The result.")] = Path("runs/fuzz.json")


def run(options: FuzzOptions) -> None:
    """RequestFuzzer; exit status 1 if anything was wrong."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ServerProcess(OPTIONS, options.out.with_suffix(".log"), ADMIN_KEY) as served:
        result = _fuzz(served, options.requests, options.clients, options.seed)
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({name: value for name, value in result.items() if name != "wrong"}))
    if result["wrong"]:
        raise typer.Exit(1)


def _fuzz(served: ServerProcess, requests: int, clients: int, seed: int) -> dict[str, Any]:
    description = json.loads(served.get("/openapi.json", KEYS[0]))
    warm = RequestFuzzer(description, seed + 1, large=0, keys=KEYS)
    asyncio.run(ask_all(served.port, [warm.draw() for _ in range(WARM)], clients))
    before = served.rest()
    fuzz = RequestFuzzer(description, seed, keys=KEYS)
    sent = [fuzz.draw() for _ in range(requests)]
    answers = asyncio.run(ask_all(served.port, sent, clients))
    after = served.rest()
    found = [
        {"what": what, **_shown(one)} for one, each in zip(sent, answers, strict=True) if (what := wrong(one, each))
    ]
    found += [{"what": what} for what in leaks(before, after)]
    served_well = sum(each.status == 200 for each in answers)
    if served_well < MIN_ANSWERED * requests:  # a server that refuses everything has no other faults
        found.append({"what": f"only {served_well} requests were answered"})
    slowest = sorted(zip((each.seconds for each in answers), sent, strict=True), key=lambda pair: -pair[0])[:5]
    return {
        "requests": requests,
        "kinds": Counter(one.kind for one in sent),
        "statuses": Counter(str(each.status) for each in answers),
        "failures": len(found),
        "slowest": [{"seconds": round(seconds, 3), **_shown(one)} for seconds, one in slowest],
        "before": before,
        "after": after,
        "wrong": found,
    }


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the server has more of at rest than before."""
    names = ("tasks", "threads", "files", "kv_cache_usage_perc")
    more = [name for name in names if after[name] > before[name] + LATE.get(name, 0)]
    leaks = [f"{name}: {before[name]} before, {after[name]} after" for name in more]
    return leaks + ([f"indexes have {after['index_bytes']:.0f} bytes"] if after["index_bytes"] > INDEX else [])


def _shown(sent: RawRequest) -> dict[str, str]:
    return {"kind": sent.kind, "said": repr(b"".join(sent.pieces)[:600])}
