"""Checkpoints: tensors as safetensors, the rest as JSON, no pickle; a folder is whole or not there.

A folder is written beside its place, then renamed into it. Between the two renames the former folder is still there
under '.old', and `locate` finds it.
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

from forerun.reference import optim


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill an empty folder, then put that in the place of `folder`."""
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
    """Return the whole checkpoint at `folder`, if there is one."""
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
    """Restore what `save` wrote into `model` and `optimizers`; return the progress, 0 if nothing is there."""
    found = locate(folder)
    if found is None:
        return Progress()
    model.load_state_dict(load_file(found / "model.safetensors"), strict=False)
    optim.restore(optimizers, load_file(found / "optimizer.safetensors"))
    return Progress(**json.loads((found / "state.json").read_text()))
