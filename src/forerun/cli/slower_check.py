"""``forerun bench never-slower``: check on the user's model whether a drafter is ever slower than plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import typer
from transformers import PreTrainedTokenizerBase

from forerun.bench import never_slower
from forerun.bench.journal import Journal, about
from forerun.bench.machine import plain_values
from forerun.bench.never_slower import TASKS, TEXT_KINDS, UNDRAFTED, Material, SlownessTable, TableCell
from forerun.bench.prompts_file import TemplateEncoder, read_prompts_file
from forerun.bench.report import write
from forerun.cli.bench_options import NeverSlowerOptions
from forerun.cli.commands import FAILED
from forerun.cli.models import check_drafters, load_stretched, settings
from forerun.cli.terminal import progress_bar, show_report, stderr
from forerun.core.long_context import LongContextConfig
from forerun.decoding.level import Level
from forerun.decoding.recipes import Setup, build, buildable
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import quiet
from forerun.models.text.prompts import text_ids
from forerun.reference import demo_prompts

BATCHES, CONTEXTS, TEMPERATURES = (1, 4, 16), (100, 2_000), (0.0, 0.8, 1.0)


def run(options: NeverSlowerOptions) -> None:
    """Measure, print the table, and write JSON, Markdown and a plot; exit with status 1 if the promise is broken."""
    if options.drafter == UNDRAFTED:
        raise ValueError(f"drafter is {UNDRAFTED}; name another one, which is compared with it")
    named = [options.drafter, *(options.against or ())]
    check_drafters(named, options)
    with quiet():
        target, tokenizer = load_stretched(options)
        long = settings(options, named, target, tokenizer)
        names = list(dict.fromkeys([options.drafter, *(options.against or buildable(long))]))
        drafters = {name: _builder(name, long) for name in (*names, UNDRAFTED)}
        engine = Engine(target, UNDRAFTED, tokenizer=tokenizer)
    material = _material(options, tokenizer, engine.target.vocabulary)
    wanted = never_slower.cells(
        options.batch or BATCHES,
        options.context or CONTEXTS,
        options.temperature or TEMPERATURES,
        options.kind or TEXT_KINDS,
    )
    left_out = _left_out(options, wanted, material, position_limit(target))
    kept = [cell for cell in wanted if str(cell) not in left_out]
    if not kept:
        raise ValueError(f"no cell can be measured: {next(iter(left_out.values()))}")
    journal = Journal(
        options.out / "never-slower-draws.jsonl",
        about(options.model, dtype_name(target), str(target.device)) | options.drafting | {"yarn": options.yarn},
        options.resume,
    )
    result = SlownessTable([], plain_values(options) | {"dtype": dtype_name(target)}, left_out)
    with quiet(), progress_bar(stderr(), "measuring") as progress:
        rows = never_slower.measure(
            engine, drafters, material, kept, options.draws, options.max_new_tokens, journal, progress
        )
        for row in rows:
            result = replace(result, rows=[*result.rows, row])
            paths = write(result, options.out, "never-slower")
    show_report(result.json if options.json else result.markdown, paths)
    if any(map(never_slower.broken, result.rows)):
        raise typer.Exit(FAILED)


def _material(options: NeverSlowerOptions, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Material:
    encode = TemplateEncoder(tokenizer, options.raw)
    demo = [prompt["prompt"] for prompt in demo_prompts()]
    tasks = demo if options.prompts_file is None else [line.prompt for line in read_prompts_file(options.prompts_file)]
    text = "\n\n".join(demo) if options.text is None else options.text.read_text(encoding="utf-8")
    texts = options.draws if options.texts is None else min(options.texts, options.draws)
    known = min(len(tokenizer), vocabulary)
    return Material([encode(prompt) for prompt in tasks], text_ids(tokenizer, text), known, texts)


def _left_out(
    options: NeverSlowerOptions, wanted: list[TableCell], material: Material, limit: int | None
) -> dict[str, str]:
    """Return the cells that cannot be measured, with the reason."""
    longest = max(map(len, material.tasks))
    reasons = {}
    for cell in wanted:
        needed = max(cell.context, longest if cell.kind == TASKS else 0) + options.max_new_tokens
        if limit is not None and needed > limit:
            reasons[str(cell)] = f"it needs {needed:,} positions and the model has {limit:,}; see --yarn"
        elif not material.has(cell):
            reasons[str(cell)] = f"the text has {len(material.text):,} tokens; give a longer one by --text"
    return reasons


def _builder(name: str, settings: LongContextConfig) -> Callable[[Setup], Level]:
    return lambda setup: build(name, replace(setup, settings=settings))
