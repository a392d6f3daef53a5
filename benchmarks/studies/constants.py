"""How much each hand-set constant matters: what comes out where it is halved and doubled.

    python -m benchmarks constants decisions
    python -m benchmarks constants prompts

Nothing here depends on a machine: a clock is moved by what each part of a step takes.
``decisions`` are those of ``python -m benchmarks decisions``. ``prompts``: a long prompt is read while others decode.
Every setting runs in a process of its own, over a copy of the package in which one number is another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

import forerun
from benchmarks.studies.decisions_command import cases, speeds
from forerun.cli.options import DebugOptions
from forerun.engine.prefill_pacing import PrefillPacing

CONSTANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "decisions": {
        "policy/ledger.py": ("START_SLACK", "TRIAL_SLACK", "SHARE", "SAVED", "CREDIT"),
        "policy/gains.py": ("PRIOR_TREES", "RECENT_TREES", "TREE_SPREAD"),
        "policy/calibration.py": ("FIRST_GUESS", "STATEMENT_WEIGHT", "MEMORY"),
        "policy/choice.py": ("FIRST_ASKING", "FURTHER_ROW", "DOUBT", "CHEAP", "RECENT", "REST_STEPS"),
        "policy/time_model.py": (
            *("STEP_NOISE", "DRAFTING_NOISE", "SPEED_DRIFT", "LOADED_DOUBT", "START_DOUBT", "EACH_DOUBT"),
            *("GUESS_DOUBT", "DRAFT_MEMORY", "LEAST_START", "MOST_EACH", "CREDIBLE"),
        ),
    },
    "prompts": {
        "engine/prefill_pacing.py": ("STEPS_BESIDE", "MIN_CHUNK_TOKENS", "RECENT_STEPS", "MAX_CHANGE", "LEAST_USED")
    },
}
BELOW_ONE = ("FIRST_GUESS", "MEMORY")
"""Of these the distance from 1 is halved and doubled."""
CHECKOUT = Path(__file__).parents[2]
SEEDS = 3
"""Worlds of each case."""


def decisions() -> dict[str, float]:
    """Speed over plain decoding of each case, the median of ``SEEDS`` worlds."""
    return {case.name: float(np.median(speeds(case, case.outline.sources, SEEDS)[0])) for case in cases()}


def prompts() -> dict[str, float]:
    """While a prompt is read beside others whose steps take 7 ms: their steps a second, without the slowest 1 %, and
    tokens of the prompt a second. Passes take what they took with the bundled model behind 15,000 to 60,000 tokens."""
    found: dict[str, float] = {}
    for length in (4_000, 60_000):
        steps, seconds = _read(length)
        slow = sorted(steps)[int(0.99 * (len(steps) - 1))]
        found |= {f"{length:,}: steps/s, 99 %": 1 / slow, f"{length:,}: prompt tokens/s": length / seconds}
    return found


def _read(length: int, chunk: int = 256) -> tuple[list[float], float]:
    """Seconds of each step, and of all."""

    pace, amount, read, steps = PrefillPacing(), chunk, 0, []
    while read < length:
        tokens = min(amount, length - read) if pace.works(True) else 0
        seconds = 7e-3 + (max(3.4e-7, 2.7e-8 * tokens) * read + 5e-5 * tokens if tokens else 0.0)
        pace.learn(seconds, tokens > 0)
        if tokens:
            amount = pace.adjusted(amount, seconds - pace.decoding, chunk, tokens / amount)
        read += tokens
        steps.append(seconds)
    return steps, sum(steps)


STUDIES: dict[str, Callable[[], dict[str, float]]] = {"decisions": decisions, "prompts": prompts}


def changed(name: str, text: str, factor: float) -> str:
    """A constant's other value, as it is written; whole numbers stay whole."""
    value = float(text)
    other = 1 - (1 - value) * factor if name in BELOW_ONE else value * factor
    return str(other) if "." in text else str(max(1, round(other)))


def measured(
    study: str, source: Path, file: str = "", name: str = "", factor: float = 1.0
) -> tuple[str, dict[str, float]]:
    """The constant's value, and what comes out with it in a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "forerun")
        value = ""
        if name:
            path = Path(folder) / "forerun" / file
            text = path.read_text(encoding="utf-8")
            value = _set(path, text, name, factor)
        env = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(CHECKOUT)))}
        command = [sys.executable, "-m", "benchmarks", "constants", study, "--once"]
        out = subprocess.run(command, env=env, capture_output=True, text=True)
        if out.returncode:
            raise RuntimeError(f"with {name} = {value}:\n{out.stderr}")
        return value, json.loads(out.stdout.splitlines()[-1])


def _set(path: Path, text: str, name: str, factor: float) -> str:
    """Write a changed constant; names and values of a line may be several."""
    for line in text.splitlines():
        names, _, values = line.partition(" = ")
        if name in (listed := names.split(", ")) and re.fullmatch(r"[-\d., ]+", values):
            parts = values.split(", ")
            at = listed.index(name)
            parts[at] = changed(name, parts[at], factor)
            path.write_text(text.replace(line, f"{names} = {', '.join(parts)}"), encoding="utf-8")
            return parts[at]
    raise ValueError(f"{path.name} has no number named {name}")


@dataclass(frozen=True, kw_only=True)
class ConstantsOptions(DebugOptions):
    """How much each hand-set constant matters: what comes out where it is halved and doubled."""

    study: Annotated[Literal["decisions", "prompts"], typer.Argument(help="What is simulated.")]
    out: Annotated[Path | None, typer.Option(help="File for the table; it is printed in any case.")] = None
    once: Annotated[bool, typer.Option(help="With the package as it is, as JSON.")] = False


def run(options: ConstantsOptions) -> None:
    """Write the table."""
    if options.once:
        print(json.dumps(STUDIES[options.study]()))
        return

    source = Path(forerun.__file__).parent
    _, base = measured(options.study, source)
    lines = ["| constant | value | " + " | ".join(base) + " |", "|---" * (2 + len(base)) + "|"]
    lines.append("| as it is | | " + " | ".join(f"{rate:.4g}" for rate in base.values()) + " |")
    for file, names in CONSTANTS[options.study].items():
        for name in names:
            for factor in (0.5, 2.0):
                value, rates = measured(options.study, source, file, name, factor)
                cells = " | ".join(f"{rates[key] / base[key] - 1:+.1%}" for key in base)
                lines.append(f"| `{name}` | {value} | {cells} |")
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
