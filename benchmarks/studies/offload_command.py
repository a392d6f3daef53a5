"""``python -m benchmarks offload``: keys and values that are not on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.long_context.long_bench import RequestMaker, sampled
from benchmarks.long_context.texts import Texts
from benchmarks.papers.recipes import RECIPES
from benchmarks.papers.simulated_acceptance import SimulatedModels, SimulationOptions, check_simulated, random_prompt
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import Contexts, GeneratedTokens, Temperatures, Text, Yarn, check_positions, numbers
from benchmarks.reporting.tables import Report
from benchmarks.studies.offload import OffloadBench, slow_link
from forerun.bench.machine import plain_values
from forerun.cli.models import check_drafters, encoder, load_stretched
from forerun.cli.models import settings as settings_for
from forerun.cli.options import LongOptions, MemoryOptions, ModelOptions, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.models.forward import gate
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.stored_weights import dtype_name


@dataclass(frozen=True)
class OffloadOptions(SimulationOptions, OutputOptions, MemoryOptions, LongOptions, ModelOptions):
    """Decoding with keys and values that are not on the device, compared with plain autoregression over the same ones.

    By default nothing of them stays but two layers, and on a CPU they come at a twentieth of the memory's bandwidth,
    which is measured. Each prompt is read once. Writes JSON, Markdown and a plot.
    """

    ALONE: ClassVar[tuple[str, ...]] = ("simulate_bandwidth",)

    yarn: Yarn = None
    text: Text = None
    contexts: Contexts = "16000"
    temperatures: Temperatures = "0"
    drafters: Annotated[
        str, option("--drafters", panel="Model", help="Names of recipes. Commas between.", metavar="LIST")
    ] = "trie,retrieval,triforce-trie,auto"
    rounds: Rounds = 3
    max_new_tokens: GeneratedTokens = 64
    out: Out = Path("runs/offload")

    def __post_init__(self) -> None:
        numbers("--contexts", self.contexts, int, 64)
        numbers("--temperatures", self.temperatures, float, 0.0)
        self.check_memory()


def run(options: OffloadOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot."""
    plots.check()
    drafters = [name.strip() for name in options.drafters.split(",")]
    check_drafters(drafters, options, RECIPES)
    contexts = sorted(numbers("--contexts", options.contexts, int, 64))
    subject = (_real if options.simulate_acceptance is None else _simulated)(options, drafters, contexts)
    model = subject.model
    shape = gate.admit(model).kv
    bandwidth = options.simulate_bandwidth or slow_link(model.device)
    settings = plain_values(options) | {"dtype": dtype_name(model), "bandwidth": bandwidth}
    report = Report("Keys and values off the device", settings, subject.label)
    delivery = Delivery(report, options.out, "offload", options.json)
    bench = OffloadBench(drafters, subject.settings, options.rounds, report, delivery.save, say)
    for context in contexts:
        least = min_device_bytes(shape, context + _room(options))
        device = least if options.kv_memory is None else options.kv_memory
        memory = KVMemory(device, options.kv_host_memory, options.kv_folder, bandwidth)
        engine = Engine(model, "none", tokenizer=subject.tokenizer, kv_memory=memory)
        subject.read(bench, engine, context)
        for temperature in [0.0] if subject.label else numbers("--temperatures", options.temperatures, float, 0.0):
            bench.decode(temperature, subject.make(temperature))
        engine.close()
    delivery.end()


@dataclass(frozen=True)
class OffloadedModel:
    """A model and its prompts, real or simulated.

    Attributes:
        read: gives a bench an engine and a prompt of this many tokens.
        make: requests at a temperature.
        label: a note on all output.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    settings: LongContextConfig
    read: Callable[[OffloadBench, Engine, int], None]
    make: Callable[[float], RequestMaker]
    label: str = ""


def _real(options: OffloadOptions, drafters: list[str], contexts: list[int]) -> OffloadedModel:
    model, tokenizer = load_stretched(options)
    check_positions(contexts[-1], _room(options), position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    texts.check(1, contexts[-1])

    def read(bench: OffloadBench, engine: Engine, context: int) -> None:
        bench.read(engine, texts.tokens(0, context), _room(options))

    def make(temperature: float) -> RequestMaker:
        return sampled(temperature, options.max_new_tokens)

    return OffloadedModel(model, tokenizer, settings_for(options, drafters, model, tokenizer, RECIPES), read, make)


def _simulated(options: OffloadOptions, drafters: list[str], contexts: list[int]) -> OffloadedModel:
    """Random weights and keys, with given acceptance rates."""
    check_simulated(drafters)
    models = SimulatedModels.build(options, options.device, options.dtype)

    def read(bench: OffloadBench, engine: Engine, context: int) -> None:
        assert engine.tiers is not None
        cache = engine.tiers.cache(context + _room(options))
        bench.take(engine, random_prompt(engine.target, context, _room(options), models.vocabulary, cache=cache))

    def make(temperature: float) -> RequestMaker:
        return models.requests(options.max_new_tokens)

    return OffloadedModel(models.target, None, options.settings(models.draft), read, make, models.label)


def _room(options: OffloadOptions) -> int:
    """Tokens that may follow a prompt: generated text and drafts."""
    return options.max_new_tokens + options.gamma2 + 128
