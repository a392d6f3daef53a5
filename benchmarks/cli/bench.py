"""``forerun bench``: Forerun's drafters compared with transformers' own ways to generate, and with other engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks import own, plots, report
from benchmarks.chat import Encoder
from benchmarks.cli.bench_options import DRAFTERS, PROMPTS, BenchOptions
from benchmarks.cli.long_options import plain
from benchmarks.contestants import PADDED, Bench
from benchmarks.journal import Journal, about
from benchmarks.papers.recipes import check_drafter
from benchmarks.peers.known import Loaded, Subject, check, loaded
from benchmarks.prompts import Counts, build_jobs, own_jobs, positions_of
from benchmarks.questions import Files
from benchmarks.report import Result, Row
from benchmarks.speed import Decode, Job, Tokens
from benchmarks.tasksets import tasks_for
from forerun.cli.terminal import measuring, stderr, stdout, working
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load
from forerun.models.loading.stored_weights import dtype_name


def run(options: BenchOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    for name in options.drafter or ():
        check_drafter(name)
    console = stderr()
    lines = own.read(options.prompts_file) if options.prompts_file else []
    with working(console, "loading"):
        target, tokenizer = load(
            options.model, options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
        draft = load(BUNDLED_DRAFT, options.dtype, device=options.device)[0] if options.model == BUNDLED else None
    encoder = Encoder(tokenizer, options.raw)
    jobs, skipped, tasks = _jobs(options, encoder, lines, target)
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    batched = in_turns(jobs, max(options.batches(), default=0))
    dtype = dtype_name(target)
    settings = plain(options) | {"dtype": dtype, "tasks": tasks, "prompts": max(len(job.prompts) for job in jobs)}
    with _peers(options, Subject(target, tokenizer, _source(options), longest(jobs))) as peers:
        bench = Bench(target, options.drafter or DRAFTERS, draft, tokenizer, peers.contestants, options.skip or ())
        bench.check_skip(jobs, bool(batched))
        shared = about(options.model, dtype, str(target.device))
        journal = Journal(options.out / "speed-turns.jsonl", shared, options.resume)  # begun when nothing is wrong
        result = Result([], settings, [], skipped | peers.absent, peers.notes)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        with measuring(console) as progress:
            for rows, batches in _measured(bench, options, jobs, batched, journal, decode, progress):
                result = replace(result, rows=[*result.rows, *rows], batches=[*result.batches, *batches])
                paths = report.write(result, options.out, "speed")
    _show(options, result, paths)


def _measured(
    bench: Bench,
    options: BenchOptions,
    jobs: Sequence[Job],
    batched: Sequence[Tokens],
    journal: Journal,
    decode: Decode,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[list[Row], list[Row]]]:
    """The rows of a task's or batch size's table, yielded as they are measured."""
    total, new, rounds = len(jobs) + len(options.batches()), options.max_new_tokens, options.rounds
    for done, job in enumerate(jobs):
        progress(done, total)
        yield report.summarise(bench.run(job, rounds, journal), decode=decode), []
    for done, size in enumerate(options.batches(), len(jobs)):
        progress(done, total)
        rows = report.summarise(bench.run_batches(batched, size, new, rounds, journal), PADDED)
        yield [], [{"batch": size} | row for row in rows]


def _jobs(
    options: BenchOptions, encoder: Encoder, lines: Sequence[own.Line], model: PreTrainedModel
) -> tuple[list[Job], dict[str, str], str]:
    """The jobs, the skipped tasks with reasons, and the source of the tasks."""
    counts = Counts(options.prompts, options.warm_prompts, options.max_new_tokens)
    positions = positions_of(model)
    if options.prompts_file is not None:
        ids = own.encode(options.prompts_file, lines, encoder, positions, counts.new_tokens)
        return own_jobs(lines, ids, counts), {}, "the prompts file"
    tasks = tasks_for(encoder, Files(options.books, options.maths, options.code))
    counts = replace(counts, prompts=options.prompts or PROMPTS)
    jobs, skipped = build_jobs(options.task or list(tasks), tasks, encoder, counts, positions)
    if not jobs:
        raise ValueError(f"no task is left: {'; '.join(f'{task} {why}' for task, why in skipped.items())}")
    return jobs, skipped, "questions" if encoder.chats else "continuations"


@contextmanager
def _peers(options: BenchOptions, subject: Subject) -> Iterator[Loaded]:
    """The other engines, if requested."""
    if not options.peers:
        yield Loaded()
        return
    check(subject.model, subject.tokenizer, subject.source)
    with loaded(subject) as peers:
        for name, reason in peers.absent.items():
            stderr().print(f"skipped {name}: {reason}")
        yield peers


def _source(options: BenchOptions) -> Path | None:
    """The GGUF file that the model came from, if known."""
    own = Path(options.model).expanduser()
    return options.gguf or (own if own.is_file() else None)


def longest(jobs: Sequence[Job]) -> int:
    """Tokens of the longest prompt, including those generated after it."""
    return max(len(prompt) + job.max_new_tokens for job in jobs for prompt in job.prompts)


def in_turns(jobs: Sequence[Job], count: int) -> list[Tokens]:
    """``count`` prompts, from each task in turn, so that batches are ragged.

    Raises:
        ValueError: if there are fewer.
    """
    longest = max(len(job.prompts) for job in jobs)
    found = [job.prompts[i] for i in range(longest) for job in jobs if i < len(job.prompts)]
    if len(found) < count:
        raise ValueError(f"--batch has {count} and there are {len(found)} prompts in all; raise --prompts")
    return found[:count]


def _show(options: BenchOptions, result: Result, paths: Sequence[Path]) -> None:
    if options.json:
        print(json.dumps(result.json))
        return
    stdout().print(result.markdown, soft_wrap=True, markup=False)
    stderr().print(f"written: {', '.join(map(str, paths))}")
