"""``python -m benchmarks server attack``: two tenants of one server, of whom one attacks; what the other one notices.

The other tenant reads one stream after the other: alone, beside a process that only computes, and beside the attacks of
a separate process: floods of outputs, long forced outputs, endless characters, schemas that are hard to compile, many
log-probabilities, a namespace for each request, and bodies of the largest size. The slowest hundredth of the gaps
between chunks is split by the times of the server's steps, and gaps are listed by the kinds of bodies that were open
meanwhile: with ``--attackers 1``, by one body alone.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.reporting.common_options import ListOptions, list_option, names_of
from benchmarks.reporting.study_report import Report, listing
from benchmarks.server.client import LoadRequest, Reply, ServerEndpoint, answer, connected, events
from benchmarks.server.load_figures import percentile
from benchmarks.server.watched_server import PARTS, WatchedServer, slowest, watched
from forerun.bench.disturbance import LoadMeter
from forerun.bench.machine import Row
from forerun.cli.commands import FAILED
from forerun.cli.options import Out, OutputOptions, option
from forerun.cli.terminal import say

Json = dict[str, Any]
QUIET_KEY, ATTACKING_KEY = "key-of-the-quiet", "key-of-the-attacker"
OPTIONS = ("--api-key", QUIET_KEY, "--api-key", ATTACKING_KEY, "--kv-memory", "1GiB")
MAX_RATIO = 2.0  # the goal: p99 between chunks beside the attacks, over that alone
STREAM_TOKENS = 96
TEXT = Path(json.__file__).read_text()  # prompts are cut from a module of Python's library
STARTING_SECONDS = 120  # time for the attacking process to import and to make its bodies, on a busy computer
NICE = 19  # lowest priority: a real attacker does not use this computer's processors
COMPUTING = f"""
import os
os.nice({NICE})
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""
"""A process that only computes, until its parent has ended."""
COLUMNS = {
    "phase": "", "streams": "streams", "chunks": "chunks", "p50_between_chunks": "p50 between chunks, ms",
    "p99_between_chunks": "p99", "longest_gap": "longest", "p50_first": "p50 to the first", "p99_first": "p99",
    "seconds": "of the slowest 1 %: mean", **{part: part for part in PARTS}, "waits": "waits",
    "preemptions": "preemptions", "server": "processors of the server", "all": "of all", "statuses": "answers",
}  # fmt: skip
Sent = tuple[str, float, float]  # a request's kind, and when it was sent and answered
IN_SECONDS = ("p50_between_chunks", "p99_between_chunks", "longest_gap", "p50_first", "p99_first", "seconds", *PARTS)


def _schema(schema: Json, **more: Any) -> Json:
    return {
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    } | more


def _slow(patterns: int) -> Json:
    return _schema({"allOf": [{"pattern": f"[a-z]{{{i}}}.*x"} for i in range(patterns)]})


def _repeated(field: str, entry: str, size: int = (8 << 20) - 300) -> bytes:
    """Return a body of the largest size that repeats one entry of a field."""
    return f'{{"model":"bundled","max_tokens":4,"{field}":[{",".join([entry] * (size // (len(entry) + 1)))}]}}'.encode()


def _unknown_fields() -> bytes:
    return ('{"model":"bundled","prompt":"x"' + "".join(f',"x{i}":1' for i in range(700_000)) + "}").encode()


def _picture(size: int) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * (size // 8)}
    return json.dumps({"role": "user", "content": [{"type": "image", "source": source}]})


def _many_tools() -> bytes:
    tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
    return _repeated("tools", tool).replace(
        b'"max_tokens"', b'"messages":[{"role":"user","content":"Hi"}],"max_tokens"'
    )


LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ids": ("/detokenize", lambda: _repeated("tokens", "5", 7_000_000).replace(b'"max_tokens":4,', b"")),
    "fields": ("/v1/completions", _unknown_fields),
    "messages": ("/v1/chat/completions", lambda: _repeated("messages", '{"role":"user","content":""}', 7_000_000)),
    "blocks": ("/v1/messages", lambda: _repeated("messages", '{"role":"user","content":[{"type":"text","text":"a"}]}')),
    "tools": ("/v1/chat/completions", _many_tools),
    "long text": ("/v1/completions", lambda: b'{"model":"bundled","prompt":"' + b"word " * 1_600_000 + b'"}'),
    "nesting": ("/v1/chat/completions", lambda: b'{"messages":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"),
    "escapes": ("/v1/completions", lambda: b'{"model":"bundled","prompt":"' + b"\\u00e9" * 1_380_000 + b'"}'),
    "texts": ("/v1/completions", lambda: _repeated("prompt", '"' + "x" * 90 + '"')),
    "picture": ("/v1/messages", lambda: _repeated("messages", _picture(8_000_000))),
    "turns": ("/v1/chat/completions", lambda: _repeated("messages", f'{{"role":"user","content":"{"a" * 2000}"}}')),
}  # fmt: skip
"""Addresses, and bodies that are costly to parse, by the kind of attack."""
ATTACKS: dict[str, Callable[[random.Random], Json]] = {
    "many texts": lambda chance: {"prompt": "Once", "n": chance.choice((15, 128)), "max_tokens": 4096},
    "forced text": lambda chance: _schema({"const": "a" * chance.choice((1900, 60_000))}, n=15, max_tokens=4096),
    "pattern": lambda chance: _schema({"type": "string", "pattern": "^a{1900}$"}, n=4, max_tokens=4096),
    "no character": lambda chance: _schema({"const": "\ufffd" * 600}, n=4, max_tokens=4096),
    "slow schema": lambda chance: _slow(chance.randint(9, 22)),
    "large body": lambda chance: {"prompt": "x", "user": "y" * ((8 << 20) - 200)},
    "log-probabilities": lambda chance: {"messages": [{"role": "user", "content": "Hi"}], "n": 16, "logprobs": True,
                                         "top_logprobs": 20, "max_tokens": 300},
    "namespaces": lambda chance: {"prompt": TEXT[:600], "max_tokens": 8,
                                  "forerun": {"namespace": f"n{chance.randrange(10**9)}"}},
}  # fmt: skip
"""Bodies by the kind of attack."""


@dataclass(frozen=True)
class AttackOptions(ListOptions, OutputOptions):
    """Two tenants, of whom one attacks: is the other one served as before?

    Exit status 1 if the other tenant was refused once, or its p99 between chunks more than doubled. Writes JSON and
    Markdown.
    """

    seconds: Annotated[float, option(panel="Load", help="Of the attacks; two thirds of it before them.")] = 300.0
    attacks: Annotated[str, list_option("Load", "Which; default: all.")] = ",".join((*ATTACKS, *LARGE))
    attackers: Annotated[int, option(panel="Load", help="Requests of the attacker at once.")] = 12
    seed: Annotated[int, option(panel="Load", help="Of the attacks.")] = 0
    out: Out = Path("runs/attack")

    kinds = names_of("attacks", (*ATTACKS, *LARGE))


def run(options: AttackOptions) -> None:
    third, rows = options.seconds / 3, list[Row]()
    with watched(OPTIONS, options.out / "server.log") as server:
        asyncio.run(_read(server.url, min(10.0, options.seconds / 10), "warm"))
        rows.append(_phase(server, third, "alone"))
        with _computing():
            rows.append(_phase(server, third, "floor"))
        context = multiprocessing.get_context("spawn")
        counts = context.Queue()
        attacker = context.Process(target=_attack, args=(server.url, options, counts))
        attacker.start()
        counts.get(timeout=STARTING_SECONDS)
        rows.append(_phase(server, options.seconds, "beside"))
        attacked, sent = counts.get(timeout=options.seconds + 120)
        attacker.join()
    faults = fill(report := Report.of("Two tenants, of whom one attacks", options, "attack"), rows, attacked, sent)
    report.end()
    if faults:
        say("\n".join(faults))
        raise typer.Exit(FAILED)


def fill(
    report: Report, rows: Sequence[Row], attacked: Mapping[str, Mapping[str, int]], sent: Sequence[Sent]
) -> list[str]:
    """Add the phases (alone, floor, beside), the answers to each attack and the gaps beside it; return the faults."""
    *_, streams = [row.pop("times") for row in rows]
    before, *others = (row["p99_between_chunks"] for row in rows)
    floor, ratio = (None if not before or after is None else after / before for after in others)
    refused = {status: count for status, count in rows[-1]["statuses"].items() if status != "200" and count}
    faults = [f"{count} answers with {status}" for status, count in refused.items()]
    if ratio is None:
        faults.append("no stream was read to its end in one of the phases")
    elif ratio > MAX_RATIO:
        faults.append(f"the 99th percentile between chunks is {ratio:.2f} times that without attacks")
    shown = [
        row | {name: None if row.get(name) is None else round(1000 * row[name], 1) for name in IN_SECONDS}
        for row in rows
    ]
    report.add("phases", "What the other tenant notices", rows, listing(shown, COLUMNS))
    verdict = {"ratio": ratio, "floor": floor, "faults": faults}
    heads = {"ratio": "p99 beside the attacks / alone", "floor": "beside a process that computes / alone"}
    named = verdict | {"faults": "; ".join(faults) or "none"}
    report.add("verdict", "Verdict", [verdict], listing([named], heads | {"faults": "faults"}))
    beside = gaps_beside(streams, sent)
    answers = [{"attack": name, "answers": dict(counted)} | beside.get(name, {}) for name, counted in attacked.items()]
    heads = {"attack": "attack", "answers": "answers", "gaps": "gaps beside it"}
    heads |= {"p50": "p50, ms", "p99": "p99", "longest": "longest"}
    report.add("attacks", "Answers to the attacks, and gaps beside them", answers, listing(answers, heads))
    return faults


def _phase(server: WatchedServer, seconds: float, name: str) -> Row:
    """Read streams; record the server's steps and the processors in use meanwhile."""
    server.steps()
    used, meter, began = server.processor_seconds(), LoadMeter(), time.perf_counter()
    streams = asyncio.run(_read(server.url, seconds, name))
    load, steps, passed = meter.stop(), server.steps(), time.perf_counter() - began
    busy = load.own + (load.others or 0.0) * (os.cpu_count() or 1)
    processors = {"server": (server.processor_seconds() - used) / passed, "all": busy}
    return {"phase": name} | figures(streams, steps) | processors


def gaps_beside(streams: Sequence[Sequence[float]], sent: Sequence[Sent]) -> dict[str, Row]:
    """Return the gaps in streams by the kinds of requests open meanwhile, in milliseconds."""
    gaps, found = [pair for each in streams for pair in pairwise(each)], dict[str, Row]()
    for kind in dict.fromkeys(name for name, _, _ in sent):
        times = [(began, ended) for name, began, ended in sent if name == kind]
        own = [after - before for before, after in gaps if any(before < end and after > begin for begin, end in times)]
        figures = {"p50": percentile(own, 50), "p99": percentile(own, 99), "longest": max(own, default=None)}
        found[kind] = {name: None if value is None else round(1000 * value, 1) for name, value in figures.items()}
        found[kind] |= {"sent": len(times), "gaps": len(own)}
    return found


def figures(streams: Sequence[Reply], steps: Sequence[Any]) -> Row:
    """Return the times of streams, in seconds, and the parts of the slowest gaps."""
    statuses, chunks, first = Counter[str](), list[list[float]](), list[float]()
    for reply in streams:
        found = list(events(reply.reads))
        statuses[str(reply.status or reply.error)] += 1
        statuses["error event"] += sum("error" in event for _, event in found)
        if times := [at for at, event in found if event.get("choices") or "error" in event]:
            chunks.append(times)
            first.append(times[0] - reply.sent)
    gaps = [after - before for times in chunks for before, after in pairwise(times)]
    return {
        "streams": len(first), "statuses": dict(statuses), "p50_between_chunks": percentile(gaps, 50),
        "p99_between_chunks": percentile(gaps, 99), "chunks": len(gaps) + len(first),
        "longest_gap": max(gaps, default=None), "p50_first": percentile(first, 50), "p99_first": percentile(first, 99),
        "times": chunks, **slowest(chunks, steps),
    }  # fmt: skip


async def _read(url: str, seconds: float, namespace: str) -> list[Reply]:
    endpoint, found = ServerEndpoint(url, "bundled", key=QUIET_KEY), list[Reply]()
    until = time.perf_counter() + seconds
    async with connected(endpoint) as http:
        while time.perf_counter() < until:
            number = len(found) + 1
            begin = 97 * number % (len(TEXT) - 400)
            request = LoadRequest(namespace, TEXT[begin : begin + 300], STREAM_TOKENS, 1.0, number)
            found.append(await answer(http, endpoint, Reply(request), {"namespace": namespace}))
    return found


@contextmanager
def _computing() -> Iterator[None]:
    """Run a process that only computes, at the attacker's priority."""
    with subprocess.Popen([sys.executable, "-c", COMPUTING]) as process:
        try:
            yield
        finally:
            process.kill()


def _attack(url: str, options: AttackOptions, counts: Any) -> None:
    """Attack, in a separate process; say when it begins."""
    if hasattr(os, "nice"):
        os.nice(NICE)
    large = {name: (LARGE[name][0], LARGE[name][1]()) for name in options.kinds if name in LARGE}
    counts.put("begun")
    counts.put(asyncio.run(_flood(url, large, options)))


def _drawn(name: str, chance: random.Random) -> tuple[str, bytes]:
    body = {"model": "bundled", "max_tokens": 64, **ATTACKS[name](chance)}
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", json.dumps(body).encode()


async def _flood(
    url: str, large: Mapping[str, tuple[str, bytes]], options: AttackOptions
) -> tuple[dict[str, dict[str, int]], list[Sent]]:
    until, statuses = time.perf_counter() + options.seconds, {name: Counter[str]() for name in options.kinds}
    sent = list[Sent]()

    async def one(number: int) -> None:
        chance = random.Random(options.seed + number)
        async with connected(ServerEndpoint(url, "bundled", key=ATTACKING_KEY)) as client:
            while (left := until - time.perf_counter()) > 0:
                name = chance.choice(options.kinds)
                address, content = large.get(name) or _drawn(name, chance)
                told = {"content": content, "headers": {"content-type": "application/json"}}
                began = time.perf_counter()
                try:
                    reply = await client.post(address, timeout=max(1.0, min(left, chance.uniform(1, 8))), **told)
                    statuses[name][str(reply.status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[name][type(error).__name__] += 1
                    await asyncio.sleep(0.05)
                sent.append((name, began, time.perf_counter()))

    await asyncio.gather(*map(one, range(options.attackers)))
    return {name: dict(counted) for name, counted in statuses.items()}, sent
