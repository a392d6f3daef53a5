"""Heads that compute all levels of a tree in one pass: P-EAGLE and DFlash."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.models.heads.head import Growth, Head


class BlockHead(Head):
    """A head with one row of logits per level, in ``Growth.hidden``, whatever tokens precede a node."""

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        parts = []
        for growth, above in zip(growths, parents, strict=True):
            depth, rows = growth.add(above), growth.hidden
            row = rows[depth] if depth < len(rows) else torch.zeros_like(rows[0])
            parts.append(row.expand(len(above), -1))
        return torch.cat(parts)
