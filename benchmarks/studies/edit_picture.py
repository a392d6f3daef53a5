"""``python -m benchmarks edit``: one edit of a code file, without drafts and with ``auto``, drawn over its answer.

Drafts from the prompt are accepted where the answer repeats the file and rejected where it says something new. Both
decode the prompt in turns, each time with a new drafter. A line is the median of the rounds, its band their range.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Line
from benchmarks.reporting.study_report import Report, listing
from benchmarks.reporting.turns import in_turns
from forerun.bench.disturbance import BUSY, LoadMeter
from forerun.bench.machine import Row
from forerun.bench.prompts_file import TemplateEncoder, check_length
from forerun.bench.report import COLOURS, figure
from forerun.bench.rounds import UNTIMED_TOKENS
from forerun.cli.models import load_target
from forerun.cli.options import MaxNewTokens, ModelOptions, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.decoding.recipes import check_drafter
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit

DRAFTERS = ("none", "auto")
WINDOW = 32
"""Tokens over which a speed is averaged: three lines of code. With 16, single steps show; with 64, few changes do."""
COLUMNS = {
    "drafter": "drafter", "tokens_per_second": "tokens/s", "slowest": "slowest", "fastest": "fastest",
    "tokens_per_step": "tokens per step", "tokens": "tokens", "others": "used by other processes",
}  # fmt: skip


@dataclass(frozen=True)
class EditOptions(OutputOptions, ModelOptions):
    """One edit of a code file, without drafts and with auto in turns: a table, and a plot of both over the answer.

    Speeds are those after the first token. Writes JSON, Markdown and plots.
    """

    file: Annotated[Path | None, option(panel="Text", help="Default: Python's bisect.py.", exists=True)] = None
    instruction: Annotated[str, option(panel="Text", help="What to change.")] = "Add type hints to this Python file."
    rounds: Rounds = 5
    max_new_tokens: MaxNewTokens = 512
    out: Out = Path("runs/edit")

    def __post_init__(self) -> None:
        if self.max_new_tokens <= 2 * WINDOW:
            raise ValueError(f"--max-new-tokens is {self.max_new_tokens}; it must be above {2 * WINDOW}")


@dataclass(frozen=True)
class Answer:
    """The tokens of a run; when each was committed, in seconds since the first; the step that committed it, from 0; and
    ``others``, see ``Load``."""

    tokens: Sequence[int]
    seconds: Sequence[float]
    steps: Sequence[int]
    others: float | None

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.seconds[-1]

    @property
    def tokens_per_step(self) -> float:
        """Without the first token, which the prompt's step commits."""
        return (len(self.tokens) - 1) / self.steps[-1]

    def before(self, begin: int, end: int) -> int:
        """Return the last token up to ``begin`` that an earlier step than ``end``'s committed."""
        return begin if self.steps[begin] < self.steps[end] else self.steps.index(self.steps[end]) - 1


def answer(engine: Engine, drafter: str, prompt: list[int], max_new_tokens: int) -> Answer:
    engine.set_drafter(drafter)
    meter, tokens, seconds, steps = LoadMeter(), list[int](), list[float](), list[int]()
    for step, commit in enumerate(engine.stream(prompt, max_new_tokens=max_new_tokens, do_sample=False)):
        now = time.perf_counter()
        tokens += commit.tokens
        seconds += [now] * len(commit.tokens)
        steps += [step] * len(commit.tokens)
    return Answer(tokens, [each - seconds[0] for each in seconds], steps, meter.stop().others)


def measure(
    engine: Engine, prompt: list[int], rounds: int, max_new_tokens: int, progress: Callable[[int, int], None]
) -> dict[str, list[Answer]]:
    """Let both drafters answer in turns; raise ValueError for an answer too short to draw, AssertionError if one
    differs."""
    for name in DRAFTERS:
        answer(engine, name, prompt, UNTIMED_TOKENS)
    works = {name: partial(answer, engine, name, prompt, max_new_tokens) for name in DRAFTERS}
    found = in_turns(works, rounds, progress)
    texts = [each.tokens for answers in found.values() for each in answers]
    if len(texts[0]) <= 2 * WINDOW:
        raise ValueError(f"the answer has {len(texts[0])} tokens, too few to draw; change --instruction or --file")
    if any(text != texts[0] for text in texts):
        raise AssertionError("the answers differ: drafting changed the output")
    return found


def over_the_answer(name: str, answers: Sequence[Answer], measure: Callable[[Answer, int, int], float]) -> Line:
    """Return a line with a value for each window of the answer, at the window's last token."""
    ends = range(WINDOW, len(answers[0].tokens))
    values = [[measure(each, each.before(end - WINDOW, end), end) for each in answers] for end in ends]
    return Line(name, ends, [*map(median, values)], [*map(min, values)], [*map(max, values)])


def speed(each: Answer, begin: int, end: int) -> float:
    return (end - begin) / (each.seconds[end] - each.seconds[begin])


def per_step(each: Answer, begin: int, end: int) -> float:
    return (end - begin) / (each.steps[end] - each.steps[begin])


def summaries(found: dict[str, list[Answer]]) -> Iterator[Row]:
    for name, answers in found.items():
        speeds = [each.tokens_per_second for each in answers]
        others = [each.others for each in answers if each.others is not None]
        yield {
            "drafter": name, "tokens_per_second": round(median(speeds), 1), "slowest": round(min(speeds), 1),
            "fastest": round(max(speeds), 1),
            "tokens_per_step": round(median(each.tokens_per_step for each in answers), 2),
            "tokens": len(answers[0].tokens), "others": round(median(others), 2) if others else None,
        }  # fmt: skip


def draw(path: Path, report: Report, rows: Sequence[Row], found: dict[str, list[Answer]], busy: bool) -> None:
    title = f"{Path(report.settings['model']).name} edits a code file, cold: {rows[0]['tokens']} tokens"
    note = f"{report.note}{'; the machine was busy' if busy else ''}"
    with figure(path, 2, 1, title=title, note=note, figsize=(8, 5), sharex=True, height_ratios=(3, 2)) as (_, axes):
        for axis, measure, label, total in zip(
            axes, (speed, per_step), ("tokens per second", "tokens per step"), ("tokens_per_second", "tokens_per_step"),
            strict=True,
        ):  # fmt: skip
            for row, colour in zip(rows, COLOURS, strict=False):
                line = over_the_answer(f"{row['drafter']}: {row[total]:.3g} {label}", found[row["drafter"]], measure)
                axis.plot(line.xs, line.ys, color=colour, lw=1.6, label=line.name)
                axis.fill_between(line.xs, line.low, line.high, color=colour, alpha=0.15, lw=0)
            axis.set_ylim(0)
            axis.margins(x=0)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98))
        axes[-1].set_xlabel(f"tokens of the answer; each point is of the last {WINDOW}")


def run(options: EditOptions) -> None:
    plots.check()
    for name in DRAFTERS:
        check_drafter(name)
    model, tokenizer = load_target(options)
    file = options.file or Path(bisect.__file__)
    code = file.read_text(encoding="utf-8")
    prompt = TemplateEncoder(tokenizer)(f"{options.instruction}\n\n```python\n{code}```")
    check_length(len(prompt), position_limit(model), options.max_new_tokens)
    engine = Engine(model, "none", tokenizer=tokenizer)
    with progress_bar(stderr(), "measuring") as progress:
        found = measure(engine, prompt, options.rounds, options.max_new_tokens, progress)
    rows = list(summaries(found))
    report = Report.of("A code edit", options, "edit", dtype=dtype_name(model), prompt_tokens=len(prompt))
    busy = max(row["others"] or 0 for row in rows) > BUSY
    warning = "Other processes were busy meanwhile: speeds do not count, tokens per step do.\n" if busy else ""
    report.add("edit", f"{file.name}: {options.instruction}", rows, warning, listing(rows, COLUMNS))
    report.plot("picture", lambda path: draw(path, report, rows, found, busy))
    report.end()
