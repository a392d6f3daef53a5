"""The optimizers: Muon for the matrices inside the layers, AdamW for embeddings, heads and norms.

Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon/) is torch's own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Muon


def build(model: nn.Module, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Return the two optimizers; each parameter group keeps its full learning rate as `peak`."""
    named = [(p.ndim == 2 and "embed" not in name and "lm_head" not in name, p) for name, p in model.named_parameters()]
    matrices, others = [p for inside, p in named if inside], [p for inside, p in named if not inside]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=muon_rate, weight_decay=0.01),
        AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def apply(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Take one step at `factor` times the peak rates and clear the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def state(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return all state as flat tensors named '<optimizer>.<parameter>.<entry>'."""
    flat: dict[str, torch.Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        for j, entries in optimizer.state_dict()["state"].items():
            flat |= {f"{i}.{j}.{name}": torch.as_tensor(value) for name, value in entries.items()}
    return flat


def restore(optimizers: list[torch.optim.Optimizer], flat: dict[str, torch.Tensor]) -> None:
    """Restore the state that `state` returned."""
    for i, optimizer in enumerate(optimizers):
        full = optimizer.state_dict()
        full["state"] = {}
        for key, value in flat.items():
            owner, parameter, name = key.split(".", 2)
            if int(owner) == i:
                full["state"].setdefault(int(parameter), {})[name] = value
        optimizer.load_state_dict(full)
