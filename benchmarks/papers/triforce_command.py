"""``python -m benchmarks papers triforce``: decoding after long prompts, compared with plain autoregression over the
same cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.long_context import needles
from benchmarks.long_context.long_bench import LongBench, Prefilled, RequestMaker, prefill, sampled
from benchmarks.long_context.texts import Texts
from benchmarks.papers.recipes import RECIPES
from benchmarks.papers.simulated_acceptance import (
    SIMULATED,
    SimulatedModels,
    SimulationOptions,
    check_simulated,
    random_prompt,
)
from benchmarks.papers.triforce import MakerAt, ReadPrompt, TriforceBench, TriforceSizes
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import (
    ContextPrompts,
    Contexts,
    GeneratedTokens,
    Needles,
    Temperatures,
    Text,
    Yarn,
    check_positions,
    check_yarn,
    list_option,
    names,
    numbers,
)
from benchmarks.reporting.tables import Report
from forerun.bench.machine import plain_values
from forerun.cli.models import check_drafters, encoder, load_stretched
from forerun.cli.models import settings as settings_for
from forerun.cli.options import LONG_PANEL, LongOptions, ModelOptions, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig
from forerun.drafting.recipes import buildable
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.stored_weights import dtype_name

TRIFORCE_PARTS = ("temperatures", "budgets", "contexts", "batches", "needles")


@dataclass(frozen=True)
class TriforceOptions(SimulationOptions, OutputOptions, LongOptions, ModelOptions):
    """Decoding after long prompts: TriForce and its baselines compared with plain autoregression over the same cache.

    Measures speed-up and acceptance rate by temperature, by context (with the limit set by measured costs) and in
    batches, and the needles that eviction alone loses. Each prompt is read once. Writes JSON, Markdown and plots.
    """

    yarn: Yarn = None
    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(TRIFORCE_PARTS)}.")] = ",".join(TRIFORCE_PARTS)
    text: Text = None
    contexts: Contexts = "4000,16000"
    temperatures: Temperatures = "0,0.2,0.4,0.6,0.8,1.0,1.2"
    drafters: Annotated[str | None, list_option("--drafters", "Model", "Default: all that can be built.")] = None
    prompts: ContextPrompts = 1
    rounds: Rounds = 3
    max_new_tokens: GeneratedTokens = 128
    budgets: Annotated[str, list_option("--budgets", LONG_PANEL, "Cache budgets, to compare.")] = "256,1024,4096"
    batches: Annotated[str, list_option("--batches", "Text", "Rows that are decoded together.")] = "2,6,10"
    batch_context: Annotated[
        int | None,
        option("--batch-context", panel="Text", help="Tokens of each row of a batch; by default rows are ragged and "
               "share the longest context's.", min=16),
    ] = None  # fmt: skip
    batch_budgets: Annotated[str, list_option("--batch-budgets", LONG_PANEL, "Cache budget of a row in a batch.")] = (
        "256,1024"
    )
    batch_temperatures: Annotated[str, list_option("--batch-temperatures", "Text", "Of batches.")] = "0,0.6"
    needles: Needles = 10
    needle_tokens: Annotated[int, option("--needle-tokens", panel="Text", help="Generated for each.", min=2)] = 48
    out: Out = Path("runs/triforce")

    def __post_init__(self) -> None:
        wanted = names("--parts", self.parts, TRIFORCE_PARTS)
        check_yarn(self.yarn)
        numbers("--contexts", self.contexts, int, 16)
        numbers("--temperatures", self.temperatures, float, 0.0)
        numbers("--batches", self.batches, int, 1)
        numbers("--budgets", self.budgets, int, self.chunk)
        numbers("--batch-budgets", self.batch_budgets, int, self.chunk)
        numbers("--batch-temperatures", self.batch_temperatures, float, 0.0)
        if self.simulate_acceptance is not None:
            if self.yarn is not None:
                raise ValueError("--simulate-acceptance has positions enough; leave --yarn out")
            if "needles" in wanted and self.parts != ",".join(TRIFORCE_PARTS):
                raise ValueError("--parts has needles, which random weights cannot find; leave them out")
            if self.text is not None or self.model != "bundled" or self.draft_model is not None:
                raise ValueError("--simulate-acceptance has random weights and texts: give --shape and --draft-shape, "
                                 "not --model, --draft-model or --text")  # fmt: skip


DRAFTERS = ("triforce", "triforce-trie", "triforce-auto", "low-rank", "streaming", "retrieval", "streaming-hierarchy")
"""TriForce, Forerun's own drafters, and the paper's baselines: the naive policy, no hierarchy, no retrieval."""

ALONE = frozenset({"temperatures", "budgets", "contexts"})
"""Parts that measure single rows."""


@dataclass(frozen=True)
class MeasuredModel:
    """Models and prompts to measure, real or simulated.

    Attributes:
        texts: for needles; None if there is no real text.
        label: a note on all output.
    """

    engine: Engine
    settings: LongContextConfig
    drafters: list[str]
    read: ReadPrompt
    make: MakerAt
    texts: Texts | None = None
    label: str = ""


def run(options: TriforceOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    named = _named(options)
    subject = (_real if options.simulate_acceptance is None else _simulated)(options, named)
    dtype = dtype_name(subject.engine.target.model)
    report = Report("TriForce on long contexts", plain_values(options) | {"dtype": dtype}, subject.label)
    delivery = Delivery(report, options.out, "triforce", options.json)
    bench = TriforceBench(
        LongBench(subject.engine, options.rounds, say),
        subject.settings,
        _sizes(options, subject),
        subject.read,
        subject.make,
        report,
        say,
        delivery.save,
        delivery.part,
    )
    _measure(bench, options, subject)
    delivery.end()


def _measure(bench: TriforceBench, options: TriforceOptions, subject: MeasuredModel) -> None:
    parts, haystack = names("--parts", options.parts, TRIFORCE_PARTS), None
    if subject.texts is not None:
        _check_texts(bench.sizes, subject.texts, parts)
        if "needles" in parts:
            haystack = needles.build(subject.texts, 0, bench.sizes.contexts[-1], options.needles)
    if ALONE & set(parts):
        bench.alone(parts)
    if "batches" in parts:
        bench.batches()
    if haystack is not None:
        bench.say(f"reading a text of {len(haystack.text):,} tokens")
        bench.needles(haystack, needles.read_text(subject.engine, haystack, _room(options), say))


def _check_texts(sizes: TriforceSizes, texts: Texts, parts: Sequence[str]) -> None:
    """Check that the texts are long enough for all that will be read."""
    if ALONE & set(parts):
        texts.check(sizes.prompts, sizes.contexts[-1])
    if "batches" in parts:
        for size in sizes.batches:
            for row, length in enumerate(sizes.rows(size)):
                texts.tokens(row, length)


def _named(options: TriforceOptions) -> list[str]:
    """The drafters named on the command line, if any."""
    named = [] if options.drafters is None else [name.strip() for name in options.drafters.split(",")]
    check_drafters(named, options, RECIPES)
    if set(named) == {"none"}:
        raise ValueError("--drafters is 'none', which is measured in any case; name others to compare with it")
    return named


def _room(options: TriforceOptions) -> int:
    """Tokens that may follow a prompt: questions, generated text and drafts."""
    return max(options.max_new_tokens, options.needle_tokens) + options.gamma2 + 128


def _real(options: TriforceOptions, named: list[str]) -> MeasuredModel:
    """Real models and texts."""
    model, tokenizer = load_stretched(options)
    longest = max(*numbers("--contexts", options.contexts, int, 1), options.batch_context or 0)
    check_positions(longest, _room(options), position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    settings = settings_for(options, named or DRAFTERS, model, tokenizer, RECIPES)
    drafters = named or [name for name in DRAFTERS if name in buildable(settings, RECIPES)]
    engine = Engine(model, "none", tokenizer=tokenizer)

    def read(index: int, length: int) -> Prefilled:
        return prefill(engine, texts.tokens(index, length), _room(options), say)

    def make(temperature: float) -> RequestMaker:
        return sampled(temperature, options.max_new_tokens)

    return MeasuredModel(engine, settings, drafters, read, make, texts)


def _simulated(options: TriforceOptions, named: list[str]) -> MeasuredModel:
    """Random weights and keys, with given acceptance rates."""
    drafters = named or [name for name in DRAFTERS if name in SIMULATED]
    check_simulated(drafters)
    models = SimulatedModels.build(options, options.device, options.dtype)
    engine = Engine(models.target, "none")

    def read(index: int, length: int) -> Prefilled:
        return random_prompt(engine.target, length, _room(options), models.vocabulary, index)

    def make(temperature: float) -> RequestMaker:
        return models.requests(options.max_new_tokens)

    return MeasuredModel(engine, options.settings(models.draft), drafters, read, make, label=models.label)


def _sizes(options: TriforceOptions, subject: MeasuredModel) -> TriforceSizes:
    """The sizes from the options; a simulation has one temperature, which has no effect on it."""
    temperatures = [0.0] if subject.label else numbers("--temperatures", options.temperatures, float, 0.0)
    of_batches = [0.0] if subject.label else numbers("--batch-temperatures", options.batch_temperatures, float, 0.0)
    return TriforceSizes(
        contexts=sorted(numbers("--contexts", options.contexts, int, 1)),
        temperatures=temperatures,
        drafters=subject.drafters,
        prompts=options.prompts,
        batches=numbers("--batches", options.batches, int, 1),
        batch_context=options.batch_context,
        budgets=numbers("--budgets", options.budgets, int, 1),
        batch_budgets=numbers("--batch-budgets", options.batch_budgets, int, 1),
        batch_temperatures=of_batches,
        needle_tokens=options.needle_tokens,
    )
