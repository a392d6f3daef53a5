"""``python -m benchmarks gpu``: all that has to be measured on a GPU, in parts, within some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import list_option, names, numbers
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.tables import Report, listing
from forerun.bench.machine import plain_values
from forerun.cli.options import Out, OutputOptions, option
from forerun.cli.terminal import say

if TYPE_CHECKING:
    from benchmarks.gpu.parts import GpuBench
    from benchmarks.long_context.rows import Row

REAL = Path("runs/real/SmolLM2-135M-Instruct")
"""Where ``make real`` puts a chat model."""


class OwnPart(NamedTuple):
    """A part that is measured in this process: its heading, and its columns' headings by their names."""

    heading: str
    columns: Mapping[str, str]


OWN = {
    "kernels": OwnPart("Kernels against float64", {"kernel": "kernel", "dtype": "type", "relative_error": "error",
                       "same_bits": "same bits in passes of all sizes"}),
    "exactness": OwnPart("Exactness", {"model": "model", "dtype": "type", "scorer": "scorer", "level": "level",
                         "reason": "reason"}),
    "cells": OwnPart("Texts with drafts against texts without", {"heads": "heads", "drafter": "drafter",
                     "sampled": "sampled", "rows": "rows", "exactness": "exactness", "accepted": "accepted drafts",
                     "equal": "equal"}),
    "decoding": OwnPart("Plain decoding", {"model": "model", "context": "context", "who": "by",
                        "milliseconds": "ms a token", "gigabytes": "GB read",
                        "share_of_bandwidth": "share of the bandwidth"}),
    "passes": OwnPart("Passes of several tokens", {"model": "model", "context": "context", "tokens": "tokens",
                      "milliseconds": "ms", "ratio_to_one_token": "of one token's"}),
    "steps": OwnPart("Steps", {"model": "model", "drafter": "drafter", "steps": "steps", "milliseconds": "ms a step",
                     "passes": "of these in the pass", "transfers": "transfers a step",
                     "synchronisations": "synchronisations a step", "recorded_again": "passes recorded late"}),
    "audit": OwnPart("Audit of the bundled model", {"drafter": "drafter", "check": "check", "texts": "texts",
                     "different": "different"}),
}  # fmt: skip
LONG_DECODING = ("papers", "triforce", "--contexts", "122000", "--parts", "temperatures", "--temperatures", "0",
                 "--drafters", "triforce,retrieval", "--sparse", "retrieval", "--dtype", "bfloat16", "--rounds", "2",
                 "-n", "96", "--device", "cuda")  # fmt: skip
OTHER_COMMANDS: dict[str, tuple[str, ...]] = {
    "triforce": (*LONG_DECODING, "--simulate-acceptance", "0.9"),
    "triforce-measured": (*LONG_DECODING, "--simulate-acceptance", "0.55"),
    "offload": ("offload", "--contexts", "16000", "--drafters", "retrieval,triforce-trie", "--rounds", "2", "-n", "64",
                "--dtype", "bfloat16", "--device", "cuda"),
    "tasks": ("tasks", "--dtype", "bfloat16", "--prompts", "4", "--rounds", "2", "-n", "64", "-d", "none", "-d", "auto",
              "--warm-prompts", "0", "--device", "cuda", "--resume"),
    "server": ("server", "load", "--dtype", "bfloat16", "--contestants", "none,auto", "--concurrency", "1,16,64",
               "--rates", "0", "--requests", "64", "--rounds", "1", "--device", "cuda", "--resume"),
}  # fmt: skip
"""Parts that are commands of their own, with reports of their own beside this one. Each has a process: an error of a
GPU ends the process that made it."""
GPU_PARTS = (*OWN, *OTHER_COMMANDS)
GPU_SHAPES = "llama-2-7b,llama-3-8b"
GPU_CONTEXTS, GPU_PASSES = "2048,32768,122000", "1,2,4,8,16,32,64"
SMALLEST = ModelShape(1, 32, 48, 2, 1, 61)
"""A model for Triton's interpreter."""
PARTS_OF_A_GPU = ("audit", *OTHER_COMMANDS)


@dataclass(frozen=True)
class GpuOptions(OutputOptions):
    """Measure Forerun on this machine's GPU: exactness, bandwidth, passes, steps, long contexts, tasks, a server.

    A part that is in the report already is kept, so the command can be called again to go on; what does not fit the
    time is left for then. Without a GPU the smallest sizes run in Triton's interpreter, and times mean nothing. Writes
    JSON, Markdown and plots after each part, and says what was skipped.
    """

    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(GPU_PARTS)}.")] = ",".join(GPU_PARTS)
    shapes: Annotated[str, list_option("--shapes", "Model", "Names of shapes, as for capacity.")] = GPU_SHAPES
    contexts: Annotated[str, list_option("--contexts", "Text", "Tokens in the cache.")] = GPU_CONTEXTS
    passes: Annotated[str, list_option("--passes", "Text", "Tokens of passes.")] = GPU_PASSES
    rounds: Annotated[int, option("--rounds", panel="Text", help="Of each; medians count.", min=1)] = 5
    minutes: Annotated[float, option("--minutes", panel="Text", help="No part begins after this.", min=0.0)] = 10.0
    again: Annotated[bool, option("--again", panel="Output", help="Measure parts that the report has, too.")] = False
    out: Out = Path("runs/gpu")

    def __post_init__(self) -> None:
        names("--parts", self.parts, GPU_PARTS)
        for name in self.shapes.split(","):
            ModelShape.parse(name.strip())
        numbers("--contexts", self.contexts, int, 2)
        numbers("--passes", self.passes, int, 1)


def run(options: GpuOptions) -> None:
    """Measure part by part, and write JSON, Markdown and plots."""
    plots.check()
    cuda = torch.cuda.is_available()
    if not cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":  # torch has imported Triton already, which then compiles
            command = [sys.executable, *sys.orig_argv[1:]]
            raise typer.Exit(
                subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode
            )
        say("no GPU: the smallest sizes in Triton's interpreter; its times mean nothing")
    from benchmarks.gpu.interpreter import gpu_code

    bench = _bench(options, cuda)
    report = Report("Forerun on a GPU", plain_values(options))
    delivery = Delivery(report, options.out, "gpu", options.json)
    wanted = names("--parts", options.parts, GPU_PARTS)
    before = _measured(options, wanted)
    began = time.monotonic()
    with gpu_code(bench.device):
        for name in (each for each in GPU_PARTS if each in wanted or each in before):
            left = 60 * options.minutes - (time.monotonic() - began)
            rows = before.get(name) or _part(name, bench, options.out, left)
            if rows:
                _add(report, name, rows)
            delivery.part()
    report.add("skipped", "Skipped", *_skipped(bench))
    delivery.end()


def _bench(options: GpuOptions, cuda: bool) -> GpuBench:
    from benchmarks.gpu.parts import GpuBench

    if not cuda:
        return GpuBench(torch.device("cpu"), torch.float32, {"smallest": SMALLEST}, [40], [1, 2, 4], 1, [], 1 << 20)
    shapes = {name.strip(): ModelShape.parse(name.strip()) for name in options.shapes.split(",")}
    models = ["bundled", *([str(REAL)] if REAL.exists() else [])]
    return GpuBench(
        torch.device("cuda"), torch.bfloat16, shapes, sorted(numbers("--contexts", options.contexts, int, 2)),
        sorted(numbers("--passes", options.passes, int, 1)), options.rounds, models, 1 << 31,
    )  # fmt: skip


def _measured(options: GpuOptions, wanted: Sequence[str]) -> dict[str, list[Row]]:
    """The parts that the report has already, but for those to be measured again."""
    path = options.out / "gpu.json"
    if not path.exists():
        return {}
    parts: dict[str, list[Row]] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return {name: rows for name, rows in parts.items() if name in GPU_PARTS and not (options.again and name in wanted)}


def _part(name: str, bench: GpuBench, out: Path, seconds: float) -> list[Row]:
    """A part's rows; none if it is skipped."""
    from benchmarks.gpu import parts

    if seconds <= 0:
        bench.skipped[name] = "no time was left; call the command again"
        return []
    if name in PARTS_OF_A_GPU and bench.device.type != "cuda":
        bench.skipped[name] = "needs a GPU"
        return []
    say(f"measuring {name}")
    if name in OTHER_COMMANDS:
        return _command(name, bench, out, seconds)
    work: Callable[[GpuBench], list[Row]] = getattr(parts, name)
    try:
        return work(bench)
    except Exception as error:  # the other parts are worth as much
        bench.skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return []


def _command(name: str, bench: GpuBench, out: Path, seconds: float) -> list[Row]:
    """Run another command; its report is beside this one."""
    arguments = [*OTHER_COMMANDS[name], "--out", str(out / name)]
    if name in ("tasks", "server") and str(REAL) in bench.models:
        arguments += ["--model", str(REAL)]
    try:
        done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        bench.skipped[name] = f"it took longer than the {seconds:.0f} s that were left; call the command again"
        return []
    if done.returncode:
        bench.skipped[name] = f"`python -m benchmarks {' '.join(arguments)}` failed"
        return []
    return [{"report": str(out / name)}]


def _skipped(bench: GpuBench) -> tuple[list[Row], str]:
    for what, why in bench.skipped.items():
        say(f"skipped {what}: {why}")
    rows: list[Row] = [{"what": what, "why": why} for what, why in bench.skipped.items()]
    return rows, listing(rows, {"what": "what", "why": "why"}) if rows else "Nothing.\n"


def _add(report: Report, name: str, rows: Sequence[Row]) -> None:
    if name in OTHER_COMMANDS:
        report.add(name, name.capitalize(), rows, f"See `{rows[0]['report']}`.\n")
        return
    report.add(name, OWN[name].heading, rows, listing(rows, OWN[name].columns))
    if name == "decoding":
        frame = Frame("Plain decoding", "tokens in the cache", "share of the bandwidth", log=True, zero=True)
        report.plot(
            name, lambda path: plots.lines(path, frame, _lines(rows, ("model", "who"), "context", "share_of_bandwidth"))
        )
    if name == "passes":
        frame = Frame("Passes", "tokens", "times one token's", log=True, zero=True)
        report.plot(
            name,
            lambda path: plots.lines(path, frame, _lines(rows, ("model", "context"), "tokens", "ratio_to_one_token")),
        )


def _lines(rows: Sequence[Row], by: tuple[str, ...], x: str, y: str) -> list[Line]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[each] for each in by), []).append(row)
    return [
        Line(", ".join(map(str, key)), [row[x] for row in own], [row[y] for row in own]) for key, own in groups.items()
    ]
