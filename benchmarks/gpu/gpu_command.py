"""``python -m benchmarks gpu``: all that has to be measured on a GPU, in parts, within some minutes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from benchmarks.capacity.shapes import ModelShape
from benchmarks.gpu.goals import GOAL_COLUMNS, goals
from benchmarks.gpu.part_process import OTHER_COMMANDS, PartRecord, bench_of, command_rows, this_card
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import SourceOptions, list_option, names, numbers
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Delivery, Report, listing
from forerun.bench.machine import Row, plain_values
from forerun.cli.options import Out, OutputOptions, option
from forerun.cli.terminal import say

PART_SECONDS = {
    "kernels": 30, "exactness": 30, "cells": 45, "audit": 35, "decoding": 40, "transformers": 35, "vllm": 35,
    "passes": 25, "sparse": 20, "steps": 25, "overlap": 25, "triforce": 65, "triforce-measured": 35, "offload": 60,
    "tasks": 40, "tasks-bundled": 20, "server": 20, "server-bundled": 15,
}  # fmt: skip
"""The parts in their order, and how much of ten minutes each may take. A new machine compiles in the first part of each
kind: on one with an H200 kernels took 62 s, steps 32 and triforce 106. What one part leaves goes to the next ones, and
parts that are there already leave all of theirs."""
GPU_PARTS = tuple(PART_SECONDS)


class Table(NamedTuple):
    """A table of the report: its heading, its columns' headings by their names, and the parts that its rows are of."""

    heading: str
    columns: Mapping[str, str]
    parts: tuple[str, ...]


_SPEED_UPS = {"contestant": "drafter", "context": "tokens", "tokens_per_second": "tokens/s", "speed_up": "speed-up",
              "acceptance": "acceptance", "same_output": "same text"}  # fmt: skip
TABLES = (
    Table("Kernels against float64", {"kernel": "kernel", "dtype": "type", "relative_error": "error",
          "same_bits": "same bits in passes of all sizes"}, ("kernels",)),
    Table("Exactness", {"model": "model", "dtype": "type", "scorer": "scorer", "level": "level", "reason": "reason"},
          ("exactness",)),
    Table("Texts with drafts against texts without", {"heads": "heads", "drafter": "drafter", "sampled": "sampled",
          "rows": "rows", "exactness": "exactness", "accepted": "accepted drafts", "equal": "equal"}, ("cells",)),
    Table("Audit", {"model": "model", "drafter": "drafter", "check": "check", "texts": "texts",
          "different": "different"}, ("audit",)),
    Table("Plain decoding", {"model": "model", "context": "context", "who": "by", "milliseconds": "ms a token",
          "gigabytes": "GB read", "share_of_bandwidth": "share of the bandwidth"},
          ("decoding", "transformers", "vllm")),
    Table("Passes of several tokens", {"model": "model", "context": "context", "tokens": "tokens", "milliseconds": "ms",
          "ratio_to_one_token": "of one token's"}, ("passes",)),
    Table("Drafting over a retrieval cache", {"model": "model", "context": "context", "whole": "ms of a pass over all",
          "view": "ms of a pass over it", "choosing": "ms of choosing its chunks"}, ("sparse",)),
    Table("Steps", {"model": "model", "drafter": "drafter", "steps": "steps", "milliseconds": "ms a step",
          "passes": "of these in the pass", "transfers": "transfers a step",
          "synchronisations": "synchronisations a step", "blocking": "other waits a step",
          "recorded_late": "passes recorded late", "compiled_late": "kernels compiled late"}, ("steps",)),
    Table("Copies from the host beside computing", {"model": "model", "context": "context",
          "gigabytes": "GB copied a pass", "gigabytes_per_second": "GB/s", "copies": "ms of copies alone",
          "computing": "ms of computing alone", "both": "ms of both",
          "hidden": "of the shorter, hidden by the longer"}, ("overlap",)),
    Table("TriForce, acceptance 0.9 by random weights", _SPEED_UPS, ("triforce",)),
    Table("TriForce, acceptance 0.55 by random weights", _SPEED_UPS, ("triforce-measured",)),
    Table("Keys and values in the host's memory, acceptance 0.9 by random weights",
          _SPEED_UPS | {"bytes_per_token": "bytes brought in a token"}, ("offload",)),
    Table("Six tasks", {"part": "part", "task": "task", "contestant": "by", "tokens_per_second": "tokens/s",
          "speed_up": "speed-up", "same_as_plain": "same as plain"}, ("tasks", "tasks-bundled")),
    Table("Servers", {"part": "part", "load": "load", "contestant": "by", "tokens_per_second": "tokens/s",
          "of_plain": "of plain"}, ("server", "server-bundled")),
)  # fmt: skip
SHAPES_MEASURED = "llama-2-7b,llama-3-8b"
CONTEXTS_MEASURED, PASSES_MEASURED = "2048,32768,122000", "1,2,4,8,16,32,64"


@dataclass(frozen=True)
class GpuOptions(OutputOptions, SourceOptions):
    """Measure Forerun on this machine's GPU: exactness, bandwidth, passes, steps, long contexts, tasks, a server.

    Each part has a process and a file of its own. A part that is there already, of the same card and sizes, is kept. So
    the command can be called again to go on; then what is left has more of the time. Without a GPU the smallest sizes
    run in Triton's interpreter, and times mean nothing. Writes JSON, Markdown and plots after each part, and says what
    was skipped.
    --books, --maths and --code are for the tasks and servers, which leave out what they lack.
    """

    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(GPU_PARTS)}.")] = ",".join(GPU_PARTS)
    shapes: Annotated[str, list_option("--shapes", "Model", "Names of shapes, as for capacity.")] = SHAPES_MEASURED
    contexts: Annotated[str, list_option("--contexts", "Text", "Tokens in the cache.")] = CONTEXTS_MEASURED
    passes: Annotated[str, list_option("--passes", "Text", "Tokens of passes.")] = PASSES_MEASURED
    rounds: Annotated[int, option("--rounds", panel="Text", help="Of each; medians count.", min=1)] = 5
    minutes: Annotated[float, option("--minutes", panel="Text", help="For all parts together.", min=0.0)] = 10.0
    again: Annotated[bool, option("--again", panel="Output", help="Measure parts that are there, too.")] = False
    out: Out = Path("runs/gpu")

    def __post_init__(self) -> None:
        names("--parts", self.parts, GPU_PARTS)
        for name in self.shapes.split(","):
            ModelShape.parse(name.strip())
        numbers("--contexts", self.contexts, int, 2)
        numbers("--passes", self.passes, int, 1)

    @property
    def measured(self) -> Row:
        """What a part's process must know."""
        return {
            "shapes": [name.strip() for name in self.shapes.split(",")], "rounds": self.rounds,
            "contexts": numbers("--contexts", self.contexts, int, 2),
            "passes": numbers("--passes", self.passes, int, 1),
            "sources": [*(["--raw"] if self.raw else []), *(
                part for name in ("books", "maths", "code") if (path := getattr(self, name))
                for part in (f"--{name}", str(path))
            )],
        }  # fmt: skip

    def records(self) -> dict[str, PartRecord]:
        """What is there of each part."""
        sizes = bench_of(self.measured).sizes
        return {name: PartRecord.read(self.out, name, sizes) for name in GPU_PARTS}


def run(options: GpuOptions) -> None:
    """Measure part by part, and write JSON, Markdown and plots.

    Raises:
        ValueError: without Triton.
    """
    plots.check()
    if find_spec("triton") is None:
        raise ValueError("the kernels for GPUs need Triton, which is not installed: pip install triton")
    title = f"Forerun on {this_card()}" + ("" if torch.cuda.is_available() else "; its times mean nothing")
    say(title)
    report = Report(title, plain_values(options))
    delivery = Delivery(report, options.out, "gpu", options.json)
    wanted = names("--parts", options.parts, GPU_PARTS)
    kept = {name for name, record in options.records().items() if record.whole and not options.again}
    pending = [name for name in GPU_PARTS if name in wanted and name not in kept]
    began, spent, total = time.monotonic(), 0, sum(PART_SECONDS[name] for name in pending)
    for name in pending:
        spent += PART_SECONDS[name]
        _measure(name, options, 60 * options.minutes * spent / total - (time.monotonic() - began))
        _fill(report, options)
        delivery.save()
    _fill(report, options)
    delivery.end()


def _measure(name: str, options: GpuOptions, seconds: float) -> None:
    """Measure a part in its own process; if it is not done in time, what it has is kept, and it is ended."""
    out, record = options.out, options.records()[name]
    if seconds <= 0:
        record.skipped[name] = "no time was left; call the command again"
        record.write(out, name)
        return
    if options.again or not (record.rows or record.skipped):
        shutil.rmtree(out / name, ignore_errors=True)  # a report of another card, or of other sizes
    say(f"measuring {name}, for at most {seconds:.0f} s")
    status = run_child(name, out, options.measured, seconds)
    if status == 0:
        return
    record = options.records()[name]
    if name in OTHER_COMMANDS:
        record.rows = command_rows(name, out)
    how = f"ended with status {status}" if status else f"stopped after its {seconds:.0f} s; call the command again"
    record.skipped[name] = f"{how}, see {_log(out, name)}"
    record.write(out, name)


def run_child(name: str, out: Path, measured: Row, seconds: float) -> int | None:
    """The exit status of a part's process; None if it was ended, with all that it had begun, after this time."""
    log = _log(out, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.part_process", name, str(out), json.dumps(measured)],
            env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _log(out: Path, name: str) -> Path:
    return out / "logs" / f"{name}.log"


def _fill(report: Report, options: GpuOptions) -> None:
    """Put all that is measured into the report."""
    records = options.records()
    report.text.clear()
    for table in TABLES:
        rows = [{"part": name} | row for name in table.parts for row in records[name].rows]
        if rows:
            report.add(table.parts[0], table.heading, rows, listing(rows, table.columns))
            _plot(report, table.parts[0], rows)
    reached = goals({name: record.rows for name, record in records.items()})
    if torch.cuda.is_available() and reached:
        report.add("goals", "Goals", reached, listing(reached, GOAL_COLUMNS))
    skipped: list[Row] = [
        {"what": what, "why": why} for record in records.values() for what, why in record.skipped.items()
    ]
    report.add(
        "skipped", "Skipped", skipped, listing(skipped, {"what": "what", "why": "why"}) if skipped else "Nothing.\n"
    )


def _plot(report: Report, name: str, rows: Sequence[Row]) -> None:
    if name == "decoding":
        frame = Frame("Plain decoding", "tokens in the cache", "share of the bandwidth", log=True)
        lines = _lines(rows, ("model", "who"), "context", "share_of_bandwidth")
        report.lines(name, frame, lines)
    if name == "passes":
        relative = Frame("Passes", "tokens", "times one token's", log=True)
        curves = _lines(rows, ("model", "context"), "tokens", "ratio_to_one_token")
        report.lines(name, relative, curves)


def _lines(rows: Sequence[Row], by: tuple[str, ...], x: str, y: str) -> list[Line]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[each] for each in by), []).append(row)
    return [
        Line(", ".join(map(str, key)), [row[x] for row in own], [row[y] for row in own]) for key, own in groups.items()
    ]
