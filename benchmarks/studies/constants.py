"""``python -m benchmarks constants``: the cases of ``decisions`` with each hand-set constant halved and doubled.

The clock is simulated. Each setting runs in a separate process, over a copy of the package with one number changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import forerun
from benchmarks.studies.decisions import cases, speeds
from forerun.cli.options import DebugOptions

CONSTANTS = {
    "policy/ledger.py": ("START_SLACK", "START_SHARE", "TRIAL_SLACK", "SHARE", "SAVED", "CREDIT"),
    "policy/gains.py": ("PRIOR_TREES", "RECENT_TREES", "TREE_SPREAD"),
    "policy/calibration.py": ("FIRST_GUESS", "STATEMENT_WEIGHT", "MEMORY"),
    "policy/rules.py": ("DOUBT", "CHEAP_SHARE", "RECENT", "PLAIN_STEPS"),
    "policy/step_costs.py": ("FIRST_PROPOSAL", "FURTHER_ROW"),
    "policy/time_model.py": (
        *("STEP_NOISE", "DRAFTING_NOISE", "SPEED_DRIFT", "LOADED_DOUBT", "START_DOUBT", "EACH_DOUBT"),
        *("GUESS_DOUBT", "DRAFT_MEMORY", "LEAST_START", "MOST_EACH", "CREDIBLE"),
    ),
}
"""Names by file of the package."""
BELOW_ONE = ("FIRST_GUESS", "MEMORY")  # of these the distance from 1 is halved and doubled
CHECKOUT = Path(__file__).parents[2]
SEEDS = 3  # worlds of each case


def changed(name: str, text: str, factor: float) -> str:
    """Return a constant's changed value, as written; integers stay integers."""
    value = float(text)
    other = 1 - (1 - value) * factor if name in BELOW_ONE else value * factor
    return str(other) if "." in text else str(max(1, round(other)))


def measured(source: Path, file: str = "", name: str = "", factor: float = 1.0) -> tuple[str, dict[str, float]]:
    """Return the constant's value and the rates in a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "forerun")
        value = ""
        if name:
            path = Path(folder) / "forerun" / file
            value = _set(path, path.read_text(encoding="utf-8"), name, factor)
        env = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(CHECKOUT)))}
        command = [sys.executable, "-m", "benchmarks", "constants", "--once"]
        out = subprocess.run(command, env=env, capture_output=True, text=True)
        if out.returncode:
            raise RuntimeError(f"with {name} = {value}:\n{out.stderr}")
        return value, json.loads(out.stdout.splitlines()[-1])


def _set(path: Path, text: str, name: str, factor: float) -> str:
    """Write and return a changed constant; its line may assign several."""
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
    """How much each hand-set constant of the planner matters: speed where it is halved and doubled."""

    once: Annotated[bool, typer.Option(help="Print the speeds of the package as it is, as JSON.")] = False


def run(options: ConstantsOptions) -> None:
    if options.once:
        found = {case.name: speeds(case, case.outline.sources, SEEDS)[0] for case in cases()}
        print(json.dumps({name: float(np.median(each)) for name, each in found.items()}))
        return
    source = Path(forerun.__file__).parent
    _, base = measured(source)
    print("| constant | value | " + " | ".join(base) + " |\n" + "|---" * (2 + len(base)) + "|")
    print("| as it is | | " + " | ".join(f"{rate:.4g}" for rate in base.values()) + " |", flush=True)
    for file, names in CONSTANTS.items():
        for name in names:
            for factor in (0.5, 2.0):
                value, found = measured(source, file, name, factor)
                cells = " | ".join(f"{found[key] / base[key] - 1:+.1%}" for key in base)
                print(f"| `{name}` | {value} | {cells} |", flush=True)
