"""Whether a token's logits have the same bits whatever shares its pass: found out, not concluded from names.

A text is read in one pass, then in passes of 1 to 64 tokens, then as a branch of a tree beside wrong ones, packed with
another text. All logits must be equal, bit for bit. Then speculative decoding gives bit for bit what plain decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from forerun.block import Block
from forerun.caches.full import FullCache
from forerun.model.scorer import Scorer
from forerun.tree import ROOT, DraftTree, IntArray

PASSES = (1, 2, 3, 5, 8, 13, 16, 24, 64)
"""Tokens of the passes that a text is read in."""
BRANCH = 9
"""Tokens of the tree's right branch."""


@dataclass(frozen=True)
class Exactness:
    """What equals what.

    Attributes:
        level: ``bitwise`` if drafts cannot change a bit of the logits, else ``rounding``.
        reason: why only rounding, or None.
    """

    level: Literal["bitwise", "rounding"]
    reason: str | None = None


@torch.inference_mode()
def probe(scorer: Scorer, limit: int | None = None) -> Exactness:
    """Compare bits.

    Args:
        scorer: of the model.
        limit: positions that the model has; texts are no longer.
    """
    if scorer.device.type != "cpu":
        return Exactness("rounding", f"there is no kernel for {scorer.device.type} that sums in one order")
    sizes = list(PASSES)
    while limit is not None and len(sizes) > 1 and sum(sizes) + 1 > limit:
        sizes.pop()
    text = np.random.default_rng(1).integers(0, scorer.vocabulary, sum(sizes))
    whole = _read(scorer, text, [len(text)])
    parts = _read(scorer, text, sizes)
    for position in range(len(text)):
        if not torch.equal(whole[position], parts[position]):
            size = sizes[int(np.searchsorted(np.cumsum(sizes), position, side="right"))]
            return Exactness("rounding", f"a pass over {size} tokens rounds unlike one over {len(text)}")
    branch = min(BRANCH, len(text) // 2)
    if branch and not _in_a_tree(scorer, text, branch, whole):
        return Exactness("rounding", "a branch of a tree, beside another row, rounds unlike the text alone")
    return Exactness("bitwise")


def _read(scorer: Scorer, text: IntArray, sizes: Sequence[int]) -> torch.Tensor:
    """Logits at every token ``[t, V]``, read in passes of these sizes: a first token, and a chain under it."""
    cache, found = FullCache(), []
    for size in sizes:
        here = text[cache.length : cache.length + size]
        block = Block(here[:1], DraftTree.chain(here[1:]), cache.length)
        found.append(scorer.score([block], [cache])[0])
        cache.commit(block, range(size - 1))
    return torch.cat(found)


def _in_a_tree(scorer: Scorer, text: IntArray, branch: int, whole: torch.Tensor) -> bool:
    """Whether a branch's logits are those of the text, with wrong branches beside it and another row."""
    caches, start = [FullCache(), FullCache()], len(text) - branch - 1
    for cache in caches:
        block = Block(text[:start], DraftTree.empty(), 0)
        scorer.score([block], [cache])
        cache.commit(block, [])
    wrong = (text + 1) % scorer.vocabulary
    tokens, parents, places, above = [], [], [], ROOT
    for i in range(branch):
        tokens += [int(wrong[start + 1 + i]), int(text[start + 1 + i])]
        parents += [above, above]
        above = len(tokens) - 1
        places.append(above + 1)
    tree = DraftTree(np.array(tokens), np.array(parents))
    blocks = [Block(text[start : start + 1], each, start) for each in (DraftTree.chain(wrong[:5]), tree)]
    logits = scorer.score(blocks, caches)[1]
    return torch.equal(logits[[0, *places]], whole[start:])
