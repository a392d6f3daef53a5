"""How much each hand-set constant matters: what comes out where it is halved and doubled.

    python -m benchmarks constants drafts --replay DATA/replay
    python -m benchmarks constants asking
    python -m benchmarks constants prompts

Nothing here depends on a machine: a clock is moved by what each part of a step takes. ``drafts`` replays answers that
were recorded through the trie, and lets a drafter whose tokens are right as often as stated stand for a model that
drafts. ``asking``: a costly source beside a cheap one, which helps or does not. ``prompts``: a long prompt is read
while others decode. Every setting runs in a process of its own, over a copy of the package in which one number is
another.
"""

from __future__ import annotations

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
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from tokenizers import Tokenizer

import forerun
from benchmarks.studies.replay import Recorded, Selection, follow
from forerun.cli.options import DebugOptions
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.sampling import Salt, uniform
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.drafting.drafter import Drafter, OuterDrafter, trees_of
from forerun.drafting.merged import MergedDrafter
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.models.forward.runtime import Runtime
from forerun.policy.cost_curve import CostCurve
from forerun.trie.recycled import NO_ROWS

CONSTANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "drafts": {
        "policy/exploration_budget.py": (
            *("EXPLORATION_SHARE", "EXPLORATION_START", "CREDIT_SHARE", "SAVINGS", "STAKE"),
        ),
        "policy/ask_gain.py": ("PRIOR_TREES", "RECENT_TREES"),
        "policy/calibration.py": ("FIRST_GUESS", "STATEMENT_WEIGHT", "MEMORY"),
        "policy/chain_acceptance.py": ("AGREEING",),
        "policy/prices.py": (
            *("CREDIBLE", "DRAFT_MEMORY", "LEAST_START", "MOST_EACH", "FIRST_PROPOSAL_SECONDS", "STEP_NOISE"),
            *("DRAFTING_NOISE", "SPEED_DRIFT", "LOADED_DOUBT", "START_DOUBT", "EACH_DOUBT", "GUESS_DOUBT"),
        ),
        "drafting/adaptive.py": ("LEAST_NODES", "NODE_GROWTH"),
    },
    "asking": {
        "policy/exploration_budget.py": ("EXPLORATION_SHARE", "EXPLORATION_START", "STAKE"),
        "policy/ask_gain.py": ("PRIOR_TREES", "RECENT_TREES"),
        "policy/prices.py": ("FIRST_DEEPENING", "GUESS_DOUBT"),
    },
    "prompts": {
        "engine/prefill_pacing.py": ("STEPS_BESIDE", "MIN_CHUNK_TOKENS", "RECENT_STEPS", "MAX_CHANGE", "LEAST_USED")
    },
}
BELOW_ONE = ("FIRST_GUESS", "MEMORY")
"""Of these the distance from 1 is halved and doubled."""
FILES = {"maths": "gsm8k_train_human.jsonl", "code": "humaneval_human.jsonl", "chat": "mtbench_vicuna7b.jsonl"}
CHECKOUT = Path(__file__).parents[2]
ROWS = 8
"""Answers of each file."""
COSTS = CostCurve((1, 2, 8, 16, 32, 64), (1.0, 1.05, 1.2, 1.7, 2.7, 4.7), (1, 9), (1e-4, 2e-4))
"""Of passes, by their tokens and by the tokens behind them."""
SURE = 4.0
"""A model that is right with probability p states p to this power: it is less sure than it may be."""


@dataclass
class SimulatedTime:
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


def drafts(replay: Path | None) -> dict[str, float]:
    """Tokens a second of recorded answers, and of a model that drafts.

    Raises:
        ValueError: without a folder of recorded answers.
    """
    if replay is None:
        raise ValueError("drafts needs --replay, the folder with the recorded answers")
    tokenizer = Tokenizer.from_file(str(replay / "bpe16k.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    found = {}
    for name, file in FILES.items():
        rows = Selection(replay / file, stop=ROWS).read(encode)
        for size, simulated in (
            ("small", SimulatedTime(5e-4, 1.5e-5, 1.2e-6)),
            ("large", SimulatedTime(1.2e-2, 6e-5, 5e-6)),
        ):
            found[f"{name}, {size} model"] = _replayed(rows, simulated)
    for agreement in (0.7, 0.95):
        found[f"a model right in {agreement:.0%}"] = _drafted(lambda at, share=agreement: share)  # type: ignore[misc]
    found["a model right in 90 % of half of the text"] = _drafted(lambda at: 0.9 if at // 80 % 2 else 0.0)
    return found


def _replayed(rows: Sequence[Recorded], simulated: SimulatedTime) -> float:
    class Clocked(OuterDrafter):
        def propose(self, context: Any) -> Any:
            trees = trees_of(self.inner, context)
            simulated.now += sum(simulated.asking + simulated.node * len(tree) for tree in trees)
            return trees

    trie = Clocked(TrieDrafter())
    trie.warm_up()
    return _run(AdaptiveDrafter(trie, trees=trie), rows, simulated)


def _drafted(right: Callable[[int], float]) -> float:

    simulated = SimulatedTime(1.0, 0.0, 0.0)

    class Levels(Drafter):
        def propose(self, context: PassContext) -> list[DraftTree]:
            return [self._chain(request, budget, context.stop) for request, budget in context]

        def _chain(self, request: Request, budget: int, stop: Any) -> DraftTree:
            came: list[bool] = []
            for at in range(len(request), len(request) + budget):
                simulated.now += 0.2
                came.append(uniform(0, at, Salt.ACCEPT) < right(at))
                if stop is not None and stop(request, max(right(at), 1e-3) ** SURE):
                    break
            return DraftTree.chain([7 if hit else 9 for hit in came])

    levels = Levels()
    rows = [Recorded([1, 2], [7] * 400)] * 3
    return _run(AdaptiveDrafter(levels, chains=levels, max_length=12, weight=0.2), rows, simulated)


def asking(replay: Path | None) -> dict[str, float]:
    """Tokens a second where a costly source may add three tokens to the tree of a cheap one.

    A plain pass takes 1, asking the costly source 0.5. Its tokens are right so often; those of the cheap one in a tenth
    of all places.
    """
    return {
        "a source right in 90 %": _asked(lambda at: 0.9),
        "a source right in 30 %": _asked(lambda at: 0.3),
        "90 % and 30 % in turns of 200 tokens": _asked(lambda at: 0.9 if at // 200 % 2 else 0.3),
        "90 % and 30 % in turns of 50 tokens": _asked(lambda at: 0.9 if at // 50 % 2 else 0.3),
    }


def _asked(right: Callable[[int], float]) -> float:

    simulated = SimulatedTime(1.0, 0.0, 0.0)

    class Source(Drafter):
        def __init__(self, seconds: float, length: int, chance: Callable[[int], float]) -> None:
            self.seconds, self.length, self.chance = seconds, length, chance

        def propose(self, context: PassContext) -> list[DraftTree]:
            simulated.now += self.seconds
            return [self._chain(len(request)) for request in context.rows]

        def _chain(self, at: int) -> DraftTree:
            places = range(at, at + self.length)
            tokens = [7 if uniform(self.length, place, Salt.ACCEPT) < self.chance(place) else 9 for place in places]
            chances = np.cumprod([self.chance(place) for place in places], dtype=np.float64)
            return DraftTree(np.array(tokens), np.arange(self.length) - 1, probability=chances)

    trees = MergedDrafter(Source(0.01, 1, lambda at: 0.1), Source(0.5, 3, right), 1.0)
    rows = [Recorded([1, 2], [7] * 400)] * 10
    return _run(AdaptiveDrafter(trees, trees=trees), rows, simulated)


def prompts(replay: Path | None) -> dict[str, float]:
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


STUDIES: dict[str, Callable[[Path | None], dict[str, float]]] = {"drafts": drafts, "asking": asking, "prompts": prompts}


def _run(chooser: Any, rows: Sequence[Recorded], simulated: SimulatedTime) -> float:
    """Tokens a second of texts, one after another."""

    runtime = Runtime(simulated.clock, lambda target: COSTS, static_lists=lambda target: NO_ROWS)
    chooser.bind(simulated, runtime)
    tokens, nothing = 0, torch.empty(0, 0)
    for row in rows:
        request = Request(row.prompt, len(row.answer))
        chooser.begin(request)
        while request.remaining:
            drafts = chooser.propose(PassContext.decoding([request], 64))
            (tree,) = drafts or [DraftTree.empty()]
            simulated.now += simulated.plain * COSTS.of([1 + len(tree)], [len(request) - 1])
            chooser.scored()
            verdict = follow(tree, row.answer[len(request.generated) :])
            for token in verdict.tokens:
                request.append(token)
            if drafts is not None:
                chooser.observe(request, Outcome(tree, verdict, nothing))
            tokens += len(verdict.tokens)
        chooser.finish(request)
    return tokens / simulated.now


def changed(name: str, text: str, factor: float) -> str:
    """A constant's other value, as it is written; whole numbers stay whole."""
    value = float(text)
    other = 1 - (1 - value) * factor if name in BELOW_ONE else value * factor
    return str(other) if "." in text else str(max(1, round(other)))


def measured(
    study: str, source: Path, replay: Path | None, file: str = "", name: str = "", factor: float = 1.0
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
        given = [] if replay is None else ["--replay", str(replay)]
        command = [sys.executable, "-m", "benchmarks", "constants", study, *given, "--once"]
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

    study: Annotated[Literal["drafts", "asking", "prompts"], typer.Argument(help="What is simulated.")]
    replay: Annotated[Path | None, typer.Option(help="Folder with recorded answers, for drafts.")] = None
    out: Annotated[Path | None, typer.Option(help="File for the table; it is printed in any case.")] = None
    once: Annotated[bool, typer.Option(help="With the package as it is, as JSON.")] = False


def run(options: ConstantsOptions) -> None:
    """Write the table."""
    if options.once:
        print(json.dumps(STUDIES[options.study](options.replay)))
        return

    source = Path(forerun.__file__).parent
    _, base = measured(options.study, source, options.replay)
    lines = ["| constant | value | " + " | ".join(base) + " |", "|---" * (2 + len(base)) + "|"]
    lines.append("| as it is | | " + " | ".join(f"{rate:.4g}" for rate in base.values()) + " |")
    for file, names in CONSTANTS[options.study].items():
        for name in names:
            for factor in (0.5, 2.0):
                value, rates = measured(options.study, source, options.replay, file, name, factor)
                cells = " | ".join(f"{rates[key] / base[key] - 1:+.1%}" for key in base)
                lines.append(f"| `{name}` | {value} | {cells} |")
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
