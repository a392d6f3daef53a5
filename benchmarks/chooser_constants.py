"""How much each of the chooser's constants matters: tokens a second where it is halved and doubled.

    python benchmarks/chooser_constants.py --replay DATA/replay --out docs/constants.md

Nothing here depends on a machine. Answers that were recorded are replayed through the trie, and a drafter whose tokens
are right as often as stated stands for a model that drafts; a clock is moved by what each part of a step takes. Every
setting runs in a process of its own, over a copy of the package in which one number is another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CONSTANTS = {
    "plan/account.py": ("SHARE", "START", "SAVINGS"),
    "plan/calibration.py": ("FIRST_GUESS", "DOUBT", "MEMORY"),
    "plan/chains.py": ("AGREEING",),
    "plan/passes.py": ("RECALL", "ALONE"),
    "drafters/chooser.py": ("LEAST", "GROWTH"),
}
BELOW_ONE = ("FIRST_GUESS", "MEMORY")
"""Of these the distance from 1 is halved and doubled."""
FILES = {"maths": "gsm8k_train_human.jsonl", "code": "humaneval_human.jsonl", "chat": "mtbench_vicuna7b.jsonl"}
ROWS = 8
"""Answers of each file."""
SURE = 4.0
"""A model that is right with probability p states p to this power: it is less sure than it may be."""


@dataclass
class World:
    """A clock, and what moves it: seconds of a plain pass, of asking for a tree, of a node of it."""

    plain: float
    asking: float
    node: float
    now: float = 0.0
    vocabulary = 1 << 31
    device = torch.device("cpu")

    def clock(self) -> float:
        """Seconds."""
        return self.now


def simulate(replay: Path) -> dict[str, float]:
    """Tokens a second by what was simulated, with the package as it is."""
    from tokenizers import Tokenizer

    from forerun.bench.replay import Selection

    tokenizer = Tokenizer.from_file(str(replay / "bpe16k.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    found = {}
    for name, file in FILES.items():
        rows = Selection(replay / file, stop=ROWS).read(encode)
        for size, world in {"small": World(5e-4, 1.5e-5, 1.2e-6), "large": World(1.2e-2, 6e-5, 5e-6)}.items():
            found[f"{name}, {size} model"] = _replayed(rows, world)
    for agreement in (0.7, 0.95):
        found[f"a model right in {agreement:.0%}"] = _drafted(lambda at, a=agreement: a)
    found["a model right in 90 % of half of the text"] = _drafted(lambda at: 0.9 if at // 80 % 2 else 0.0)
    return found


def _replayed(rows: Sequence[Any], world: World) -> float:
    from forerun.core.request import Request
    from forerun.drafters.base import OuterDrafter
    from forerun.drafters.chooser import Chooser
    from forerun.drafters.trie import TrieDrafter

    class Clocked(OuterDrafter):
        def propose_batch(self, requests: Any, budget: int) -> Any:
            trees = [self.inner.propose(request, budget) for request in requests]
            world.now += sum(world.asking + world.node * len(tree) for tree in trees)
            return trees

    trie = Clocked(TrieDrafter())
    trie.warm_up()
    return _run(Chooser(trie, trees=trie, costs=_curve(), clock=world.clock), rows, world, Request)


def _drafted(right: Callable[[int], float]) -> float:
    from forerun.bench.replay import Recorded
    from forerun.core.request import Request
    from forerun.core.sampling import Salt, uniform
    from forerun.core.tree import DraftTree
    from forerun.drafters.base import Drafter
    from forerun.drafters.chooser import Chooser

    world = World(1.0, 0.0, 0.0)

    class Levels(Drafter):
        def propose(self, request: Request, budget: int) -> DraftTree:
            came: list[bool] = []
            for at in range(len(request), len(request) + budget):
                world.now += 0.2
                came.append(uniform(0, at, Salt.ACCEPT) < right(at))
                if self.enough is not None and self.enough(request, max(right(at), 1e-3) ** SURE):
                    break
            return DraftTree.chain([7 if hit else 9 for hit in came])

    levels = Levels()
    rows = [Recorded([1, 2], [7] * 400)] * 3
    return _run(
        Chooser(levels, chains=levels, most=12, weight=0.2, costs=_curve(), clock=world.clock), rows, world, Request
    )


def _curve() -> Any:
    from forerun.plan.costs import CostCurve

    return CostCurve((1, 2, 8, 16, 32, 64), (1.0, 1.05, 1.2, 1.7, 2.7, 4.7), 1e-4, 1e-5)


def _run(chooser: Any, rows: Sequence[Any], world: World, make: Any) -> float:
    """Tokens a second of texts, one after another."""
    from forerun.bench.replay import _follow
    from forerun.core.verify import Outcome

    chooser.bind(world)
    tokens, nothing = 0, torch.empty(0, 0)
    for row in rows:
        request = make(row.prompt, len(row.answer))
        chooser.begin(request)
        while request.remaining:
            (tree,) = chooser.propose_batch([request], 64)
            world.now += world.plain * _curve().of([1 + len(tree)], [len(request) - 1])
            verdict = _follow(tree, row.answer[len(request.generated) :])
            for token in verdict.tokens:
                request.append(token)
            chooser.observe(request, Outcome(tree, verdict, nothing))
            tokens += len(verdict.tokens)
        chooser.finish(request)
    return tokens / world.now


def changed(name: str, text: str, factor: float) -> str:
    """A constant's other value, as it is written; whole numbers stay whole."""
    value = float(text)
    other = 1 - (1 - value) * factor if name in BELOW_ONE else value * factor
    return str(other) if "." in text else str(max(1, round(other)))


def measured(
    source: Path, replay: Path, file: str = "", name: str = "", factor: float = 1.0
) -> tuple[str, dict[str, float]]:
    """The constant's value, and tokens a second with it in a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "forerun")
        value = ""
        if name:
            path = Path(folder) / "forerun" / file
            text = path.read_text(encoding="utf-8")
            value = _set(path, text, name, factor)
        env = os.environ | {"PYTHONPATH": folder}
        out = subprocess.run(
            [sys.executable, __file__, "--replay", str(replay), "--once"],
            env=env,
            capture_output=True,
            text=True,
        )
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


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(simulate(options.replay)))
        return
    import forerun

    source = Path(forerun.__file__).parent
    _, base = measured(source, options.replay)
    lines = ["| constant | value | " + " | ".join(base) + " |", "|---" * (2 + len(base)) + "|"]
    lines.append("| as it is, tokens/s | | " + " | ".join(f"{rate:.4g}" for rate in base.values()) + " |")
    for file, names in CONSTANTS.items():
        for name in names:
            for factor in (0.5, 2.0):
                value, rates = measured(source, options.replay, file, name, factor)
                cells = " | ".join(f"{rates[key] / base[key] - 1:+.1%}" for key in base)
                lines.append(f"| `{name}` | {value} | {cells} |")
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
