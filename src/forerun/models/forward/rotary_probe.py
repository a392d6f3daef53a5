"""Measure how a model's keys rotate with position, without a list of architectures.

A single token attends only to itself. With rotary embedding its hidden states are then independent of its position, and
its keys at two positions differ by a rotation. Candidates are tried: frequencies are the model's ``inv_freq`` buffers;
paired dimensions are half a rotary width apart or adjacent, at the start or the end of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.cache import Cache
from forerun.kv.streaming import LayerRotation, Rotation
from forerun.models.forward.scorer import Scorer

PROBE_POSITIONS = (1, 2, 5, 19, 61)
"""Positions whose keys are compared with those at 0, below any length at which models change frequencies."""

PROBE_TOKENS = 4


@torch.inference_mode()
def find_rotation(scorer: Scorer) -> Rotation | None:
    """Find each layer's rotation of keys by position, or none for layers whose keys do not depend on position. Return
    None if some layer's keys fit no rotation: learned positions (GPT-2, OPT), or an unknown encoding."""
    limit = getattr(scorer.model.config, "max_position_embeddings", None) or PROBE_POSITIONS[-1] + 1
    at = {position: _keys(scorer, position) for position in (0, *PROBE_POSITIONS) if position < limit}
    frequencies = _frequencies(scorer.model)
    layers: dict[int, LayerRotation | None] = {}
    for layer, keys in at[0].items():
        moved = {position: found[layer] for position, found in at.items() if position}
        candidates = [None, *_candidates(frequencies, keys.shape[-1])]
        errors = [_error(candidate, keys, moved) for candidate in candidates]
        best = int(np.argmin(errors))
        if not errors[best] <= 1:
            return None
        layers[layer] = candidates[best]
    return Rotation(layers)


class _Probe(Cache):
    """A cache that records the keys of one token that attends only to itself."""

    def __init__(self, position: int) -> None:
        self.length = position
        self.keys: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        self.keys[layer] = k
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """Nothing is kept."""

    def truncate(self, length: int) -> None:
        """Nothing is kept."""

    @property
    def nbytes(self) -> int:
        return 0


def _keys(scorer: Scorer, position: int) -> dict[int, torch.Tensor]:
    """Return the keys of a few fixed tokens, each alone at ``position``, by layer; ``[PROBE_TOKENS, Hkv, 1, d]``."""
    tokens = np.random.default_rng(0).integers(0, scorer.vocabulary, (PROBE_TOKENS, 1))
    probes = [_Probe(position) for _ in range(PROBE_TOKENS)]
    scorer.score([Block(token, DraftTree.empty(), position) for token in tokens], probes)
    return {layer: torch.cat([probe.keys[layer] for probe in probes]) for layer in sorted(probes[0].keys)}


def _frequencies(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the model's distinct ``inv_freq`` buffers, rounded to float32 as in the model, as float64."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1:
            frequencies = buffer.float().double().cpu()
            if not any(torch.equal(frequencies, other) for other in found):
                found.append(frequencies)
    return found


def _candidates(frequencies: Sequence[torch.Tensor], d: int) -> Iterator[LayerRotation]:
    for f in frequencies:
        m = len(f)
        for start in {0, d - 2 * m} if d >= 2 * m else ():
            yield LayerRotation(slice(start, start + m), slice(start + m, start + 2 * m), f)
            yield LayerRotation(slice(start, start + 2 * m, 2), slice(start + 1, start + 2 * m, 2), f)


def _error(turn: LayerRotation | None, keys: torch.Tensor, moved: dict[int, torch.Tensor]) -> float:
    """Return predicted keys' largest relative error, in units of that from rounding angles, which grows with the
    position, cosines, sines and keys."""
    wide = keys.double()
    errors = []
    for position, found in moved.items():
        predicted = wide if turn is None else turn(wide, position)
        error = (predicted - found.double()).norm() / wide.norm().clamp_min(1e-300)
        rounding = 4 * torch.finfo(keys.dtype).eps + (2 + position) * torch.finfo(torch.float32).eps
        errors.append(float(error) / rounding)
    return max(errors)
