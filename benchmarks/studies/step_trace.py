"""``python -m benchmarks step-trace``: how much Python a step runs, on the bundled model.

Counts the files, functions and lines of the package that run in at least half of the steps, and the moves from file to
file in the median step. The figures do not depend on the machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any

import typer

import forerun
from benchmarks.reporting.study_report import listing
from forerun.cli.options import DebugOptions
from forerun.core.long_context import LongContextConfig
from forerun.engine.batch import Batch
from forerun.reference import bundled, demo_prompts

PACKAGE = str(Path(forerun.__file__).parent)
STEPS = {
    "plain": ("none", {}),
    "trie": ("trie", {"prune_drafts": False}),
    "auto": ("auto", {}),
    "chain over a sparse cache, with a trie": ("triforce-trie", {}),
}
"""A drafter and the engine's options."""


@dataclass(frozen=True)
class TraceOptions(DebugOptions):
    """How much Python a step runs, on the bundled model."""

    tokens: Annotated[int, typer.Option(help="New tokens of each traced answer.", min=24)] = 40


@dataclass
class StepTrace:
    """What ran in one step."""

    lines: set[tuple[str, int]] = field(default_factory=set)
    functions: set[tuple[str, int]] = field(default_factory=set)
    moves: int = 0


class Tracer:
    """Records each call of ``Batch.step`` within ``tracing``."""

    def __init__(self) -> None:
        self.steps: list[StepTrace] = []
        self._step = Batch.step.__code__
        self._last = ""

    @contextmanager
    def tracing(self) -> Iterator[None]:
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if code is self._step:
            self.steps.append(StepTrace())
        if self.steps:
            self.steps[-1].functions.add((code.co_filename, code.co_firstlineno))
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self.steps:
            name, step = frame.f_code.co_filename, self.steps[-1]
            step.lines.add((name, frame.f_lineno))
            step.moves += name != self._last
            self._last = name
        return self._ran


def usual(found: list[set[Any]]) -> set[Any]:
    counts = Counter(each for one in found for each in one)
    return {each for each, count in counts.items() if 2 * count >= len(found)}


def traced(engine: forerun.Engine, prompts: list[str], tokens: int) -> dict[str, object]:
    """Return a row over all prompts but the first, which warms caches and measures costs."""
    steps, (first, *others) = list[StepTrace](), prompts
    engine.generate(first, max_new_tokens=tokens)
    for prompt in others:
        tracer = Tracer()
        with tracer.tracing():
            engine.generate(prompt, max_new_tokens=tokens)
        steps += tracer.steps[1:]  # the first one is the prefill
    lines = usual([step.lines for step in steps])
    return {
        "files": len({name for name, _ in lines}),
        "functions": len(usual([step.functions for step in steps])),
        "lines": len(lines),
        "moves": int(median(step.moves for step in steps)),
    }


def run(options: TraceOptions) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, prompts = bundled("target"), [each["prompt"] for each in demo_prompts()]
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer, rows = AutoTokenizer.from_pretrained(path), []
    for name, (drafter, engine_options) in STEPS.items():
        settings = LongContextConfig(cache_budget=64) if drafter.startswith("triforce") else None
        engine = forerun.Engine(model, drafter, tokenizer=tokenizer, settings=settings, **engine_options)
        rows.append({"step": name} | traced(engine, prompts, options.tokens))
    columns = {name: name for name in ("step", "files", "functions", "lines")} | {"moves": "moves between files"}
    print(listing(rows, columns), end="")
