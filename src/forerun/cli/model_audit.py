"""``forerun audit`` of a model: check losslessness and show the result as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun import __version__
from forerun.audit.audit import Comparison, Plan, Report, audit
from forerun.cli.audit_options import AuditOptions
from forerun.cli.commands import FAILED
from forerun.cli.models import check_drafters, load_target, settings
from forerun.cli.prompt_input import read_prompts
from forerun.cli.terminal import progress_bar, stderr, stdout
from forerun.decoding.recipes import DRAFTERS
from forerun.engine.engine import BUDGET
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, quiet
from forerun.models.text.prompts import encode
from forerun.reference import demo_prompts

SMALL = 100_000_000
"""Parameters below which float64 is the default on a CPU. GPUs have no float64 kernels with a fixed order of sums."""

REFERENCES = {
    "greedy": "transformers' generate",
    "plain": "no drafter",
    "coupled": "plain sampling",
    "batch": "each prompt alone",
}


def run(options: AuditOptions) -> None:
    """Run the audit; exit with status 1 if an output differs by more than allowed, or a drafter never drafted."""
    texts = read_prompts(options.prompt, options.prompt_file)
    if not texts and options.model == BUNDLED:
        texts = [prompt["prompt"] for prompt in demo_prompts()]
    check_drafters(options.drafter or [], options)
    with quiet():
        model, tokenizer = _load(options)
        plan = _plan(options, model, tokenizer)
        prompts = encode(texts, tokenizer)
        with progress_bar(stderr(), "auditing") as progress:
            report = audit(model, prompts, plan, progress)
    if options.json:
        typer.echo(json.dumps(_as_json(options, plan, texts, report, tokenizer), ensure_ascii=False))
    else:
        show(stdout(), report, texts, tokenizer)
    if report.failures or report.never_drafted:
        raise typer.Exit(FAILED)


def _plan(options: AuditOptions, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Plan:
    drafters = options.drafter or list(DRAFTERS)
    return Plan(
        drafters=options.drafter or (),
        settings=settings(options, drafters, model, tokenizer),
        max_new_tokens=options.max_new_tokens,
        seeds=options.seeds,
        temperature=options.temperature,
        budget=BUDGET if options.budget is None else options.budget,
        kv_dtype=options.kv_dtype,
    )


def _load(options: AuditOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_target(options)
    small = model.num_parameters() < SMALL and model.device.type == "cpu"
    if options.dtype is None and options.kv_dtype == "auto" and small:
        model = model.to(torch.float64)
    return model, tokenizer


def show(console: Console, report: Report, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the table, every divergence, and the verdict."""
    console.print(_table(report))
    for comparison in report.divergences:
        console.print(_describe(comparison, texts, tokenizer))
    failed, differing = len(report.failures), len(report.divergences)
    console.print(_promise(report))
    if failed:
        console.print(f"[bold red]✗ {failed} of {len(report.comparisons)} texts differ.[/]")
    elif differing:
        console.print(f"[bold yellow]✓ No text differs by more than rounding ({differing} by rounding).[/]")
    else:
        console.print(f"[bold green]✓ All {len(report.comparisons)} texts are equal, token for token.[/]")
    if report.undrafted:
        console.print(f"[yellow]{len(report.undrafted)} texts had no draft, and show nothing about drafts.[/]")
    for name in report.never_drafted:
        console.print(f"[bold red]✗ {name} never drafted; give a longer prompt, or more tokens.[/]")


def _promise(report: Report) -> str:
    if report.exactness.level == "bitwise":
        return "Passes are exact to the bit: but for transformers' own rounding, any difference is a failure."
    return f"Passes are exact up to rounding: {escape(str(report.exactness.reason))}."


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"audit in {report.dtype}", title_style="bold", pad_edge=False)
    table.caption = "; ".join(f"{check}: against {what}" for check, what in REFERENCES.items())
    for name in ("drafter", "check", "texts", "tokens", "accepted", "equal", "rounding", "different"):
        table.add_column(name, justify="left" if name in ("drafter", "check") else "right", no_wrap=True)
    before = None
    for (drafter, check), group in _grouped(report.comparisons):
        if before not in (None, drafter):
            table.add_section()
        table.add_row("" if before == drafter else drafter, check, *_cells(group))
        before = drafter
    return table


def _grouped(comparisons: Sequence[Comparison]) -> list[tuple[tuple[str, str], list[Comparison]]]:
    keys = product(dict.fromkeys(comparison.drafter for comparison in comparisons), REFERENCES)
    groups = [(key, [each for each in comparisons if (each.drafter, each.check) == key]) for key in keys]
    return [(key, group) for key, group in groups if group]


def _verdicts(group: Sequence[Comparison]) -> dict[str, int]:
    """Count the outputs of a group that are equal, differ by rounding, or differ by more."""
    failed = sum(comparison.failed for comparison in group)
    differing = sum(comparison.divergence is not None for comparison in group)
    return {"equal": len(group) - differing, "rounding": differing - failed, "different": failed}


def _cells(group: Sequence[Comparison]) -> list[str]:
    counts = _verdicts(group)
    accepted, drafted = sum(c.accepted for c in group), sum(c.drafted for c in group)
    return [
        str(len(group)),
        str(sum(comparison.tokens for comparison in group)),
        f"{accepted}/{drafted}",
        f"[green]{counts['equal']}[/]",
        f"[yellow]{counts['rounding']}[/]" if counts["rounding"] else "·",
        f"[bold red]{counts['different']}[/]" if counts["different"] else "·",
    ]


def _describe(comparison: Comparison, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    divergence = comparison.divergence
    assert divergence is not None
    verdict = "[bold red]different[/]" if comparison.failed else "[yellow]rounding[/]"
    seed = "" if comparison.seed is None else f", seed {comparison.seed}"
    expected, got = (escape(_token(tokenizer, token)) for token in (divergence.expected, divergence.got))
    return (
        f"{verdict}  {comparison.drafter}, {comparison.check}{seed}, prompt {comparison.prompt + 1} "
        f"[dim]({escape(_shortened(texts[comparison.prompt]))})[/], token {divergence.position + 1}: "
        f"expected {expected}, got {got}\n"
        f"          [dim]margin {divergence.margin:.3g} (rounding allows {divergence.allowance:.2g}), "
        f"scores off by {divergence.error:.2g} relative ({divergence.tolerance:g} is allowed)[/]"
    )


def _token(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    return "the end" if token is None else f"{tokenizer.decode([token])!r} ({token})"


def _shortened(text: str, length: int = 32) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def _as_json(
    options: AuditOptions, plan: Plan, texts: Sequence[str], report: Report, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    return {
        "forerun": __version__,
        "model": options.model,
        "dtype": report.dtype,
        "plan": _plan_as_json(options, plan),
        "prompts": list(texts),
        "exactness": asdict(report.exactness),
        "lossless": not report.failures,
        "texts": len(report.comparisons),
        "undrafted": len(report.undrafted),
        "never_drafted": report.never_drafted,
        "rounding": len(report.divergences) - len(report.failures),
        "different": len(report.failures),
        "groups": [_group_as_json(*group) for group in _grouped(report.comparisons)],
        "divergences": [_divergence_as_json(comparison, tokenizer) for comparison in report.divergences],
    }


def _plan_as_json(options: AuditOptions, plan: Plan) -> dict[str, Any]:
    name = None if plan.settings.draft_model is None else options.draft_model or BUNDLED_DRAFT
    return asdict(replace(plan, settings=replace(plan.settings, draft_model=name)))


def _group_as_json(key: tuple[str, str], group: Sequence[Comparison]) -> dict[str, Any]:
    sums = {name: sum(getattr(c, name) for c in group) for name in ("tokens", "drafted", "accepted")}
    return {"drafter": key[0], "check": key[1], "texts": len(group), **_verdicts(group), **sums}


def _divergence_as_json(comparison: Comparison, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    divergence = comparison.divergence
    assert divergence is not None
    values = {name: None if value == float("inf") else value for name, value in asdict(divergence).items()}
    return {
        **{name: getattr(comparison, name) for name in ("drafter", "check", "prompt", "seed")},
        **values,
        "expected_text": _token(tokenizer, divergence.expected),
        "got_text": _token(tokenizer, divergence.got),
        "rounding": divergence.rounding,
    }
