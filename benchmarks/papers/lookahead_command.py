"""``python -m benchmarks papers lookahead``: the published forms of a draft beside Forerun's, on every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedModel

from benchmarks.papers.lookahead_methods import Lengths, MethodBench, default, methods
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import SourceOptions, list_option
from benchmarks.reporting.study_report import Delivery, Report
from benchmarks.tasks.task_prompts import Counts, build_jobs
from benchmarks.tasks.task_sets import tasks_for
from forerun.bench.machine import Row, plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.report import equality_table, pivot, plot, shown, speed_table, summarise
from forerun.bench.rounds import PromptSet
from forerun.cli.models import load_target
from forerun.cli.options import ModelOptions, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import say
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit


@dataclass(frozen=True)
class LookaheadOptions(OutputOptions, SourceOptions, ModelOptions):
    """The Lookahead paper's table 2: every form of a draft on every task, with warm tries.

    Greedy; contestants take turns in one process; medians count. Writes JSON, Markdown and a plot after each task.
    """

    tasks: Annotated[str | None, list_option("--tasks", "Text", "Those of tasks; default: all.")] = None
    prompts: Annotated[int, option("--prompts", panel="Text", help="Per task.", min=1)] = 4
    warm_prompts: Annotated[int, option("--warm-prompts", panel="Text", help="Answered before, per task.", min=0)] = 20
    rounds: Rounds = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per text.", min=2)] = 160
    decoding_length: Annotated[
        int, option("--decoding-length", panel="Text", help="Drafted tokens per step, in the paper's forms.", min=1)
    ] = Lengths.decoding
    branch_length: Annotated[
        int, option("--branch-length", panel="Text", help="Tokens of a branch, context included.", min=2, max=256)
    ] = Lengths.branch
    out: Out = Path("runs/lookahead")


def run(options: LookaheadOptions) -> None:
    """Measure, print the table, and write JSON, Markdown and a plot."""
    plots.check()
    model, tokenizer = load_target(options)
    jobs = _jobs(options, TemplateEncoder(tokenizer, options.raw), model)
    settings = plain_values(options) | {"dtype": dtype_name(model)}
    report = Report("The Lookahead paper's methods", settings)
    delivery = Delivery(report, options.out, "lookahead", options.json)
    bench, rows = MethodBench(model, (), tokenizer=tokenizer), list[Row]()
    for job in jobs:
        say(f"{job.task}: answering {len(job.warm_prompts)} other prompts")
        answers = bench.answers(default(()), job.warm_prompts, job.max_new_tokens)
        say(f"{job.task}: measuring")
        found = methods(Lengths(options.decoding_length, options.branch_length), answers)
        bench.others = {name: bench.contestant(method) for name, method in found.items()}
        *_, series = bench.run(job, options.rounds)
        rows += summarise(series, decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
        add_methods(report, rows)
        delivery.save()
    delivery.end()


def _jobs(options: LookaheadOptions, encoder: TemplateEncoder, model: PreTrainedModel) -> list[PromptSet]:
    tasks = tasks_for(encoder, options)
    wanted = list(tasks) if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    counts = Counts(options.prompts, options.warm_prompts, options.max_new_tokens)
    jobs, skipped = build_jobs(wanted, tasks, encoder, counts, position_limit(model))
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    if not jobs:
        raise ValueError(f"no task is left: {'; '.join(f'{task} {why}' for task, why in skipped.items())}")
    return jobs


def add_methods(report: Report, rows: Sequence[Row]) -> None:
    """Add the tables and the plot of all tasks so far."""
    steps = pivot(rows, "contestant", "task", lambda row: shown(row["tokens_per_step"]))
    heading = "Table 2: methods, as speed-up over transformers; tokens per step by task; equal texts"
    report.add("methods", heading, rows, speed_table(rows), steps, equality_table(rows))
    report.plot("methods", lambda path: plot(rows, path, report.note))
