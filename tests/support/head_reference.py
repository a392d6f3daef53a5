"""What a head must compute, written out without a cache and without trees, and how a head is compared with it."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.head import Growth, Head, HeadSequence

TEXT = np.random.default_rng(3).integers(0, 48, 20)
LONG = np.random.default_rng(4).integers(0, 48, 201)
BRANCHES = ([3, 4, 5], [3, 4, 6], [3, 9], [11])
Exact = Callable[[list[int], int], torch.Tensor]
"""Logits behind a sequence, of which the target has read so many tokens."""


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[n, H, d]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over ``[n, H, d]`` of the keys that are seen, ``[n, m]``; causal without."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    seen = torch.ones(len(q), len(k)).tril().bool() if seen is None else seen
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def gated_mlp(x: torch.Tensor, w: dict[str, torch.Tensor], at: str) -> torch.Tensor:
    gate = torch.nn.functional.silu(x @ w[f"{at}gate_proj.weight"].T) * (x @ w[f"{at}up_proj.weight"].T)
    return gate @ w[f"{at}down_proj.weight"].T


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head's configuration, and its tensors under one form's names in float64."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return config, {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in tensors.items()}


@torch.inference_mode()
def check_tree(head: Head, model: PreTrainedModel, exact: Exact) -> None:
    """Logits at the nodes of a tree, for a sequence that is read in pieces and one beside it."""
    head.bind(Scorer(model))
    sequences, ends = [head.open(FullCache()), head.open(FullCache())], (18, 13)
    for sequence, end in zip(sequences, ends, strict=True):
        tokens = TEXT[: end + 1]
        states = states_of(head, model, tokens)[:-1]
        for first, last in ((0, 5), (5, 6), (6, end)):
            head.record(sequence, tokens[: last + 1], first, states[first:last])
            if last == 6:
                head.read([sequence])
    _check_here(head, sequences, [TEXT[: end + 1].tolist() for end in ends], exact)


@torch.inference_mode()
def check_long(head: Head, model: PreTrainedModel, exact: Exact) -> None:
    """Logits at chains and trees along 200 tokens, of a head that is told of one to thirty tokens at a time."""
    head.bind(Scorer(model))
    sequence, told, states = head.open(FullCache()), 0, states_of(head, model, LONG)
    for end in (3, 4, 7, 17, 46, 47, 60, 90, 119, 120, 150, 180, 199, 200):
        head.record(sequence, LONG[: end + 1], told, states[told:end])
        told = end
        _check_here(head, [sequence], [LONG[: end + 1].tolist()], exact)


def states_of(head: Head, model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """The target's states that a head reads, of every token."""
    found = model(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in head.layers], -1)


def _check_here(head: Head, sequences: list[HeadSequence], tokens: list[list[int]], exact: Exact) -> None:
    growths, logits = head.start(sequences)

    def check(row: int, node: int, path: tuple[int, ...], found: torch.Tensor) -> None:
        check_equal(found, exact([*tokens[row], *path], len(tokens[row]) - 1))

    for row, found in enumerate(logits):
        check(row, 0, (), found)
    grow(head, growths, BRANCHES, check, min(3, head.levels - 1))


def grow(
    head: Head, growths: Sequence[Growth], branches: Sequence[Sequence[int]], check: Callable[..., None], depth: int = 3
) -> None:
    """Extend every growth by the tree of these branches; ``check`` gets its row, node, path and logits."""
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for end in range(1, depth + 1):
        level = list(dict.fromkeys(tuple(branch[:end]) for branch in branches if len(branch) >= end))
        parents, tokens = [nodes[path[:-1]] for path in level], [path[-1] for path in level]
        logits = head.extend(growths, [parents] * len(growths), [tokens] * len(growths))
        nodes |= {path: len(nodes) + number for number, path in enumerate(level)}
        for row, own in enumerate(logits.split(len(level))):
            for path, found in zip(level, own, strict=True):
                check(row, nodes[path], path, found)


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits equal within the rounding of rotary angles, which are of float32 in a head."""
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-3), (found - expected).abs().max()
