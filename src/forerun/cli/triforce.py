"""``forerun bench triforce``: decoding after long prompts, beside plain autoregression over the same cache."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import PreTrainedModel

from forerun.bench import needles
from forerun.bench.longcontext import LongBench, RequestMaker, prefill, sampled
from forerun.bench.simulate import SIMULATED, Shape, check_simulated, random_model, random_prompt, simulated
from forerun.bench.tables import Report
from forerun.bench.texts import Texts
from forerun.bench.triforce import ReadPrompt, Sizes, TriforceBench
from forerun.cli.long_options import TRIFORCE_PARTS, TriforceOptions, names, numbers, plain
from forerun.cli.models import encoder
from forerun.cli.models import settings as settings_for
from forerun.cli.terminal import stderr, stdout, working
from forerun.engine import Engine
from forerun.model.load import load
from forerun.recipes import buildable, check_drafter
from forerun.settings import Settings

DRAFTERS = ("triforce", "triforce-trie", "triforce-auto", "streaming", "retrieval", "streaming-hierarchy")


def run(options: TriforceOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    for name in _named(options):
        check_drafter(name)
    if set(_named(options)) == {"none"}:
        raise ValueError("--drafters is 'none', which is measured in any case; name others to compare with it")
    console = stderr()
    simulating = options.simulate_acceptance is not None
    with working(console, "loading"):
        bench, encode = (_simulated if simulating else _loaded)(options, console.print)
    wanted = names("--parts", options.parts, TRIFORCE_PARTS)
    if {"temperatures", "budgets", "contexts"} & set(wanted):
        bench.alone(wanted)
    if "batches" in wanted:
        bench.batches()
    if "needles" in wanted and encode is not None:
        haystack = needles.build(encode, 0, bench.sizes.contexts[-1], options.needles)
        bench.say(f"reading a text of {len(haystack.text):,} tokens")
        bench.needles(
            haystack, needles.read_text(bench.bench.engine, haystack, 2 * needles.FACT_TOKENS + _room(options))
        )
    paths = bench.report.write(options.out, "triforce")
    if options.json:
        print(json.dumps(bench.report.json))  # noqa: T201
        return
    stdout().print(bench.report.markdown, soft_wrap=True, markup=False)
    console.print(f"written: {', '.join(map(str, paths))}")


def _named(options: TriforceOptions) -> list[str]:
    return [] if options.drafters is None else [name.strip() for name in options.drafters.split(",")]


def _room(options: TriforceOptions) -> int:
    """Tokens that follow a prompt, drafts included."""
    return max(options.max_new_tokens, options.needle_tokens) + options.gamma2 + 64


def _loaded(options: TriforceOptions, say: Any) -> tuple[TriforceBench, Texts | None]:
    """A bench over real models, and texts for them."""
    model, tokenizer = load(
        options.model, options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
    )
    texts = Texts.read(options.text, encoder(tokenizer))
    settings = settings_for(
        options, options.model, _named(options) or DRAFTERS, model, tokenizer, options.trust_remote_code
    )
    engine = Engine(model, "none")
    chosen = _named(options) or [name for name in DRAFTERS if name in buildable(settings)]

    def make(temperature: float) -> RequestMaker:
        return sampled(temperature, options.max_new_tokens)

    def read(index: int, length: int) -> Any:
        return prefill(engine, texts.tokens(index, length), _room(options))

    return _bench(options, engine, settings, chosen, read, make, _report(options, model, ""), say), texts


def _simulated(options: TriforceOptions, say: Any) -> tuple[TriforceBench, None]:
    """A bench over random weights and keys, with a stated acceptance."""
    chosen = _named(options) or [name for name in DRAFTERS if name in SIMULATED]
    check_simulated(chosen)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    dtype = ("bfloat16" if device != "cpu" else "float32") if options.dtype == "auto" else options.dtype
    shapes = Shape.parse(options.shape), Shape.parse(options.draft_shape)
    vocabulary = min(shape.vocabulary for shape in shapes)
    model, draft = (random_model(shape, getattr(torch, dtype), device) for shape in shapes)
    accepted, small = options.simulate_acceptance or 0.0, options.simulate_small_acceptance
    engine = Engine(model, "none")
    label = f"simulated acceptance {accepted:g}, of the small model {small:g}; {options.shape}, random, {dtype}"

    def make(temperature: float) -> RequestMaker:
        return simulated(accepted, small, options.max_new_tokens, vocabulary)

    def read(index: int, length: int) -> Any:
        return random_prompt(engine.target, length, _room(options), vocabulary, index)

    settings = options.settings(draft)
    return _bench(options, engine, settings, chosen, read, make, _report(options, model, label), say), None


def _bench(
    options: TriforceOptions,
    engine: Engine,
    settings: Settings,
    drafters: list[str],
    read: ReadPrompt,
    make: Any,
    report: Report,
    say: Any,
) -> TriforceBench:
    temperatures = "0" if options.simulate_acceptance is not None else options.temperatures
    batch_temperatures = "0" if options.simulate_acceptance is not None else options.batch_temperatures
    sizes = Sizes(
        contexts=sorted(numbers("--contexts", options.contexts, int, 1)),
        temperatures=numbers("--temperatures", temperatures, float, 0.0),
        drafters=drafters,
        prompts=options.prompts,
        batches=numbers("--batches", options.batches, int, 1),
        budgets=numbers("--budgets", options.budgets, int, 1),
        batch_budgets=numbers("--batch-budgets", options.batch_budgets, int, 1),
        batch_temperatures=numbers("--batch-temperatures", batch_temperatures, float, 0.0),
        needles=options.needles,
        needle_tokens=options.needle_tokens,
    )
    return TriforceBench(LongBench(engine, options.rounds), settings, sizes, read, make, report, say)


def _report(options: TriforceOptions, model: PreTrainedModel, label: str) -> Report:
    return Report(
        "TriForce on long contexts", plain(options) | {"dtype": str(model.dtype).removeprefix("torch.")}, label
    )
