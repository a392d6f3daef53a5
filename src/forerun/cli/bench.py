"""``forerun bench``: compare Forerun's drafters with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from forerun.bench.contestants import Bench
from forerun.bench.journal import Journal, about
from forerun.bench.machine import Row, plain_values
from forerun.bench.prompts_file import PromptLine, TemplateEncoder, encode_lines, prompt_sets, read_prompts_file
from forerun.bench.report import BenchResult, changed, summarise, write
from forerun.bench.rounds import PromptSet
from forerun.cli.bench_options import BENCH_DRAFTERS, BenchOptions
from forerun.cli.commands import FAILED
from forerun.cli.models import check_drafters, load_target, settings
from forerun.cli.terminal import progress_bar, say, show_report, stderr
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import quiet
from forerun.reference import demo_prompts


def run(options: BenchOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot; exit with status 1 if an output differs."""
    drafters = ["none", *(options.drafter or BENCH_DRAFTERS)]
    check_drafters(drafters, options)
    lines = _demo_lines() if options.prompts_file is None else read_prompts_file(options.prompts_file)
    with quiet():
        target, tokenizer = load_target(options)
        sets = _prompt_sets(options, lines, TemplateEncoder(tokenizer, options.raw), position_limit(target))
        long = settings(options, drafters, target, tokenizer)
        bench = Bench(target, drafters, long, tokenizer, options.skip or (), options.kv_dtype)
        bench.check_skip(sets)
    for name, reason in bench.refused.items():
        say(f"{name} is left out: {reason}")
    shared = about(options.model, dtype_name(target), str(target.device)) | options.drafting
    shared |= {"kv_dtype": options.kv_dtype}
    journal = Journal(options.out / "speed-turns.jsonl", shared, options.resume)  # created when all checks have passed
    paths: Sequence[Path] = []
    threads = {"threads of transformers": bench.threads_of_transformers}
    result = BenchResult([], plain_values(options) | {"dtype": dtype_name(target)} | threads)
    try:
        with quiet(), progress_bar(stderr(), "measuring") as progress:
            for rows in _measured(bench, sets, options.rounds, journal, progress):
                result = replace(result, rows=rows)
                paths = write(result, options.out, "speed")
    finally:
        if result.rows:  # also if a later round failed or was interrupted
            show_report(result.json if options.json else result.markdown, paths)
    check_texts(bench.engine.exactness, result.rows)


def _demo_lines() -> list[PromptLine]:
    return [PromptLine(i, prompt["kind"], prompt["prompt"]) for i, prompt in enumerate(demo_prompts(), 1)]


def _prompt_sets(
    options: BenchOptions, lines: Sequence[PromptLine], encoder: TemplateEncoder, limit: int | None
) -> list[PromptSet]:
    source = options.prompts_file or Path("(the demo's)")
    ids = encode_lines(source, lines, encoder, limit, options.max_new_tokens)
    return prompt_sets(lines, ids, options.prompts, options.warm_prompts, options.max_new_tokens)


def _measured(
    bench: Bench, sets: Sequence[PromptSet], rounds: int, journal: Journal, progress: Callable[[int, int], None]
) -> Iterator[list[Row]]:
    """Yield all rows so far, after each round of each task."""
    before: list[Row] = []
    for i, prompts in enumerate(sets):
        rows: list[Row] = []
        for turn, series in enumerate(bench.run(prompts, rounds, journal), 1):
            rows = summarise(series)
            progress(i * rounds + turn, len(sets) * rounds)
            yield before + rows
        before += rows


def check_texts(exactness: Exactness, rows: Sequence[Row]) -> None:
    """Exit with status 1 if an output differs from plain Forerun's although passes are exact."""
    if not (different := changed(rows)):
        return
    if exactness.level != "bitwise":
        say(f"{', '.join(different)}: some texts differ from plain Forerun's by rounding ({exactness.reason})")
        return
    say(f"{', '.join(different)}: some texts differ from plain Forerun's, and none may")
    raise typer.Exit(FAILED)
