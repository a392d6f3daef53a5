"""``python -m benchmarks papers triforce``: decoding after long prompts, compared with plain autoregression over the
same cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.capacity.shapes import ModelShape
from benchmarks.long_context import needles
from benchmarks.long_context.long_bench import LongBench, Prefilled, RequestMaker, prefill, sampled
from benchmarks.long_context.texts import Texts
from benchmarks.papers.recipes import RECIPES, buildable, check_drafter
from benchmarks.papers.simulated_acceptance import SIMULATED, check_simulated, random_model, random_prompt, simulated
from benchmarks.papers.triforce import MakerAt, ReadPrompt, TriforceBench, TriforceSizes
from benchmarks.papers.triforce_options import TRIFORCE_PARTS, TriforceOptions
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import check_positions, names, numbers
from benchmarks.reporting.tables import Report
from forerun.bench.machine import plain_values
from forerun.cli.models import encoder
from forerun.cli.models import settings as settings_for
from forerun.cli.terminal import say, stderr, working
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import STORED, dtype_name

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
    with working(stderr(), "loading"):
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
    for name in named:
        check_drafter(name)
    if set(named) == {"none"}:
        raise ValueError("--drafters is 'none', which is measured in any case; name others to compare with it")
    return named


def _room(options: TriforceOptions) -> int:
    """Tokens that may follow a prompt: questions, generated text and drafts."""
    return max(options.max_new_tokens, options.needle_tokens) + options.gamma2 + 128


def _real(options: TriforceOptions, named: list[str]) -> MeasuredModel:
    """Real models and texts."""
    model, tokenizer = load(
        options.model,
        options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        yarn=options.yarn,
    )
    longest = max(*numbers("--contexts", options.contexts, int, 1), options.batch_context or 0)
    check_positions(longest, _room(options), position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    trust = options.trust_remote_code
    settings = settings_for(options, options.model, named or DRAFTERS, model, tokenizer, trust, RECIPES)
    drafters = named or [name for name in DRAFTERS if name in buildable(settings)]
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
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    dtype = ("bfloat16" if device != "cpu" else "float32") if options.dtype == "auto" else options.dtype
    if dtype == STORED:
        raise ValueError(f"--dtype is {STORED}, which is for GGUF files, and --shape has random weights; name another")
    shapes = ModelShape.parse(options.shape), ModelShape.parse(options.draft_shape)
    vocabulary = min(shape.vocabulary for shape in shapes)
    target, draft = (random_model(shape, getattr(torch, dtype), device) for shape in shapes)
    accepted, small = options.simulate_acceptance or 0.0, options.simulate_small_acceptance
    engine = Engine(target, "none")

    def read(index: int, length: int) -> Prefilled:
        return random_prompt(engine.target, length, _room(options), vocabulary, index)

    def make(temperature: float) -> RequestMaker:
        return simulated(accepted, small, options.max_new_tokens, vocabulary)

    label = f"simulated acceptance {accepted:g}, of the small model {small:g}; {options.shape}, random, {dtype}"
    return MeasuredModel(engine, options.settings(draft), drafters, read, make, label=label)


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
