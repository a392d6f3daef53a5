"""Rotary positions of keys: what a cache needs to move a token to another position.

Rotary embedding (Su et al. 2021, RoFormer) rotates pairs of a key's dimensions by angles proportional to its position.
So rotating a key by the difference of two positions moves it exactly; nothing else in it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LayerRotation:
    """The rotation of one layer's keys.

    Attributes:
        first, second: the dimensions that form pairs, m of each.
        frequencies: angle per position of each pair, float64 ``[m]``.
    """

    first: slice
    second: slice
    frequencies: torch.Tensor

    def __call__(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Keys ``[..., d]`` moved by ``by`` positions, computed in at least float32."""
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        angles = self.frequencies * by
        cos, sin = (part.to(wide.device, wide.dtype) for part in (angles.cos(), angles.sin()))
        a, b = wide[..., self.first], wide[..., self.second]
        turned = wide.clone()
        turned[..., self.first] = a * cos - b * sin
        turned[..., self.second] = b * cos + a * sin
        return turned.to(keys.dtype)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A model's rotary embedding, found by ``forerun.models.forward.rotary_probe.find_rotation``.

    Attributes:
        layers: the rotation of each layer's keys, or None if they do not depend on position.
    """

    layers: Mapping[int, LayerRotation | None]

    def __call__(self, layer: int, keys: torch.Tensor, by: int) -> torch.Tensor:
        """A layer's keys ``[1, Hkv, n, d]`` moved ``by`` positions later (earlier if negative)."""
        rotation = self.layers[layer]
        return keys if rotation is None or by == 0 else rotation(keys, by)
