"""How a model's keys turn with position: what a cache needs to move a token.

Rotary embedding (Su et al. 2021, RoFormer) turns pairs of a key's dimensions by an angle proportional to its position.
So a key moves by turning it further, by the difference of positions, and exactly so: nothing else in it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Turn:
    """What turns in the keys of a layer.

    Attributes:
        first, second: the dimensions that make up pairs; m of either.
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
    """A model's rotary embedding; ``forerun.model.rotation.find_rotation`` finds it.

    Attributes:
        turns: for each layer how its keys turn, or None if they do not depend on position.
    """

    turns: Mapping[int, Turn | None]

    def __call__(self, layer: int, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Keys of a layer as they would be ``by`` positions later (earlier if negative), ``[1, Hkv, n, d]``."""
        turn = self.turns[layer]
        return keys if turn is None or by == 0 else turn(keys, by)
