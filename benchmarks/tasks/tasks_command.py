"""``python -m benchmarks tasks``: Forerun's drafters beside transformers' own ways to generate, and other engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.papers.lookahead_trie import RECIPES
from benchmarks.peers.peer_libraries import PeerSubject, RunningPeers, check, running_peers
from benchmarks.peers.process import check_python
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import PeerPython, SourceOptions
from benchmarks.reporting.turns import journal_of
from benchmarks.tasks.task_bench import TaskBench
from benchmarks.tasks.task_prompts import Counts
from benchmarks.tasks.task_sets import jobs_for
from forerun.bench.machine import Row, footer, plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.report import BenchResult, equality_table, speed_table, summarise, warnings, write
from forerun.cli.bench import check_texts
from forerun.cli.models import check_drafters, load_target
from forerun.cli.options import Drafters, MaxNewTokens, ModelOptions, Out, OutputOptions, Resume, Rounds, Skip, option
from forerun.cli.terminal import progress_bar, show_report, stderr
from forerun.core.long_context import LongContextConfig
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load_draft

DRAFTERS = ("none", "auto", "lookup", "trie")  # those that are measured unless others are named


@dataclass(frozen=True)
class TaskOptions(OutputOptions, SourceOptions, ModelOptions):
    """Compare Forerun's drafters with transformers' greedy, prompt lookup and assisted generation, on any model.

    Models with a chat template answer questions (maths, code, rag, summary, edit, table). Others continue texts (copy,
    json, rag, code, maths, prose). Contestants take turns in one process; medians count. Every drafter runs cold, the
    trie also warm; default: none, auto, lookup, trie. Writes JSON, Markdown and plots.
    """

    drafter: Drafters = None
    task: Annotated[list[str] | None, option("--task", "-k", panel="Text", help="Default: all.")] = None
    prompts: Annotated[int, option(panel="Text", help="Per task.", min=1)] = 4
    warm_prompts: Annotated[int, option(panel="Text", help="Answered before when warm.", min=0)] = 20
    rounds: Rounds = 5
    max_new_tokens: MaxNewTokens = 160
    peers: Annotated[bool, option("--peers", panel="Compared with", help="OpenVINO and llama.cpp.")] = False
    peer_python: PeerPython = None
    gguf: Annotated[Path | None, option(panel="Compared with", help="The model's GGUF file, for the peers.")] = None
    skip: Skip = None
    out: Out = Path("runs/bench")
    resume: Resume = False

    def __post_init__(self) -> None:
        for name in ("gguf", "peer_python"):
            if getattr(self, name) is not None and not self.peers:
                raise ValueError(f"--{name.replace('_', '-')} is for the peers; add --peers")
        check_python(self.peer_python)
        if self.gguf is not None and not self.gguf.is_file():
            raise ValueError(f"--gguf is {self.gguf}; there is no such file")


@dataclass(frozen=True)
class TaskResult(BenchResult):
    """Rows by task; what was not measured, and why; and notes for a reader."""

    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def json(self) -> Row:
        return super().json | {"skipped": dict(self.skipped), "notes": [*self.notes, *warnings(self.rows)]}

    @property
    def markdown(self) -> str:
        parts = [speed_table(self.rows), equality_table(self.rows)]
        parts += [f"{note}\n" for note in [*self.notes, *warnings(self.rows)]]
        parts += [f"Not measured: {name}: {reason}.\n" for name, reason in self.skipped.items()]
        return "\n".join([*parts, footer(self.settings)])


def run(options: TaskOptions) -> None:
    plots.check()
    check_drafters(options.drafter or DRAFTERS, options, RECIPES)
    target, tokenizer = load_target(options)
    draft = load_draft(BUNDLED_DRAFT, target, tokenizer) if options.model == BUNDLED else None
    encoder = TemplateEncoder(tokenizer, options.raw)
    counts = Counts(options.prompts, options.warm_prompts, options.max_new_tokens)
    jobs, skipped = jobs_for(options.task, options, encoder, counts, position_limit(target))
    longest = max(len(prompt) + job.max_new_tokens for job in jobs for prompt in job.prompts)
    dtype = dtype_name(target)
    settings = plain_values(options) | {"dtype": dtype, "tasks": "questions" if encoder.chats else "continuations"}
    own = Path(options.model).expanduser()
    source = options.gguf or (own if own.is_file() else None)
    with _peers(options, PeerSubject(target, tokenizer, source, longest)) as peers:
        long, drafters = LongContextConfig(draft_model=draft), options.drafter or DRAFTERS
        bench = TaskBench(target, drafters, long, tokenizer, options.skip or (), others=peers.contestants)
        bench.check_skip(jobs)
        journal = journal_of(options, "speed", options.model, dtype, str(target.device), peers=peers.notes)
        result = TaskResult([], settings, skipped | peers.absent | bench.refused, peers.notes)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        with progress_bar(stderr(), "measuring") as progress:
            for done, job in enumerate(jobs):
                progress(done, len(jobs))
                *_, series = bench.run(job, options.rounds, journal)
                result = replace(result, rows=[*result.rows, *summarise(series, decode=decode)])
                paths = write(result, options.out, "speed")
    show_report(result.json if options.json else result.markdown, paths)
    check_texts(bench.engine.exactness, result.rows)


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
