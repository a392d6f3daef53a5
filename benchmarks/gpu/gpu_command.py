"""``python -m benchmarks gpu``: all that has to be measured on a GPU, in seven parts, within 345 seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from benchmarks.gpu.part_process import rows_file
from benchmarks.reporting.common_options import ListOptions, json_lines, list_option, names_of
from forerun.bench.machine import Row
from forerun.cli.options import DebugOptions, Out, option
from forerun.cli.terminal import say

PART_SECONDS = {
    "machine": 15, "bits": 40, "kernels": 60, "choices": 40, "auto": 40, "triforce": 90, "offload": 60,
}  # fmt: skip
"""The parts in their order, and after how long each is ended. A new machine compiles the kernels in ``bits``."""
DRY_RUN_SECONDS = 600  # the limit of each part in Triton's interpreter


@dataclass(frozen=True)
class GpuOptions(ListOptions, DebugOptions):
    """Measure Forerun on this machine's GPU, in seven parts and at most 345 seconds; nothing is downloaded.

    Each part is a process, killed at its limit; rows measured until then count. As a part ends, a line of JSON with its
    rows and goals goes to stdout and to gpu.jsonl in --out.
    """

    parts: Annotated[str, list_option("Output", f"Of {', '.join(PART_SECONDS)}.")] = ",".join(PART_SECONDS)
    dry_run: Annotated[bool, option("--dry-run", panel="Output", help="On the CPU, tiny; no times.")] = False
    out: Out = Path("runs/gpu")

    names = names_of("parts", PART_SECONDS)


def run(options: GpuOptions) -> None:
    """Measure part by part; raise ValueError without Triton, or without a GPU unless this is a dry run."""
    if find_spec("triton") is None:
        raise ValueError("the kernels for GPUs need Triton, which is not installed: pip install triton")
    if not options.dry_run and not torch.cuda.is_available():
        raise ValueError("there is no GPU; --dry-run runs the code of each part on the CPU")
    card = "Triton's interpreter; times mean nothing" if options.dry_run else torch.cuda.get_device_name()
    say(f"Forerun on {card}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with (options.out / "gpu.jsonl").open("w", encoding="utf-8") as lines:
        for name in (each for each in PART_SECONDS if each in options.names):
            found = {"card": card} | part(name, options)
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            typer.echo(json.dumps(found))
            failed += [name] if found["ended"] != "whole" else []
    if failed:
        say(f"not whole: {', '.join(failed)}; see the logs in {options.out}")


def part(name: str, options: GpuOptions) -> Row:
    """Run a part's process to its end or its limit; return its rows and goals."""
    limit = DRY_RUN_SECONDS if options.dry_run else PART_SECONDS[name]
    began = time.monotonic()
    status = _run_child(name, options, limit)
    seconds = round(time.monotonic() - began, 1)
    path = rows_file(options.out, name)
    rows = [row for _, row in json_lines(path)] if path.exists() else []
    ended = "whole" if status == 0 else "stopped" if status is None else f"status {status}"
    goals = reached(name, (row for row in rows if "error" not in row))
    return {"part": name, "seconds": seconds, "limit": limit, "ended": ended, "goals": goals, "rows": rows}


def _run_child(name: str, options: GpuOptions, limit: float) -> int | None:
    """Return the exit status of a part's process; None if it and its children were killed at the limit."""
    rows_file(options.out, name).unlink(missing_ok=True)
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if options.dry_run:
        environment["TRITON_INTERPRET"] = "1"
    how = "dry-run" if options.dry_run else "card"
    with (options.out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.part_process", name, str(options.out), how],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


class Goal(NamedTuple):
    """A goal of one part: a bound from above (``most``) or below on a row's ``value``, if it has one. The ``worst`` or
    the best row counts."""

    part: str
    what: str
    wanted: float
    most: bool
    worst: bool
    value: Callable[[Row], float | None]


def _share(context: int) -> Callable[[Row], float | None]:
    return lambda row: row.get("share_of_bandwidth") if row["context"] == context else None


def _speed_up(rate: float | None = None) -> Callable[[Row], float | None]:
    return lambda row: row.get("speed_up") if row["contestant"] != "none" and row.get("rate") == rate else None


GOALS = (
    Goal("bits", "differences", 0, True, True,
         lambda row: None if "same_bits" not in row else float(not row["same_bits"])),
    Goal("kernels", "share of the bandwidth at 2,048 tokens", 0.75, False, True, _share(2048)),
    Goal("kernels", "share of the bandwidth at 122,000 tokens", 0.85, False, True, _share(122_000)),
    Goal("auto", "speed of auto by none's", 0.97, False, True,
         lambda row: row["of_none"] if row["drafter"] == "auto" else None),
    Goal("auto", "milliseconds a token of none", 1.2, True, True,
         lambda row: row["milliseconds"] if row["drafter"] == "none" else None),
    Goal("auto", "recordings after load", 0, True, True, lambda row: row["recorded_late"]),
    Goal("triforce", "speed-up at an acceptance of 0.9", 2.31, False, False, _speed_up(0.9)),
    Goal("offload", "speed-up at an acceptance of 0.9", 7.78, False, False, _speed_up()),
)  # fmt: skip


def reached(part: str, rows: Iterable[Row]) -> list[Row]:
    """Return the goals of a part that have figures."""
    rows = list(rows)
    found = []
    for goal in (each for each in GOALS if each.part == part):
        values = [value for row in rows if (value := goal.value(row)) is not None]
        if values:
            figure = max(values) if goal.most == goal.worst else min(values)
            met = figure <= goal.wanted if goal.most else figure >= goal.wanted
            bound = "at most" if goal.most else "at least"
            found.append({"goal": goal.what, "wanted": f"{bound} {goal.wanted:g}", "reached": figure, "met": met})
    return found
