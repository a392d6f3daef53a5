"""``python -m benchmarks evaluate-head``: a trained head beside the trie, alone and in ``auto``, on held-out prompts.

Tokens per step, and speed over plain decoding. Contestants take turns prompt by prompt, each round in a new namespace,
so that no trie has seen an answer. Every output must equal the plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.reporting.common_options import ListOptions, json_lines, list_option, numbers_of
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import Contestant, Rows, Run, Series, Tokens, sampling
from forerun.bench.rounds import measure as measured
from forerun.cli.options import Out, OutputOptions, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.core.long_context import LongContextConfig
from forerun.decoding.level import Level
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Setup
from forerun.decoding.sources.head_source import HeadSource
from forerun.engine.engine import Engine
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.head import Head
from forerun.models.heads.loading import load_head
from forerun.models.loading.load import load

PLAIN, ALL_NODES = "none", "all nodes"
COLUMNS = {
    "temperature": "temperature", "drafter": "drafter", "tokens_per_step": "tokens per step", "speed": "over plain",
    "least": "slowest prompt", "differing": "texts that differ",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluateHeadOptions(ListOptions, OutputOptions):
    """A trained head beside the trie, alone and in auto, with and without a shortlist; on prompts that it has not seen.

    Writes JSON and Markdown.
    """

    model: Annotated[str, typer.Option(help="The target: a folder, a GGUF file, or bundled.")]
    head: Annotated[str, typer.Option(help="The head's folder, or mtp.")]
    texts: Annotated[Path, typer.Option(help="JSON lines of {prompt}.")]
    dtype: Annotated[str, typer.Option(help="Of the target's weights.")] = "bfloat16"
    temperatures: Annotated[str, list_option("Text", "0 is greedy.")] = "0,0.8"
    tokens: Annotated[int, option(panel="Text", help="Tokens of an answer.", min=1)] = 128
    context: Annotated[int, option(panel="Text", help="Tokens before each prompt, of the other prompts.", min=0)] = 0
    rounds: Annotated[int, option("--rounds", panel="Text", help="Times each prompt is answered.", min=1)] = 1
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    out: Out = Path("runs/evaluate-head")

    heats = numbers_of("temperatures", float, 0.0)


def with_all_logits(head: Head) -> Head:
    """Return the head, which drops its shortlists when it is bound."""
    bind = head.bind

    def bound(target: Scorer) -> None:
        bind(target)
        head.output = None

    head.bind = bound  # type: ignore[method-assign]
    return head


def contestant(engine: Engine, prompts: int, temperature: float) -> Contestant:
    """Return an engine that answers the prompts in order, in a new namespace each round."""
    answered = -1  # the first answer is the warm-up

    def run(rows: Rows, max_new_tokens: int) -> Run:
        nonlocal answered
        turn, prompt = divmod(answered, prompts)
        answered += 1
        began = time.perf_counter()
        [request] = engine.generate(
            list(rows[0]), max_new_tokens=max_new_tokens, namespace=f"{temperature}/{turn}",
            **sampling(temperature, abs(1000 * turn + prompt)),
        ).requests  # fmt: skip
        return Run([request.generated.tolist()], time.perf_counter() - began, request.stats.steps)

    return Contestant(run)


def row_of(one: Series, plain: Series) -> Row:
    mine, others = ([run for rounds in each.runs for run in rounds] for each in (one, plain))
    seconds = [[median(run.seconds for run in rounds) for rounds in each.runs] for each in (plain, one)]
    return {
        "drafter": one.contestant,
        "tokens_per_step": sum(run.tokens for run in mine) / sum(run.passes or 0 for run in mine),
        "speed": sum(seconds[0]) / sum(seconds[1]),
        "least": min(theirs / own for theirs, own in zip(*seconds, strict=True)),
        "differing": sum(a.texts != b.texts for a, b in zip(mine, others, strict=True)),
    }


def engines(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: str) -> Mapping[str, Engine]:
    """Return engines by drafter; those over all logits only where shortlists are shorter."""

    def made(drafter: str, own: Head | None = None) -> Engine:
        settings = LongContextConfig(draft_model=own)
        return Engine(target, drafter, settings=settings, tokenizer=tokenizer)

    found = {PLAIN: made(PLAIN), "trie": made("trie"), "auto": made("auto")}
    for name, drafter in (("head", "head"), ("auto with head", "auto")):
        own = load_head(head)
        found[name] = made(drafter, own)
        if own.output is not None and own.output.frequent is not None:
            found[f"{name}, all logits"] = made(drafter, with_all_logits(load_head(head)))
    for name in ("trie", "head", "both"):
        found[f"{name}, {ALL_NODES}"] = Engine(target, of_all_nodes(name, head), tokenizer=tokenizer)
    return found


def of_all_nodes(name: str, head: str) -> Callable[[Setup], Level]:
    """Return a maker of a level that scores all proposals of the trie, the head or both."""

    def made(setup: Setup) -> Level:
        trie = None if name == "head" else setup.trie()
        own = None if name == "trie" else HeadSource(load_head(head), setup.target)
        return setup.over(Planner(trie, own) if trie is not None else Planner(own))

    return made


def measure(options: EvaluateHeadOptions, prompts: Sequence[Tokens], made: Mapping[str, Engine]) -> Iterator[Row]:
    with progress_bar(stderr(), "temperatures") as show:
        for number, temperature in enumerate(options.heats):
            found = {name: contestant(engine, len(prompts), temperature) for name, engine in made.items()}
            show(number, len(options.heats))
            groups = [[prompt] for prompt in prompts]
            *_, series = measured(found, "prompts", groups, options.tokens, options.rounds)
            plain = next(one for one in series if one.contestant == PLAIN)
            yield from ({"temperature": temperature} | row_of(one, plain) for one in series)


def encoded(options: EvaluateHeadOptions, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the prompts as tokens, each after ``--context`` tokens of the others."""
    texts = [row["prompt"] for _, row in json_lines(options.texts, "--texts")]
    own = list(map(TemplateEncoder(tokenizer), texts))
    if not options.context:
        return own
    joined = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    filler = (joined * (1 + options.context // len(joined)))[: options.context]
    return [[*filler, *prompt] for prompt in own]


def run(options: EvaluateHeadOptions) -> None:
    torch.set_num_threads(options.threads)
    target, tokenizer = load(options.model, cast("Any", options.dtype))
    prompts = encoded(options, tokenizer)
    rows = list(measure(options, prompts, engines(target, tokenizer, options.head)))
    report = Report.of("A trained head beside the trie", options, "evaluate-head")
    report.add("heads", f"{len(prompts)} prompts", rows, listing(rows, COLUMNS))
    report.end()
