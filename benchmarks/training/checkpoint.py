"""Checkpoints: tensors as safetensors, the rest as JSON, no pickle. A folder is complete or absent.

A folder is written under another name. Then the old folder is renamed to '.old', and the new one to its final name.
Between the two renames `locate` finds the '.old' one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.training import optim


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill an empty folder, then replace `folder` by it."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def locate(folder: Path) -> Path | None:
    """Return the complete checkpoint at `folder`, if there is one."""
    candidates = (folder, folder.with_name(folder.name + ".old"))
    return next((path for path in candidates if (path / "state.json").exists()), None)


def save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write the model, the optimizers and the progress."""

    def write(new: Path) -> None:
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, new / "model.safetensors")
        save_file({name: p.clone() for name, p in optim.state(optimizers).items()}, new / "optimizer.safetensors")
        (new / "state.json").write_text(json.dumps(asdict(progress)))

    replace(folder, write)


def load(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore `model` and `optimizers` from what `save` wrote; return the progress, 0 without a checkpoint."""
    found = locate(folder)
    if found is None:
        return Progress()
    model.load_state_dict(load_file(found / "model.safetensors"), strict=False)
    optim.restore(optimizers, load_file(found / "optimizer.safetensors"))
    return Progress(**json.loads((found / "state.json").read_text()))
