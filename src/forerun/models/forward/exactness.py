"""Tests whether a token's logits have the same bits whatever shares its pass. It measures; it trusts no names.

A text is read in one pass, then in passes of 1 to 64 tokens, then as a branch of a tree with wrong branches, alone and
packed with another text. If all logits are equal bit for bit, texts with and without drafts are equal as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, get_args

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.kernels import gpu
from forerun.kernels.runtime.vector_ir import unusable
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer

PROBED_PASS_TOKENS = (1, 2, 3, 5, 8, 13, 16, 24, 64)
"""Sizes of the passes that read the text, in tokens."""
PROBED_BRANCH_TOKENS = 9
"""Length of the tree's right branch, in tokens."""
BRANCH_ROUNDS = "a branch of a tree rounds unlike the text alone"
ROW_ROUNDS = "a text beside another row rounds unlike the text alone"


Level = Literal["bitwise", "rounding"]
LEVELS = get_args(Level)


@dataclass(frozen=True)
class Exactness:
    """How exact passes are.

    Attributes:
        level: ``bitwise`` if drafts cannot change a bit of the logits, else ``rounding``.
        reason: why it is only ``rounding``, and where the result comes from if it was not measured now; else None.
    """

    level: Level
    reason: str | None = None


def probe(scorer: Scorer, limit: int | None = None, offloads: bool = False) -> Exactness:
    """Find the exactness of a model by comparing bits; the same on all ranks of a model in several processes.

    Args:
        scorer: the model.
        limit: the model's positions; test texts are no longer than this.
        offloads: whether keys and values may lie off the device.
    """
    if offloads and scorer.device.type != "cpu":
        return Exactness("rounding", "keys and values off the device are attended to row by row")
    return Exactness(*scorer.led(lambda: astuple(_probe(scorer, limit))))


@torch.inference_mode()
def _probe(scorer: Scorer, limit: int | None) -> Exactness:
    if scorer.device.type != "cpu" and not gpu.runs_on(scorer.device):
        return Exactness("rounding", f"there is no kernel for {scorer.device.type} that sums in one order")
    if scorer.device.type == "cpu" and (reason := unusable()) is not None:
        return Exactness("rounding", reason)
    sizes = list(PROBED_PASS_TOKENS)
    while limit is not None and len(sizes) > 1 and sum(sizes) + 1 > limit:
        sizes.pop()
    text = np.random.default_rng(1).integers(0, scorer.vocabulary, sum(sizes))
    whole = _read(scorer, text, [len(text)])
    parts = _read(scorer, text, sizes)
    for position in range(len(text)):
        if not torch.equal(whole[position], parts[position]):
            size = sizes[int(np.searchsorted(np.cumsum(sizes), position, side="right"))]
            return Exactness("rounding", f"a pass over {size} tokens rounds unlike one over {len(text)}")
    branch = min(PROBED_BRANCH_TOKENS, len(text) // 2)
    for others, reason in ((0, BRANCH_ROUNDS), (1, ROW_ROUNDS)) if branch else ():
        if not _in_a_tree(scorer, text, branch, whole, others):
            return Exactness("rounding", reason)
    return Exactness("bitwise")


def _read(scorer: Scorer, text: IntArray, sizes: Sequence[int]) -> torch.Tensor:
    """Logits at every token, ``[t, V]``, from passes of these sizes; each pass is one token and a chain under it."""
    cache, found = FullCache(), []
    for size in sizes:
        here = text[cache.length : cache.length + size]
        block = Block(here[:1], DraftTree.chain(here[1:]), cache.length)
        found.append(scorer.score([block], [cache])[0])
        cache.commit(block, range(size - 1))
    return torch.cat(found)


def _in_a_tree(scorer: Scorer, text: IntArray, branch: int, whole: torch.Tensor, others: int) -> bool:
    """Whether a branch has the text's logits although wrong branches and other rows share the pass."""
    start, wrong = len(text) - branch - 1, (text + 1) % scorer.vocabulary
    caches = [FullCache() for _ in range(others + 1)]
    for cache in caches:
        block = Block(text[:start], DraftTree.empty(), 0)
        scorer.score([block], [cache])
        cache.commit(block, [])
    tree, places = _with_wrong_branches(text[start + 1 :], wrong[start + 1 :])
    trees = [DraftTree.chain(wrong[:5])] * others + [tree]
    logits = scorer.score([Block(text[start : start + 1], each, start) for each in trees], caches)[-1]
    return torch.equal(logits[[0, *places]], whole[start:])


def _with_wrong_branches(right: IntArray, wrong: IntArray) -> tuple[DraftTree, list[int]]:
    """A tree with a wrong sibling for each right token, and the indices of the right tokens' logits."""
    tokens: list[int] = []
    parents: list[int] = []
    places: list[int] = []
    above = ROOT
    for pair in zip(wrong.tolist(), right.tolist(), strict=True):
        tokens += pair
        parents += [above, above]
        above = len(tokens) - 1
        places.append(above + 1)
    return DraftTree(np.array(tokens), np.array(parents)), places
