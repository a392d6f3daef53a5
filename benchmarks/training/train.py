"""``python -m benchmarks train-bundled``: make the tokenizer, the target and the draft, or a hybrid out of the target.

Finished ones are skipped, unfinished ones continued. The draft learns from the target's distributions (Hinton et al.,
2015). Progress goes to ``<out>/<name>/log.jsonl``. A model is exported halfway through its schedule and at the end.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import forerun.reference
from benchmarks.training import corpus, material, recipe, tasks, tokenizer, training_loop
from benchmarks.training.corpus import Batch, Corpus
from benchmarks.training.hybrid import hybrid_of
from benchmarks.training.recipe import Recipe
from benchmarks.training.tasks import Material
from benchmarks.training.training_loop import Training
from forerun.cli.options import DebugOptions

OUT = Path("runs/reference")
WEIGHTS = Path(forerun.reference.__file__).parent / "weights"
EARLY_EXPORT = 0.5


def token_losses(model: PreTrainedModel, batch: Batch, teacher: PreTrainedModel | None) -> torch.Tensor:
    """Return the loss of every token but a row's first: ``[rows, length - 1]``."""
    logits = _logits(model, batch)[:, :-1].float()
    if teacher is None:
        wanted = batch.tokens[:, 1:].flatten()
    else:
        with torch.no_grad():
            wanted = _logits(teacher, batch)[:, :-1].float().softmax(-1).flatten(0, 1)
    return cross_entropy(logits.flatten(0, 1), wanted, reduction="none").view(logits.shape[:2])


def _logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    mask = batch.mask.to(dtype) if batch.mask.is_floating_point() else batch.mask
    return model(batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False).logits


class ModelTraining(Training):
    """The training of one of the bundled models by a recipe."""

    def __init__(
        self, name: str, plan: Recipe, data: Corpus, out: Path, teacher: PreTrainedModel | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:  # fmt: skip
        self.name, self.plan, self.data, self.teacher = name, plan, data, teacher
        self.log_every, self.checkpoint_every = plan.log_every, plan.checkpoint_every
        self.losses = torch.compile(token_losses, dynamic=False) if plan.compiled else token_losses
        torch.manual_seed(plan.seed)
        super().__init__(model or LlamaForCausalLM(plan.shape.config()), out / name, plan.muon_rate, plan.adam_rate)

    @property
    def progress(self) -> float:
        return self.plan.progress(self.done.step, self.done.seconds)

    def rate(self) -> float:
        return self.plan.rate(self.progress)

    def loss(self) -> tuple[torch.Tensor, int]:
        """Return the weighted loss of the step's batch, and note the mean of each row under its kind."""
        batch = corpus.batch(self.data, self.plan.stage(self.progress), self.plan.seed, self.done.step)
        weights = batch.weights[:, 1:]
        with torch.autocast("cpu", torch.bfloat16) if self.plan.half else nullcontext():
            losses = self.losses(self.model, batch, self.teacher) * weights
        means = losses.detach().sum(1) / weights.sum(1).clamp(min=1e-9)
        for kind, mean in zip(batch.kinds, means.tolist(), strict=True):
            self.recent[kind].append(mean)
        return losses.sum() / weights.sum(), batch.tokens.numel()

    def train(self, weights: Path, stop_after: int | None = None) -> PreTrainedModel:

        def halfway(before: float) -> None:
            if before < EARLY_EXPORT <= self.progress:
                export(self.model, self.data.tokenizer, weights / self.name)

        self.fit(self.name, stop_after, halfway)
        export(self.model, self.data.tokenizer, weights / self.name)
        return self.model


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Replace ``folder`` atomically by the model in bfloat16 and its tokenizer."""
    eos = int(tokenizer.eos_token_id)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=eos, pad_token_id=eos, do_sample=False)

    def write(new: Path) -> None:
        half.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in new.iterdir():
            path.chmod(0o644)

    training_loop.replace(folder, write)


def shared_tokenizer(texts: Material, out: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        trained = tokenizer.train(tokenizer.sample(texts), vocabulary)
        training_loop.replace(folder, lambda new: trained.save_pretrained(new) and None)
    return tokenizer.load(folder)


def train_hybrid(texts: Material, plan: Recipe, out: Path, weights: Path) -> PreTrainedModel:
    folder = forerun.reference.bundled("target")
    teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    data = corpus.build(texts, tokenizer.load(folder))
    text = torch.tensor([corpus.window(data, "prose", 256, Random(i)) for i in range(8)])
    return ModelTraining("hybrid", plan, data, out, teacher, hybrid_of(teacher, text)).train(weights)


def train_quick(out: Path, weights: Path, stop_after: int | None = None) -> None:
    """Train a tiny target for a few steps on invented tasks, to show that the recipe runs."""
    rng = Random(0)
    texts = Material(tuple(tasks.paragraph(rng, Material()) for _ in range(200)))
    plan = Recipe(recipe.TINY, stages=recipe.QUICK, steps=8, log_every=2)
    data = corpus.build(texts, shared_tokenizer(texts, out, plan.shape.vocabulary))
    ModelTraining("target", plan, data, out).train(weights, stop_after)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DebugOptions):
    """Train the bundled target and draft, or a hybrid out of the target."""

    hybrid: Annotated[bool, typer.Option(help="Make only a hybrid (LFM2) out of the bundled target.")] = False
    books: Annotated[Path | None, typer.Option(help="A folder of .txt books.")] = None
    maths: Annotated[Path | None, typer.Option(help="A JSON-lines file of {prompt, answer}.")] = None
    out: Annotated[Path | None, typer.Option(help=f"Of checkpoints and logs; default {OUT} or below.")] = None
    weights: Annotated[Path | None, typer.Option(help="Of models; default the package, or below --out.")] = None
    minutes: Annotated[float, typer.Option(help="Minutes for the target, of all threads.")] = 60.0
    draft_minutes: Annotated[float, typer.Option(help="Minutes for the draft.")] = 12.0
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    compiled: Annotated[bool, typer.Option(help="Compile the model; needs a C++ compiler.")] = False
    quick: Annotated[bool, typer.Option(help="A tiny recipe that takes seconds and needs no data.")] = False


def run(options: TrainOptions) -> None:
    torch.set_num_threads(options.threads)
    out = options.out or OUT / ("quick" if options.quick else "hybrid" if options.hybrid else "")
    weights = options.weights or (out / "weights" if options.quick or options.hybrid else WEIGHTS)
    if options.quick:
        train_quick(out, weights)
        return
    if options.books is None or options.maths is None:
        raise ValueError("give --books and --maths, or --quick")
    half = bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # elsewhere ten times as slow as float32
    target = Recipe(recipe.TARGET, minutes=options.minutes, half=half, compiled=options.compiled)
    texts = material.read(options.books, options.maths)
    if options.hybrid:
        train_hybrid(texts, replace(target, stages=recipe.HYBRID_STAGES), out, weights)
        return
    draft = replace(target, shape=recipe.DRAFT, stages=recipe.DRAFT_STAGES, minutes=options.draft_minutes, seed=1)
    data = corpus.build(texts, shared_tokenizer(texts, out, target.shape.vocabulary))
    teacher = ModelTraining("target", target, data, out).train(weights).eval()
    ModelTraining("draft", draft, data, out, teacher).train(weights)
