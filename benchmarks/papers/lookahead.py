"""``python -m benchmarks papers lookahead``: the Lookahead paper's methods beside Forerun's, on every task.

The published forms draft up to the decoding length, and all drafts are scored (section 4.2). Forerun's default merges
branches by probability and scores what pays. Every trie is warm, as in the paper: it has indexed other answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, get_args

from benchmarks.papers.lookahead_trie import Form, LookaheadTrieConfig, LookaheadTrieSource
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import ListOptions, SourceOptions, list_option, names_of
from benchmarks.reporting.study_report import Report
from benchmarks.tasks.task_bench import TaskBench, WrongSource
from benchmarks.tasks.task_prompts import Counts
from benchmarks.tasks.task_sets import jobs_for
from forerun.bench.machine import Row
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.report import equality_table, pivot, plot, shown, speed_table, summarise
from forerun.bench.rounds import PLAIN, Contestant, Tokens
from forerun.cli.models import load_target
from forerun.cli.options import ModelOptions, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import say
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Setup
from forerun.decoding.source import Source
from forerun.decoding.sources.lookup import Lookup, LookupConfig
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import BUDGET
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit

T = TypeVar("T", TrieSource, LookaheadTrieSource)

FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Lengths:
    """The paper's lengths: most drafted tokens per step (L_d), and tokens of a branch with its context (L_b)."""

    decoding: int = 16
    branch: int = 12


@dataclass(frozen=True)
class Method:
    """A way to draft: what makes the source, the most nodes of a tree, and whether only nodes that pay are scored, or
    all, as in the paper."""

    make: Callable[[Setup], Source]
    budget: int = BUDGET
    pruned: bool = True


class MethodBench(TaskBench):
    """The contestants of ``python -m benchmarks tasks``, and methods on the same engine."""

    def contestant(self, method: Method) -> Contestant:
        return self.forerun(method.make, method.budget, method.pruned)

    def answers(self, method: Method, prompts: Sequence[Tokens], max_new_tokens: int) -> list[Tokens]:
        """Answer the prompts with one drafter; drafts do not change the answers."""
        self.contestant(method).prepare()
        return [text for prompt in prompts for text in self.generate([prompt], max_new_tokens)[0]]


def warmed(source: T, texts: Sequence[Tokens]) -> T:
    """Return the source after it indexed the answers."""
    source.warm("default", texts)
    return source


def plain() -> Method:
    return Method(lambda setup: setup.over(Planner()))


def published(form: Form, lengths: Lengths, texts: Sequence[Tokens]) -> Method:
    """Return a published form with the paper's lengths; drafts fill the decoding length, and all are scored."""
    longest = min(LookaheadTrieConfig.max_prefix, lengths.branch - 1)
    config = LookaheadTrieConfig(form, lengths.branch, longest, max(LookaheadTrieConfig.min_matches, lengths.decoding))
    return Method(lambda setup: warmed(LookaheadTrieSource(config), texts), lengths.decoding, pruned=False)


def default(texts: Sequence[Tokens]) -> Method:
    """Return Forerun's own trie: merged by probability; only nodes that pay are scored."""
    return Method(lambda setup: warmed(TrieSource(), texts))


def methods(lengths: Lengths, answers: Sequence[Tokens]) -> dict[str, Method]:
    """Return table 2 without ``transformers``: prompt lookup, the forms, Forerun's trie, and drafts that are never
    accepted. Tries have indexed ``answers``."""
    most, lookup = lengths.decoding, LookupConfig(branch_length=lengths.decoding)
    return {
        PLAIN: plain(),
        "forerun lookup (LLMA)": Method(lambda setup: Lookup(lookup), most, pruned=False),
        **{f"forerun {form}": published(form, lengths, answers) for form in FORMS},
        "forerun merged": Method(lambda setup: warmed(TrieSource(), answers), most, pruned=False),
        "forerun trie, the default": default(answers),
        "forerun, wrong drafts, all scored": Method(lambda setup: WrongSource(), most, pruned=False),
    }


@dataclass(frozen=True)
class LookaheadOptions(ListOptions, OutputOptions, SourceOptions, ModelOptions):
    """The Lookahead paper's table 2: every form of a draft on every task, with warm tries.

    Greedy; contestants take turns; medians count. Writes JSON, Markdown and a plot after each task.
    """

    tasks: Annotated[str | None, list_option("Text", "Those of tasks; default: all.")] = None
    prompts: Annotated[int, option("--prompts", panel="Text", help="Per task.", min=1)] = 4
    warm_prompts: Annotated[int, option("--warm-prompts", panel="Text", help="Answered before, per task.", min=0)] = 20
    rounds: Rounds = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per text.", min=2)] = 160
    decoding_length: Annotated[int, option(panel="Text", help="Drafts of the paper's forms.", min=1)] = Lengths.decoding
    branch_length: Annotated[int, option(panel="Text", help="With its context.", min=2, max=256)] = Lengths.branch
    out: Out = Path("runs/lookahead")

    names = names_of("tasks")


def run(options: LookaheadOptions) -> None:
    plots.check()
    model, tokenizer = load_target(options)
    counts = Counts(options.prompts, options.warm_prompts, options.max_new_tokens)
    jobs, _ = jobs_for(options.names, options, TemplateEncoder(tokenizer, options.raw), counts, position_limit(model))
    report = Report.of("The Lookahead paper's methods", options, "lookahead", dtype=dtype_name(model))
    bench, rows = MethodBench(model, (), tokenizer=tokenizer), list[Row]()
    for job in jobs:
        say(f"{job.task}: answering {len(job.warm_prompts)} other prompts")
        answers = bench.answers(default(()), job.warm_prompts, job.max_new_tokens)
        say(f"{job.task}: measuring")
        found = methods(Lengths(options.decoding_length, options.branch_length), answers)
        bench.others = {name: bench.contestant(method) for name, method in found.items()}
        *_, series = bench.run(job, options.rounds)
        rows.extend(summarise(series, decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))))
        steps = pivot(rows, "contestant", "task", lambda row: shown(row["tokens_per_step"]))
        heading = "Table 2: methods, as speed-up over transformers; tokens per step by task; equal texts"
        report.add("methods", heading, rows, speed_table(rows), steps, equality_table(rows))
        report.plot("methods", lambda path: plot(rows, path, report.note))
        report.save()
    report.end()
