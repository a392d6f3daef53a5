"""Trains the two bundled models: `python -m benchmarks train-bundled --books DIR --maths FILE --out DIR`.

It makes the tokenizer, the target and the draft, in this order. Finished ones are skipped, unfinished ones continued;
the same command resumes an interrupted run. The draft learns from the target's distributions (Hinton et al., 2015).
Progress goes to `<out>/<name>/log.jsonl`, and to stderr if that is a terminal. A model is exported to `--weights`
halfway through its schedule and at the end.
"""

from __future__ import annotations

import copy
import json
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import forerun.reference
from benchmarks.training import checkpoint, corpus, material, optim, recipe, tasks, tokenizer
from benchmarks.training.checkpoint import Progress
from benchmarks.training.corpus import Batch, Corpus
from benchmarks.training.recipe import Recipe
from benchmarks.training.tasks import Material
from forerun.cli.options import DebugOptions
from forerun.cli.terminal import progress_bar, stderr

OUT = Path("runs/reference")
WEIGHTS = Path(forerun.reference.__file__).parent / "weights"
EARLY_EXPORT = 0.5


def token_losses(model: PreTrainedModel, batch: Batch, teacher: PreTrainedModel | None) -> torch.Tensor:
    """Return the loss of every token but the first of each row: [rows, length - 1]."""
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
    logits: torch.Tensor = model(
        batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False
    ).logits
    return logits


@dataclass
class TrainingRun:
    """One model being trained; `advance` takes a step, `save` a checkpoint."""

    name: str
    plan: Recipe
    data: Corpus
    out: Path
    model: PreTrainedModel
    teacher: PreTrainedModel | None = None

    def __post_init__(self) -> None:
        self.optimizers = optim.build(self.model, self.plan.muon_rate, self.plan.adam_rate)
        self.losses = torch.compile(token_losses, dynamic=False) if self.plan.compiled else token_losses
        self.done = checkpoint.load(self.folder, self.model, self.optimizers)
        self.recent: dict[str, list[float]] = defaultdict(list)

    @property
    def folder(self) -> Path:
        return self.out / self.name / "checkpoint"

    @property
    def progress(self) -> float:
        return self.plan.progress(self.done.step, self.done.seconds)

    def advance(self) -> None:
        """Draw a batch, and take one step of both optimizers.

        Seconds are processor time divided by threads, so a schedule in minutes pauses while other work runs.
        """
        began = time.process_time()
        stage = self.plan.stage(self.progress)
        batch = corpus.batch(self.data, stage, self.plan.seed, self.done.step)
        weights = batch.weights[:, 1:]
        with torch.autocast("cpu", torch.bfloat16) if self.plan.half else nullcontext():
            losses = self.losses(self.model, batch, self.teacher) * weights
        torch.autograd.backward(losses.sum() / weights.sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optim.apply(self.optimizers, self.plan.rate(self.progress))
        self._note(batch, losses.detach())
        seconds = self.done.seconds + (time.process_time() - began) / torch.get_num_threads()
        self.done = Progress(self.done.step + 1, self.done.tokens + batch.tokens.numel(), seconds)

    def _note(self, batch: Batch, losses: torch.Tensor) -> None:
        means = losses.sum(1) / batch.weights[:, 1:].sum(1).clamp(min=1e-9)
        for kind, mean in zip(batch.kinds, means.tolist(), strict=True):
            self.recent[kind].append(mean)

    def report(self) -> dict[str, Any]:
        """Return step, speed and the mean loss of each kind since the last report, and append them to the log."""
        means = {kind: round(sum(values) / len(values), 4) for kind, values in sorted(self.recent.items())}
        line = {"step": self.done.step, "tokens": self.done.tokens, "seconds": round(self.done.seconds, 1)}
        entry = line | {"progress": round(self.progress, 4), "loss": means}
        with (self.out / self.name / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        self.recent.clear()
        return entry

    def save(self) -> None:
        checkpoint.save(self.folder, self.model, self.optimizers, self.done)


def fit(run: TrainingRun, weights: Path, stop_after: int | None = None) -> PreTrainedModel:
    """Train to the end of the schedule (or for `stop_after` steps), with checkpoints, reports and exports."""
    (run.out / run.name).mkdir(parents=True, exist_ok=True)
    saved, first = time.monotonic(), run.done.step
    with progress_bar(stderr(), run.name) as show:
        while run.progress < 1 and (stop_after is None or run.done.step - first < stop_after):
            before = run.progress
            run.advance()
            if run.done.step % run.plan.log_every == 0:
                losses = " ".join(f"{kind} {loss:.2f}" for kind, loss in run.report()["loss"].items())
                show(int(1000 * run.progress), 1000, losses)
            if time.monotonic() - saved > run.plan.checkpoint_every:
                run.save()
                saved = time.monotonic()
            if before < EARLY_EXPORT <= run.progress:
                export(run.model, run.data.tokenizer, weights / run.name)
    run.save()
    export(run.model, run.data.tokenizer, weights / run.name)
    return run.model


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Replace `folder` by the model in bfloat16 and its tokenizer, in one step, for transformers."""
    eos = int(tokenizer.eos_token_id)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=eos, pad_token_id=eos, do_sample=False)

    def write(new: Path) -> None:
        half.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in new.iterdir():
            path.chmod(0o644)

    checkpoint.replace(folder, write)


def fresh(plan: Recipe) -> PreTrainedModel:
    torch.manual_seed(plan.seed)
    return LlamaForCausalLM(plan.shape.config())


def shared_tokenizer(texts: Material, out: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Load the tokenizer from `out`, or train it and save it there."""
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        trained = tokenizer.train(tokenizer.sample(texts), vocabulary)
        checkpoint.replace(folder, lambda new: trained.save_pretrained(new) and None)
    return tokenizer.load(folder)


def train_both(texts: Material, target: Recipe, draft: Recipe, out: Path, weights: Path) -> None:
    data = corpus.build(texts, shared_tokenizer(texts, out, target.shape.vocabulary))
    teacher = fit(TrainingRun("target", target, data, out, fresh(target)), weights).eval()
    fit(TrainingRun("draft", draft, data, out, fresh(draft), teacher), weights)


def train_quick(out: Path, weights: Path, stop_after: int | None = None) -> None:
    """Train a tiny target for a few steps on invented tasks: it shows that the recipe runs, not that it works."""
    rng = Random(0)
    texts = Material(tuple(tasks.paragraph(rng, Material()) for _ in range(200)))
    plan = Recipe(recipe.TINY, stages=recipe.QUICK, steps=8, log_every=2)
    data = corpus.build(texts, shared_tokenizer(texts, out, plan.shape.vocabulary))
    fit(TrainingRun("target", plan, data, out, fresh(plan)), weights, stop_after)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DebugOptions):
    """Train the bundled target and draft."""

    books: Annotated[Path | None, typer.Option(help="A folder of .txt books.")] = None
    maths: Annotated[Path | None, typer.Option(help="A JSON-lines file of {prompt, answer}.")] = None
    out: Annotated[
        Path | None, typer.Option(help=f"Where checkpoints and logs go; default {OUT}, if quick {OUT}/quick.")
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(help="Where models are exported to; default the package, if quick weights in --out."),
    ] = None
    minutes: Annotated[float, typer.Option(help="Minutes for the target, of all threads.")] = 60.0
    draft_minutes: Annotated[float, typer.Option(help="Minutes for the draft.")] = 12.0
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    compiled: Annotated[bool, typer.Option(help="Compile the model; needs a C++ compiler.")] = False
    quick: Annotated[bool, typer.Option(help="A tiny recipe that takes seconds and needs no data.")] = False


def run(options: TrainOptions) -> None:
    torch.set_num_threads(options.threads)
    out = options.out or OUT / ("quick" if options.quick else "")
    weights = options.weights or (out / "weights" if options.quick else WEIGHTS)
    if options.quick:
        train_quick(out, weights)
        return
    if options.books is None or options.maths is None:
        raise ValueError("give --books and --maths, or --quick")
    half = bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # elsewhere ten times as slow as float32
    target = Recipe(recipe.TARGET, minutes=options.minutes, half=half, compiled=options.compiled)
    texts = material.read(options.books, options.maths)
    draft = replace(target, shape=recipe.DRAFT, stages=recipe.DRAFT_STAGES, minutes=options.draft_minutes, seed=1)
    train_both(texts, target, draft, out, weights)
