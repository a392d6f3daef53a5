"""``forerun bench``: Forerun's drafters beside transformers' own ways to generate, on the bundled models."""

from __future__ import annotations

import json

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forerun.bench import report
from forerun.bench.machine import machine
from forerun.bench.prompts import KINDS, build_jobs
from forerun.bench.speed import Bench
from forerun.cli.options import BenchOptions
from forerun.cli.terminal import stderr, stdout, working
from forerun.model.load import BUNDLED, load
from forerun.reference import bundled, material


def run(options: BenchOptions) -> None:
    """Measure, print the table, and write JSON, Markdown and plots."""
    console = stderr()
    texts = material.read_held_out(options.books, options.maths)
    with working(console, "loading"):
        target, tokenizer = load(options.model)
        draft = load(str(bundled("draft")))[0] if options.model == BUNDLED else None
    jobs, skipped = build_jobs(
        options.task or list(KINDS),
        texts,
        lambda text: [int(token) for token in tokenizer(text)["input_ids"]],
        options.prompts,
        options.warm_prompts,
        options.max_new_tokens,
    )
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason} (--books, --maths)")
    bench = Bench(target, options.drafter or ["none", "lookup", "jacobi", "trie"], draft, tokenizer)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs))
        series = bench.run(jobs, options.rounds, lambda done, total: bar.update(task, completed=done))
    rows = report.summarise(series)
    settings = {
        "model": options.model,
        "prompts": options.prompts,
        "rounds": options.rounds,
        "max_new_tokens": options.max_new_tokens,
    }
    paths = report.write(rows, settings, options.out, "speed")
    if options.json:
        print(json.dumps({"settings": settings, "machine": machine(), "rows": rows}))  # noqa: T201
        return
    stdout().print(report.markdown(rows), soft_wrap=True)
    console.print(f"written: {', '.join(map(str, paths))}")
