"""Two tenants of one server, of whom one attacks: what the other one notices, and where its time goes.

    python -m benchmarks server attack --seconds 300 --out runs/attack

The other tenant reads one stream after the other: alone, beside a process that only computes, and beside the attacks,
which come from a process of their own: floods of texts (n = 15 and 128), long texts that a schema spells out,
characters that never end, schemas that are hard to compile, log-probabilities without measure, a namespace for each
request, and bodies of the largest size: one long text, or hundreds of thousands of ids, fields, messages or tools. The
slowest hundredth of the times between chunks is split by the times of the server's steps (``step_times.py``), and the
gaps are listed by the kinds of bodies that were open meanwhile: with ``--attackers 1``, by one body alone. Writes JSON
and Markdown. The last line printed is the result. Exit status 1 if the other tenant was refused once, or its 99th
percentile of the time between chunks more than doubled.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server.figures import percentile
from benchmarks.server.request_mixture import TEXT
from benchmarks.server.server_process import ServerProcess, connect
from benchmarks.server.step_times import PARTS, slowest
from forerun.cli.options import DebugOptions

Json = dict[str, Any]
QUIET_KEY, ATTACKING_KEY = "key-of-the-quiet", "key-of-the-attacker"
OPTIONS = ("--api-key", QUIET_KEY, "--api-key", ATTACKING_KEY, "--kv-memory", "1GiB")
MAX_RATIO = 2.0
STREAM_TOKENS = 96
NICE = 19
"""Lowest priority: a real attacker does not use this computer's processors."""

COMPUTING = f"""
import os
os.nice({NICE})
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""
"""A process that only computes, until its parent has ended."""


def _schema(schema: Json, **more: Any) -> Json:
    return {
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    } | more


def _slow(patterns: int) -> Json:
    return _schema({"allOf": [{"pattern": f"[a-z]{{{i}}}.*x"} for i in range(patterns)]})


def _repeated(field: str, entry: str, size: int = (8 << 20) - 300) -> bytes:
    """A body of the largest size, whose field has one entry again and again."""
    return f'{{"model":"bundled","max_tokens":4,"{field}":[{",".join([entry] * (size // (len(entry) + 1)))}]}}'.encode()


def _unknown_fields() -> bytes:
    return ('{"model":"bundled","prompt":"x"' + "".join(f',"x{i}":1' for i in range(700_000)) + "}").encode()


def _turn(content: str) -> str:
    return json.dumps({"role": "user", "content": content})


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
    "turns": ("/v1/chat/completions", lambda: _repeated("messages", _turn("a" * 2000))),
}  # fmt: skip
"""Addresses and bodies that are costly to read, by the kind of the attack."""
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
"""Bodies by the kind of the attack."""


@dataclass(frozen=True, kw_only=True)
class AttackOptions(DebugOptions):
    """Two tenants, of whom one attacks: is the other one served as before?"""

    seconds: Annotated[float, typer.Option(help="Of the attacks; two thirds of it before them.")] = 300.0
    attacks: Annotated[str, typer.Option(help="Which, with commas between; all by default.")] = ",".join(
        (*ATTACKS, *LARGE)
    )
    attackers: Annotated[int, typer.Option(help="Requests of the attacker at once.")] = 12
    seed: Annotated[int, typer.Option(help="Of the attacks.")] = 0
    out: Annotated[Path, typer.Option(help="The results without their suffixes.")] = Path("runs/attack")


def run(options: AttackOptions) -> None:
    """Attack; exit status 1 if the other tenant notices."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = [name.strip() for name in options.attacks.split(",")]
    with ServerProcess(OPTIONS, options.out.with_suffix(".log")) as served:
        asyncio.run(_read(served.port, min(10.0, options.seconds / 10), "warm"))
        phases = {"alone": _phase(served, options.seconds / 3, "alone")}
        with _computing():
            phases["floor"] = _phase(served, options.seconds / 3, "floor")
        context = multiprocessing.get_context("spawn")
        counts = context.Queue()
        attacker = context.Process(target=_attack, args=(served.port, names, options, counts))
        attacker.start()
        phases["beside"] = _phase(served, options.seconds, "beside")
        attacked, sent = counts.get(timeout=options.seconds + 120)
        attacker.join()
    result = summary(phases, attacked) | {"kinds": gaps_beside(phases["beside"]["chunks"], sent)}
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    options.out.with_suffix(".md").write_text(markdown(result))
    print(json.dumps(result))
    if result["faults"]:
        raise typer.Exit(1)


def summary(phases: Mapping[str, Json], attacked: dict[str, dict[str, int]]) -> Json:
    """The figures of all phases, and what is wrong with them."""
    found = {name: _figures(phase) for name, phase in phases.items()}
    before, *ratios = (found[name]["p99_between_chunks"] for name in ("alone", "floor", "beside"))
    floor, ratio = (None if not before or after is None else after / before for after in ratios)
    refused = {status: count for status, count in phases["beside"]["statuses"].items() if status != "200" and count}
    faults = [f"{count} answers with {status}" for status, count in refused.items()]
    if ratio is None:
        faults.append("no stream was read to its end in one of the phases")
    elif ratio > MAX_RATIO:
        faults.append(f"the 99th percentile between chunks is {ratio:.2f} times that without attacks")
    return {"ratio_p99": ratio, "floor_p99": floor, "faults": faults, **found, "attacks": attacked}


def gaps_beside(streams: list[list[float]], sent: list[tuple[str, float, float]]) -> Json:
    """The gaps in streams by the kinds of requests that were open meanwhile; ``sent``: kinds, beginnings, ends."""
    gaps, found = [pair for each in streams for pair in pairwise(each)], Json()
    for kind in dict.fromkeys(name for name, _, _ in sent):
        times = [(began, ended) for name, began, ended in sent if name == kind]
        own = [after - before for before, after in gaps if any(before < end and after > begin for begin, end in times)]
        found[kind] = {f"p{part}": percentile(own, part) for part in (50, 99)}
        found[kind] |= {"sent": len(times), "gaps": len(own), "longest": max(own, default=None)}
    return found


def markdown(result: Json) -> str:
    """The figures as tables."""
    names = ("p50_between_chunks", "p99_between_chunks", "longest_gap", "p50_first", "p99_first")
    heads = ("p50 between chunks", "p99", "longest", "p50 to the first", "p99")
    shares = ("of the slowest 1 %: mean", *PARTS, "waits", "preemptions", "processors of the server", "of all")
    columns = ("", "streams", "chunks", *heads, *shares, "answers")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in ("alone", "floor", "beside"):
        row = result[name]
        shown = [_milliseconds(row[each]) for each in names]
        shown += [_milliseconds(row["slowest"].get(each)) for each in ("seconds", *PARTS)]
        shown += [f"{row['slowest'].get(each, 0):.1f}" for each in ("waits", "preemptions")]
        shown += [f"{row['processors'][each]:.2f}" for each in ("server", "all")]
        lines.append(f"| {name} | {row['streams']} | {row['chunks']} | {' | '.join(shown)} | {row['statuses']} |")
    ratio, floor = ("–" if result[name] is None else f"{result[name]:.2f}" for name in ("ratio_p99", "floor_p99"))
    lines += ["", f"p99 beside the attacks / alone: {ratio}; beside a process that computes / alone: {floor}."]
    lines += [f"Faults: {'; '.join(result['faults']) or 'none'}.", ""]
    lines += ["| attack | answers | gaps beside it | p50 | p99 | longest |", "|---" * 6 + "|"]
    for name, counts in result["attacks"].items():
        kind = result["kinds"].get(name, {})
        shown = " | ".join(_milliseconds(kind.get(each)) for each in ("p50", "p99", "longest"))
        lines.append(f"| {name} | {counts} | {kind.get('gaps', 0)} | {shown} |")
    return "\n".join(lines) + "\n"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"


def _figures(phase: Json) -> Json:
    gaps, first = [after - before for each in phase["chunks"] for before, after in pairwise(each)], phase["first"]
    return {
        "streams": len(first),
        "statuses": phase["statuses"],
        "p50_between_chunks": percentile(gaps, 50),
        "p99_between_chunks": percentile(gaps, 99),
        "chunks": len(gaps) + len(first),
        "longest_gap": max(gaps, default=None),
        "p50_first": percentile(first, 50),
        "p99_first": percentile(first, 99),
        "slowest": slowest(phase["chunks"], phase["steps"]),
        "processors": phase["processors"],
    }


def _phase(served: ServerProcess, seconds: float, name: str) -> Json:
    """Read streams, and note the server's steps and the processors in use meanwhile."""
    served.steps()
    used, all_used, began = served.processor_seconds(), _busy_seconds(), time.perf_counter()
    read = asyncio.run(_read(served.port, seconds, name))
    steps, passed = served.steps(), time.perf_counter() - began
    processors = {"server": served.processor_seconds() - used, "all": _busy_seconds() - all_used}
    return {**read, "steps": steps, "processors": {each: value / passed for each, value in processors.items()}}


def _busy_seconds() -> float:
    """Processor time that all processes of this computer have used."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _computing() -> Iterator[None]:
    """Run a process that only computes, at the attacker's priority, meanwhile."""
    with subprocess.Popen([sys.executable, "-c", COMPUTING]) as process:
        try:
            yield
        finally:
            process.kill()


async def _read(port: int, seconds: float, namespace: str) -> Json:
    """Read streams one after the other: the times of their chunks, and the seconds to their first ones."""
    chunks, first, statuses = list[list[float]](), list[float](), Counter[str]()
    until, number = time.perf_counter() + seconds, 0
    async with connect(port, QUIET_KEY) as client:
        while time.perf_counter() < until:
            number += 1
            begin = 97 * number % (len(TEXT) - 400)
            body = {
                "model": "bundled",
                "prompt": TEXT[begin : begin + 300],
                "max_tokens": STREAM_TOKENS,
                "stream": True,
            }
            body |= {"seed": number, "forerun": {"namespace": namespace}}
            sent, times = time.perf_counter(), list[float]()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                statuses[str(answer.status_code)] += 1
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
                        statuses["error event"] += "error" in json.loads(line.removeprefix("data: "))
            if times:
                first.append(times[0] - sent)
                chunks.append(times)
    return {"chunks": chunks, "first": first, "statuses": dict(statuses)}


def _attack(port: int, names: list[str], options: AttackOptions, counts: Any) -> None:
    """Attack, in a process of its own."""
    if hasattr(os, "nice"):
        os.nice(NICE)
    large = {name: (LARGE[name][0], LARGE[name][1]()) for name in names if name in LARGE}
    counts.put(asyncio.run(_flood(port, names, large, options)))


def _drawn(name: str, chance: random.Random) -> tuple[str, bytes]:
    body = {"model": "bundled", "max_tokens": 64, **ATTACKS[name](chance)}
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", json.dumps(body).encode()


async def _flood(
    port: int, names: list[str], large: dict[str, tuple[str, bytes]], options: AttackOptions
) -> tuple[dict[str, dict[str, int]], list[tuple[str, float, float]]]:
    until, statuses = time.perf_counter() + options.seconds, {name: Counter[str]() for name in names}
    sent: list[tuple[str, float, float]] = []

    async def one(number: int) -> None:
        chance = random.Random(options.seed + number)
        async with connect(port, ATTACKING_KEY) as client:
            while (left := until - time.perf_counter()) > 0:
                name = chance.choice(names)
                address, content = large.get(name) or _drawn(name, chance)
                told = {"content": content, "headers": {"content-type": "application/json"}}
                began = time.perf_counter()
                try:
                    answer = await client.post(address, timeout=max(1.0, min(left, chance.uniform(1, 8))), **told)
                    statuses[name][str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[name][type(error).__name__] += 1
                    await asyncio.sleep(0.05)
                sent.append((name, began, time.perf_counter()))

    await asyncio.gather(*map(one, range(options.attackers)))
    return {name: dict(counted) for name, counted in statuses.items()}, sent
