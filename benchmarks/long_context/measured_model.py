"""The models and prompts of long-context commands: real ones, or random weights with given acceptance rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.capacity.shapes import ModelShape
from benchmarks.long_context.long_bench import Prefilled, RequestMaker, prefill, sampled
from benchmarks.long_context.texts import Texts
from benchmarks.papers.baselines import RECIPES
from benchmarks.papers.simulated_acceptance import (
    SimulationOptions,
    check_simulated,
    random_model,
    random_prompt,
    simulated,
)
from benchmarks.reporting.common_options import (
    Contexts,
    GeneratedTokens,
    Temperatures,
    Text,
    Yarn,
    check_positions,
    check_yarn,
    numbers,
)
from forerun.cli.models import encoder, load_stretched, settings
from forerun.cli.options import LongOptions, ModelOptions, OutputOptions, Rounds
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import STORED
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import BUNDLED


@dataclass(frozen=True)
class LongStudyOptions(SimulationOptions, OutputOptions, LongOptions, ModelOptions):
    """Options of commands that decode after long prompts, real or simulated."""

    yarn: Yarn = None
    text: Text = None
    contexts: Contexts = "16000"
    temperatures: Temperatures = "0"
    rounds: Rounds = 3
    max_new_tokens: GeneratedTokens = 64

    def __post_init__(self) -> None:
        check_yarn(self.yarn)
        numbers("--contexts", self.contexts, int, 16)
        numbers("--temperatures", self.temperatures, float, 0.0)
        if self.simulate_acceptance is None:
            return
        if self.yarn is not None:
            raise ValueError("--simulate-acceptance has positions enough; leave --yarn out")
        if self.text is not None or self.model != BUNDLED or self.draft_model is not None:
            raise ValueError(
                "--simulate-acceptance has random weights and texts: give --shape and --draft-shape, "
                "not --model, --draft-model or --text"
            )

    @property
    def room(self) -> int:
        """Tokens that may follow a prompt: generated text and drafts."""
        return self.max_new_tokens + self.gamma2 + 128


@dataclass(frozen=True)
class MeasuredModel:
    """A model and its prompts.

    Attributes:
        settings: of the drafters.
        read: reads prompt i of n tokens with an engine.
        make: from a temperature to a maker of requests; a simulation has one temperature, which has no effect on it.
        texts: what prompts are cut from; None if they are random.
        label: a note on all output of a simulation.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    settings: LongContextConfig
    read: Callable[[Engine, int, int], Prefilled]
    make: Callable[[float], RequestMaker]
    texts: Texts | None = None
    label: str = ""

    def temperatures(self, listed: str) -> list[float]:
        """Those of an option's list that make a difference."""
        return [0.0] if self.label else [float(each) for each in listed.split(",")]


def real_model(options: LongStudyOptions, drafters: Sequence[str], longest: int) -> MeasuredModel:
    """The model and the texts that the options name.

    Raises:
        ValueError: if the model has too few positions for a prompt of ``longest`` tokens.
    """
    model, tokenizer = load_stretched(options)
    check_positions(longest, options.room, position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))

    def read(engine: Engine, index: int, length: int) -> Prefilled:
        return prefill(engine, texts.tokens(index, length), options.room)

    def make(temperature: float) -> RequestMaker:
        return sampled(temperature, options.max_new_tokens)

    return MeasuredModel(model, tokenizer, settings(options, drafters, model, tokenizer, RECIPES), read, make, texts)


def simulated_model(options: LongStudyOptions, drafters: Sequence[str]) -> MeasuredModel:
    """Random weights and keys, with the acceptance rates that the options state.

    Raises:
        ValueError: for drafters whose rates cannot be given, and for ``--dtype stored``.
    """
    check_simulated(drafters)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype if options.dtype != "auto" else "bfloat16" if device != "cpu" else "float32"
    if dtype == STORED:
        raise ValueError(f"--dtype is {STORED}, which is for GGUF files, and --shape has random weights; name another")
    shapes = ModelShape.parse(options.shape), ModelShape.parse(options.draft_shape)
    target, draft = (random_model(shape, getattr(torch, dtype), device) for shape in shapes)
    vocabulary = min(shape.vocabulary for shape in shapes)
    accepted, small = options.simulate_acceptance or 0.0, options.simulate_small_acceptance

    def read(engine: Engine, index: int, length: int) -> Prefilled:
        cache = None if engine.tiers is None else engine.tiers.cache(length + options.room)
        return random_prompt(engine.target, length, options.room, vocabulary, index, cache)

    def make(temperature: float) -> RequestMaker:
        return simulated(accepted, small, options.max_new_tokens, vocabulary)

    label = f"simulated acceptance {accepted:g}, of the small model {small:g}; {options.shape}, random, {dtype}"
    return MeasuredModel(target, None, options.settings(draft), read, make, label=label)
