"""``python -m benchmarks tasks``: Forerun's drafters beside transformers' own ways to generate, and other engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.papers.baselines import RECIPES
from benchmarks.peers.peer_libraries import PeerSubject, RunningPeers, check, running_peers
from benchmarks.peers.process import check_python
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import BENCHMARKS, ListOptions, SourceOptions, list_option, numbers_of
from benchmarks.tasks.task_bench import PADDED, TaskBench
from benchmarks.tasks.task_prompts import Counts
from benchmarks.tasks.task_sets import jobs_for
from forerun.bench.journal import Journal, about
from forerun.bench.machine import Row, caption, footer, plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.report import BenchResult, equality_table, pivot, speed_table, summarise, warnings, write
from forerun.bench.rounds import PromptSet, Tokens
from forerun.cli.bench import check_texts
from forerun.cli.models import check_drafters, load_target
from forerun.cli.options import (
    DRAFTER_HELP,
    MaxNewTokens,
    ModelOptions,
    Out,
    OutputOptions,
    Resume,
    Rounds,
    Skip,
    flag_of,
    option,
)
from forerun.cli.terminal import progress_bar, show_report, stderr
from forerun.core.long_context import LongContextConfig
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load_draft

_OTHERS = "Compared with"
DRAFTERS = ("none", "auto", "lookup", "trie")  # those that are measured unless others are named


@dataclass(frozen=True)
class TaskOptions(ListOptions, OutputOptions, SourceOptions, ModelOptions):
    """Compare Forerun's drafters with transformers' greedy, prompt lookup and assisted generation, on any model.

    Models with a chat template answer questions (maths, code, rag, summary, edit, table). Others continue texts (copy,
    json, rag, code, maths, prose). Contestants take turns in one process; medians count. Every drafter runs cold, the
    trie also warm. Writes JSON, Markdown and plots.
    """

    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter", "-d", panel="Model", help=f"{DRAFTER_HELP} May be repeated; default: {', '.join(DRAFTERS)}."
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        option("--task", "-k", panel="Text", help="One of those above; may be repeated; default: all."),
    ] = None
    prompts: Annotated[int, option(panel="Text", help="Per task.", min=1)] = 4
    warm_prompts: Annotated[int, option(panel="Text", help="Answered before when warm.", min=0)] = 20
    rounds: Rounds = 5
    max_new_tokens: MaxNewTokens = 160
    batch: Annotated[str | None, list_option("Text", "Measure batches of so many rows, too.")] = None
    peers: Annotated[bool, option("--peers", panel=_OTHERS, help="openvino-genai and llama.cpp as well.")] = False
    peer_python: Annotated[
        Path | None, option(panel=_OTHERS, help="The interpreter of the peers' environment; default: this one.")
    ] = None
    gguf: Annotated[
        Path | None, option(panel=_OTHERS, help="The GGUF file that the model came from, for the peers.")
    ] = None
    skip: Skip = None
    out: Out = Path("runs/bench")
    resume: Resume = False

    sizes = numbers_of("batch", int, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gguf", "peer_python"):
            if getattr(self, name) is not None and not self.peers:
                raise ValueError(f"{flag_of(name)} is for the peers; add --peers")
        check_python(self.peer_python)
        if self.gguf is not None and not self.gguf.is_file():
            raise ValueError(f"--gguf is {self.gguf}; there is no such file")

    @property
    def batches(self) -> list[int]:
        return sorted(set(self.sizes))


@dataclass(frozen=True)
class TaskResult(BenchResult):
    """Rows by task and, with a ``batch`` column, of batches; what was not measured, and why; and notes for a reader."""

    batches: Sequence[Row] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def json(self) -> Row:
        more = {"batches": list(self.batches), "skipped": dict(self.skipped), "notes": self._notes()}
        return super().json | more

    @property
    def markdown(self) -> str:
        parts = [speed_table(self.rows), equality_table(self.rows)]
        if self.batches:
            parts += ["## Batches\n", batch_table(self.batches), equality_table(self.batches)]
        parts += [f"{note}\n" for note in self._notes()]
        parts += [f"Not measured: {name}: {reason}.\n" for name, reason in self.skipped.items()]
        return "\n".join([*parts, footer(self.settings)])

    def _notes(self) -> list[str]:
        return [*self.notes, *warnings([*self.rows, *self.batches])]


def batch_table(rows: Sequence[Row]) -> str:
    """Tokens per second of all rows, and the ratio to transformers' padded batches."""
    sized = [row | {"rows": f"{row['batch']} rows"} for row in rows]
    return pivot(sized, "contestant", "rows", lambda r: f"{r['tokens_per_second']:.0f} tokens/s ({r['speed_up']:.2f}x)")


def run(options: TaskOptions) -> None:
    plots.check()
    check_drafters(options.drafter or DRAFTERS, options, RECIPES)
    target, tokenizer = load_target(options)
    draft = load_draft(BUNDLED_DRAFT, target, tokenizer) if options.model == BUNDLED else None
    encoder = TemplateEncoder(tokenizer, options.raw)
    counts = Counts(options.prompts, options.warm_prompts, options.max_new_tokens)
    jobs, skipped = jobs_for(options.task, options, encoder, counts, position_limit(target))
    batched = in_turns(jobs, max(options.batches, default=0))
    dtype = dtype_name(target)
    settings = plain_values(options) | {"dtype": dtype, "tasks": "questions" if encoder.chats else "continuations"}
    with _peers(options, PeerSubject(target, tokenizer, _source(options), longest(jobs))) as peers:
        long, drafters = LongContextConfig(draft_model=draft), options.drafter or DRAFTERS
        bench = TaskBench(target, drafters, long, tokenizer, options.skip or (), others=peers.contestants)
        bench.measures_batches = bool(batched)
        bench.check_skip(jobs)
        shared = about(options.model, dtype, str(target.device), BENCHMARKS) | {"peers": peers.notes}
        journal = Journal(options.out / "speed-turns.jsonl", shared, options.resume)  # begun when nothing is wrong
        result = TaskResult([], settings, [], skipped | peers.absent | bench.refused, peers.notes)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        with progress_bar(stderr(), "measuring") as progress:
            total = len(jobs) + len(options.batches)
            for done, job in enumerate(jobs):
                progress(done, total)
                *_, series = bench.run(job, options.rounds, journal)
                result = replace(result, rows=[*result.rows, *summarise(series, decode=decode)])
                paths = _write(result, options.out)
            for done, size in enumerate(options.batches, len(jobs)):
                progress(done, total)
                *_, series = bench.run_batches(batched, size, options.max_new_tokens, options.rounds, journal)
                rows = [{"batch": size} | row for row in summarise(series, PADDED)]
                result = replace(result, batches=[*result.batches, *rows])
                paths = _write(result, options.out)
    show_report(result.json if options.json else result.markdown, paths)
    check_texts(bench.engine.exactness, [*result.rows, *result.batches])


@contextmanager
def _peers(options: TaskOptions, subject: PeerSubject) -> Iterator[RunningPeers]:
    if not options.peers:
        yield RunningPeers()
        return
    check(subject.model, subject.tokenizer, subject.source)
    with running_peers(subject, python=str(options.peer_python or sys.executable)) as peers:
        for name, reason in peers.absent.items():
            stderr().print(f"skipped {name}: {reason}")
        yield peers


def _source(options: TaskOptions) -> Path | None:
    """Return the GGUF file that the model came from, if known."""
    own = Path(options.model).expanduser()
    return options.gguf or (own if own.is_file() else None)


def longest(jobs: Sequence[PromptSet]) -> int:
    return max(len(prompt) + job.max_new_tokens for job in jobs for prompt in job.prompts)


def in_turns(jobs: Sequence[PromptSet], count: int) -> list[Tokens]:
    """Return ``count`` prompts, from each task in turn, so that batches are ragged; raise ValueError if there are
    fewer."""
    longest = max(len(job.prompts) for job in jobs)
    found = [job.prompts[i] for i in range(longest) for job in jobs if i < len(job.prompts)]
    if len(found) < count:
        raise ValueError(f"--batch has {count} and there are {len(found)} prompts in all; raise --prompts")
    return found[:count]


def _write(result: TaskResult, folder: Path) -> list[Path]:
    """The report of ``forerun bench``, and a plot of the batches."""
    paths = write(result, folder, "speed")
    if result.batches:
        frame = plots.Frame("Batches of ragged prompts, greedy", "rows", "tokens per second of all rows", log=True,
                            note=caption(result.settings))  # fmt: skip
        lines = plots.by(result.batches, "contestant", "batch", "tokens_per_second", ("slowest", "fastest"))
        paths.append(folder / "speed-batches.png")
        plots.lines(paths[-1], frame, lines)
    return paths
