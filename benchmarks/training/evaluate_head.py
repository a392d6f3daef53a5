"""``python -m benchmarks evaluate-head``: a trained head beside the trie, alone and in ``auto``, on held-out prompts.

Tokens per step, and speed over plain decoding, greedy and sampled. Contestants take turns prompt by prompt, each
round in a namespace of its own, so that no trie has seen an answer. Every text must equal the plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.reporting.common_options import ListOptions, list_option, numbers_of
from benchmarks.reporting.study_report import Report, deliver, listing
from benchmarks.training.self_written import read_rows
from forerun.bench.machine import Row, plain_values
from forerun.bench.rounds import sampling
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
from forerun.models.text.prompts import encode

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
    """The head, without shortlists once it is bound."""
    bind = head.bind

    def bound(target: Scorer) -> None:
        bind(target)
        head.output = None

    head.bind = bound  # type: ignore[method-assign]
    return head


@dataclass
class Contestant:
    """An engine, and what came of its texts: for each prompt the seconds of its runs; tokens and steps of all."""

    engine: Engine
    seconds: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0

    def answer(self, prompt: int, tokens: Sequence[int], turn: int, count: int, temperature: float) -> None:
        began = time.perf_counter()
        found = self.engine.generate(
            list(tokens), max_new_tokens=count, namespace=f"{temperature}/{turn}",
            **sampling(temperature, 1000 * turn + prompt),
        )  # fmt: skip
        self.seconds.setdefault(prompt, []).append(time.perf_counter() - began)
        request = found.requests[0]
        self.texts[turn, prompt] = request.generated.tolist()
        self.tokens, self.steps = self.tokens + request.stats.tokens, self.steps + request.stats.steps

    def row(self, plain: Contestant) -> Row:
        ratios = [median(plain.seconds[prompt]) / median(own) for prompt, own in self.seconds.items()]
        whole = [sum(median(own) for own in each.seconds.values()) for each in (plain, self)]
        differing = sum(text != plain.texts[key] for key, text in self.texts.items())
        return {
            "tokens_per_step": self.tokens / self.steps, "speed": whole[0] / whole[1], "least": min(ratios),
            "differing": differing,
        }  # fmt: skip


def engines(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: str) -> Mapping[str, Engine]:
    """Engines by what they draft with; those that draft over all logits only where shortlists are shorter."""

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
    """A level that scores all that the trie, the head or both propose, whatever that costs."""

    def made(setup: Setup) -> Level:
        trie = None if name == "head" else setup.trie()
        own = None if name == "trie" else HeadSource(load_head(head), setup.target)
        return setup.over(Planner(trie, own) if trie is not None else Planner(own))

    return made


def measure(options: EvaluateHeadOptions, prompts: Sequence[Sequence[int]], made: Mapping[str, Engine]) -> list[Row]:
    """Rows by temperature and drafter."""
    rows, wanted = list[Row](), options.heats
    with progress_bar(stderr(), "answers") as show:
        for number, temperature in enumerate(wanted):
            contestants = {name: Contestant(engine) for name, engine in made.items()}
            order = list(contestants.values())
            for each in order:
                each.engine.generate(list(prompts[0]), max_new_tokens=8, namespace="warm-up", do_sample=False)
            for turn in range(options.rounds):
                for prompt, tokens in enumerate(prompts):
                    show((number * options.rounds + turn) * len(prompts) + prompt,
                         len(wanted) * options.rounds * len(prompts))  # fmt: skip
                    shift = (prompt + turn) % len(order)
                    for each in order[shift:] + order[:shift]:
                        each.answer(prompt, tokens, turn, options.tokens, temperature)
            plain = contestants[PLAIN]
            rows += [
                {"temperature": temperature, "drafter": name} | each.row(plain) for name, each in contestants.items()
            ]
    return rows


def encoded(options: EvaluateHeadOptions, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts as tokens, each after as many of the others' as ``--context`` says."""
    texts = [row["prompt"] for row in read_rows(options.texts)]
    own = [encode([{"role": "user", "content": text}] if tokenizer.chat_template else text, tokenizer)[0]
           for text in texts]  # fmt: skip
    if not options.context:
        return own
    joined = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    filler = (joined * (1 + options.context // len(joined)))[: options.context]
    return [[*filler, *prompt] for prompt in own]


def run(options: EvaluateHeadOptions) -> None:
    torch.set_num_threads(options.threads)
    target, tokenizer = load(options.model, cast("Any", options.dtype))
    prompts = encoded(options, tokenizer)
    rows = measure(options, prompts, engines(target, tokenizer, options.head))
    report = Report("A trained head beside the trie", plain_values(options))
    report.add("heads", f"{len(prompts)} prompts", rows, listing(rows, COLUMNS))
    deliver(report, options.out, "evaluate-head", options.json)
