"""The optimizers: Muon for the matrices inside the layers, AdamW for embeddings, heads and norms.

Muon is by Jordan (2024, https://kellerjordan.github.io/posts/muon/). torch's own multiplies in bfloat16, which is 50
times as slow as float32 on a CPU without such instructions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that takes singular values towards 1 (Jordan, 2024); five rounds reach 0.7 to 1.2."""
ROUNDS = 5
MOMENTUM = 0.95


class Muon(Optimizer):
    """Steps along the orthogonal matrix nearest to the momentum, in the parameters' type. ``lr`` is for a square
    matrix; taller ones get the root of their ratio more. ``weight_decay`` is the share of ``lr`` by which weights
    fade."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - MOMENTUM)
                direction = orthogonal(p.grad.lerp(momentum, MOMENTUM))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix ``[m, n]`` with all singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def build(model: nn.Module, muon_rate: float, adam_rate: float) -> list[Optimizer]:
    """Return both optimizers; each group keeps its full learning rate as ``peak``."""
    learned = [each for each in model.named_parameters() if each[1].requires_grad]
    named = [(p.ndim == 2 and "embed" not in name and "lm_head" not in name, p) for name, p in learned]
    matrices, others = [p for inside, p in named if inside], [p for inside, p in named if not inside]
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=muon_rate, weight_decay=0.01),
        AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def apply(optimizers: list[Optimizer], factor: float) -> None:
    """Step at ``factor`` times the peak rates, and clear the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def state(optimizers: list[Optimizer]) -> dict[str, torch.Tensor]:
    """Return all state as flat tensors named '<optimizer>.<parameter>.<entry>'."""
    flat: dict[str, torch.Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        for j, entries in optimizer.state_dict()["state"].items():
            flat |= {f"{i}.{j}.{name}": torch.as_tensor(value) for name, value in entries.items()}
    return flat


def restore(optimizers: list[Optimizer], flat: dict[str, torch.Tensor]) -> None:
    for i, optimizer in enumerate(optimizers):
        full = optimizer.state_dict()
        full["state"] = {}
        for key, value in flat.items():
            owner, parameter, name = key.split(".", 2)
            if int(owner) == i:
                full["state"].setdefault(int(parameter), {})[name] = value
        optimizer.load_state_dict(full)
