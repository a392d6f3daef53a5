"""Heads that compute all levels of a tree in one pass: P-EAGLE and the DFlash family."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kernels.linear.ordered_modules import Ordered
from forerun.models.heads.head import Growth, Head


class BlockHead(Head):
    """A head with one row of logits per level, in ``Growth.hidden``; by default, whatever tokens precede a node."""

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        with Ordered():
            each = zip(growths, parents, tokens, strict=True)
            return torch.cat([self.at_level(growth, growth.add(above), above, new) for growth, above, new in each])

    def at_level(self, growth: Growth, level: int, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Compute logits after new nodes of a level, ``[n, D]``."""
        rows = growth.hidden
        row = rows[level] if level < len(rows) else torch.zeros_like(rows[0])
        return row.expand(len(parents), -1)
