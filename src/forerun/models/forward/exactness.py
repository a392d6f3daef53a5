"""Measure whether a token's logits have the same bits whatever shares its pass.

A sequence is scored in one pass, in passes of 1 to 64 tokens, and as a branch of a tree with wrong branches, alone and
packed with another row. So is a second one after a long prefix (the first one's keys and values, repeated), which
exceeds a split of attention and the layers' windows. If all logits have equal bits, drafts change no output.
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
from forerun.models.forward.scorer import Scorer, is_sharded

PROBED_PASS_TOKENS = (1, 2, 3, 5, 8, 13, 16, 24, 64)
FAR_PASS_TOKENS = (1, 2, 5, 16)
LONG_TEXT_TOKENS = 1100
"""Minimum length of the long prefix, in tokens: two splits of attention on a GPU, four on a CPU."""
PROBED_BRANCH_TOKENS = 9
"""Length of the tree's correct branch, in tokens."""
BRANCH_ROUNDS = "a branch of a tree rounds differently from the sequence alone"
ROW_ROUNDS = "a sequence beside another row rounds differently from the sequence alone"


Level = Literal["bitwise", "rounding"]
LEVELS = get_args(Level)


@dataclass(frozen=True)
class Exactness:
    """``bitwise`` if drafts cannot change a bit of logits, else ``rounding``; ``reason``: why, or who measured it."""

    level: Level
    reason: str | None = None


def probe(scorer: Scorer, limit: int | None = None, offloads: bool = False) -> Exactness:
    """Measure a model's exactness by comparing bits, with one result on all ranks; ``limit``: the model's positions;
    ``offloads``: whether keys and values may be off the device."""
    if offloads and scorer.device.type != "cpu" and not scorer.by_tables:
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
    read = FullCache()
    reason = _difference(scorer, read, text, sizes)
    if reason is None and (length := _long(read, limit)) > len(text):
        far = _read_far(scorer, text, length) if is_sharded(scorer.model) else _repeated(read, length)
        reason = _difference(scorer, far, text[: sum(FAR_PASS_TOKENS)], FAR_PASS_TOKENS)
        reason = None if reason is None else f"{reason}, after {length} tokens"
    return Exactness("bitwise") if reason is None else Exactness("rounding", reason)


def _long(read: FullCache, limit: int | None) -> int:
    window = max((spec.window or 0 for spec in read.specs.values()), default=0)
    wanted = max(LONG_TEXT_TOKENS, window + PROBED_BRANCH_TOKENS)
    return wanted if limit is None else min(wanted, limit - sum(FAR_PASS_TOKENS) - 1)


def _repeated(read: FullCache, length: int) -> FullCache:
    """Make a cache of ``length`` tokens by repeating another's keys and values; recurrent layers start with zeros."""
    far = FullCache(length + sum(FAR_PASS_TOKENS) + PROBED_BRANCH_TOKENS)
    while read.layers and far.length < length:
        count = min(read.length, length - far.length)
        far.extend({layer: read.read(layer, 0, count) for layer in read.layers})
    far.recurrent().blank(length)
    far.length = length
    return far


def _read_far(scorer: Scorer, text: IntArray, length: int) -> FullCache:
    """Prefill ``length`` tokens by passes, which alone reach all processes of a sharded model."""
    far = FullCache()
    _read(scorer, far, np.resize(text, length), [length])
    return far


def _difference(scorer: Scorer, before: FullCache, text: IntArray, sizes: Sequence[int]) -> str | None:
    """Commit a sequence, and return what rounds differently from one pass over it after the cache's tokens, or None."""
    start = before.length
    expected = _read(scorer, before, text, [len(text)])
    before.truncate(start)
    parts = _read(scorer, before, text, sizes)
    for position in range(len(text)):
        if not torch.equal(expected[position], parts[position]):
            size = sizes[int(np.searchsorted(np.cumsum(sizes), position, side="right"))]
            return f"a pass over {size} tokens rounds differently from one over {len(text)}"
    branch = min(PROBED_BRANCH_TOKENS, len(text) // 2)
    for others, reason in ((0, BRANCH_ROUNDS), (1, ROW_ROUNDS)) if branch else ():
        _go_back(scorer, before, text, start, len(text) - branch - 1)
        if not _in_a_tree(scorer, before, text, branch, expected, others):
            return reason
    before.truncate(start)
    _read(scorer, before, text, [len(text)])
    return None


def _go_back(scorer: Scorer, cache: FullCache, text: IntArray, start: int, count: int) -> None:
    """Truncate to a sequence's first ``count`` tokens after ``start``, scoring some again for recurrent layers."""
    cache.truncate(start + count)
    if missing := text[cache.length - start : count].tolist():
        block = Block(np.array(missing), DraftTree.empty(), cache.length)
        scorer.score([block], [cache])
        cache.commit(block, [])


def _read(scorer: Scorer, cache: FullCache, text: IntArray, sizes: Sequence[int]) -> torch.Tensor:
    """Return logits at every token, ``[t, V]``; each pass has one token and a chain after it."""
    found, done = [], 0
    for size in sizes:
        here = text[done : done + size]
        block = Block(here[:1], DraftTree.chain(here[1:]), cache.length)
        found.append(scorer.score([block], [cache])[0])
        cache.commit(block, range(size - 1))
        done += size
    return torch.cat(found)


def _in_a_tree(
    scorer: Scorer, cache: FullCache, text: IntArray, branch: int, expected: torch.Tensor, others: int
) -> bool:
    """Return whether a branch has the sequence's logits although wrong branches and other rows share the pass."""
    start, wrong = len(text) - branch - 1, (text + 1) % scorer.vocabulary
    rows = [FullCache() for _ in range(others)]
    for row in rows:
        block = Block(text[:start], DraftTree.empty(), 0)
        scorer.score([block], [row])
        row.commit(block, [])
    tree, places = _with_wrong_branches(text[start + 1 :], wrong[start + 1 :])
    blocks = [Block(text[start : start + 1], DraftTree.chain(wrong[:5]), row.length) for row in rows]
    blocks.append(Block(text[start : start + 1], tree, cache.length))
    logits = scorer.score(blocks, [*rows, cache])[-1]
    return torch.equal(logits[[0, *places]], expected[start:])


def _with_wrong_branches(right: IntArray, wrong: IntArray) -> tuple[DraftTree, list[int]]:
    """Return a tree with a wrong sibling for each correct token, and the indices of the correct tokens' logits."""
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
