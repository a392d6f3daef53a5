"""Training step by step, with checkpoints and a log; the same call resumes an interrupted run.

A checkpoint's folder is complete or absent: it is written under another name, the old folder is renamed to '.old', and
the new one to its final name. Between the two renames ``load`` finds the '.old' one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.training import optim
from forerun.cli.terminal import progress_bar, stderr


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Training:
    """A model that is trained in a folder; a subclass defines the schedule and the loss. Seconds are processor time
    divided by threads, so a schedule in minutes pauses while other work runs."""

    log_every = 20
    checkpoint_every = 120.0  # seconds
    largest_norm = 1.0  # gradients are clipped to it

    def __init__(self, model: nn.Module, folder: Path, muon_rate: float, adam_rate: float) -> None:
        self.model, self.folder = model, folder
        self.optimizers = optim.build(model, muon_rate, adam_rate)
        self.done = load(self.checkpoint, model, self.optimizers)
        self.recent: dict[str, list[float]] = defaultdict(list)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        raise NotImplementedError

    def rate(self) -> float:
        raise NotImplementedError

    def loss(self) -> tuple[torch.Tensor, int]:
        """Return the loss of the next batch and its number of tokens, and add figures of it to ``recent``."""
        raise NotImplementedError

    def advance(self) -> None:
        began = time.process_time()
        loss, tokens = self.loss()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_norm)
        optim.apply(self.optimizers, self.rate())
        seconds = self.done.seconds + (time.process_time() - began) / torch.get_num_threads()
        self.done = Progress(self.done.step + 1, self.done.tokens + tokens, seconds)

    def report(self) -> str:
        """Log the means of the figures since the last report, and return them as a line."""
        means = {name: round(sum(values) / len(values), 4) for name, values in sorted(self.recent.items())}
        self.recent.clear()
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(asdict(self.done) | {"progress": round(self.progress, 4), "means": means}) + "\n")
        return " ".join(f"{name} {value:.2f}" for name, value in means.items())

    def save(self) -> None:
        save(self.checkpoint, self.model, self.optimizers, self.done)

    def fit(
        self, title: str, stop_after: int | None = None, each: Callable[[float], None] = lambda before: None
    ) -> None:
        """Train to the end of the schedule, or for ``stop_after`` steps; call ``each`` after a step with the progress
        before it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved, first = time.monotonic(), self.done.step
        with progress_bar(stderr(), title) as show:
            while self.progress < 1 and (stop_after is None or self.done.step - first < stop_after):
                before = self.progress
                self.advance()
                if self.done.step % self.log_every == 0:
                    show(int(1000 * min(self.progress, 1.0)), 1000, self.report())
                if time.monotonic() - saved > self.checkpoint_every:
                    self.save()
                    saved = time.monotonic()
                each(before)
        self.save()


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill an empty folder, then replace ``folder`` by it."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:

    def write(new: Path) -> None:
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, new / "model.safetensors")
        save_file({name: p.clone() for name, p in optim.state(optimizers).items()}, new / "optimizer.safetensors")
        (new / "state.json").write_text(json.dumps(asdict(progress)))

    replace(folder, write)


def load(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore ``model`` and ``optimizers``; return the progress, 0 without a checkpoint."""
    candidates = (folder, folder.with_name(folder.name + ".old"))
    found = next((path for path in candidates if (path / "state.json").exists()), None)
    if found is None:
        return Progress()
    model.load_state_dict(load_file(found / "model.safetensors"), strict=False)
    optim.restore(optimizers, load_file(found / "optimizer.safetensors"))
    return Progress(**json.loads((found / "state.json").read_text()))
