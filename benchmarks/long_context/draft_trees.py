"""Draft trees by the target over its sparse cache: tokens per step by the tree's shape and size (figure 6c).

Steps are counted here, not timed: on long contexts a step mostly costs reading the full cache, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.long_context.long_bench import Prefilled, RequestMaker
from benchmarks.long_context.rows import Row
from benchmarks.papers.sequoia import Shape, ShapedDrafter
from benchmarks.reporting.progress import Say, quietly
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.drafting.recipes import sparse_cache
from forerun.engine.engine import Engine
from forerun.kv.view import View
from forerun.models.forward.level import read
from forerun.models.forward.scorer import Scorer

RANKS = 8
"""The most candidates per node."""
SEQUENCES = 4
"""Independent sequences in a tree, if it has that many nodes."""
DEPTH = 32
"""The greatest depth of a tree."""


@torch.inference_mode()
def rank_rates(target: Scorer, prompt: Prefilled, settings: LongContextConfig, new_tokens: int) -> list[float]:
    """How often the target's greedy token is the draft's candidate of each rank; in descending order."""
    prompt.rewind()
    full, tokens = prompt.cache, list(prompt.tokens)
    full.truncate(len(tokens) - 2)
    read(target, full, np.array(tokens[:-1]))  # leaves the queries that sparse caches choose by
    view = sparse_cache(settings)(target, full)
    assert isinstance(view, View)
    counts = np.zeros(RANKS)
    for _ in range(new_tokens):
        view.sync()
        block = Block(np.array(tokens[-1:]), DraftTree.empty(), full.length)
        draft, logits = (target.score([block], [cache])[0][0] for cache in (view, full))
        full.commit(block, [])
        tokens.append(int(logits.argmax()))
        ranks = draft.topk(min(RANKS, len(draft))).indices.tolist()
        if tokens[-1] in ranks:
            counts[ranks.index(tokens[-1])] += 1
    smoothed = (counts + 0.5 / np.arange(1, RANKS + 1)) / (new_tokens + RANKS)
    return sorted(smoothed.tolist(), reverse=True)


def shapes(size: int, rates: Sequence[float]) -> dict[str, Shape]:
    """The shapes to compare, of ``size`` nodes each."""
    branches = min(SEQUENCES, size)
    return {
        "chain": Shape.chain(min(size, DEPTH)),
        "independent sequences": Shape.independent(branches, min(size // branches, DEPTH)),
        "sequoia": Shape.sequoia(size, DEPTH, rates),
    }


def tree_rows(
    engine: Engine,
    prompts: Sequence[Prefilled],
    sizes: Sequence[int],
    settings: LongContextConfig,
    make: RequestMaker,
    say: Say = quietly,
) -> list[Row]:
    """One row per shape and size: tokens per step of the target.

    Args:
        engine: with ``prune_drafts=False`` and a budget of the largest size, so that trees stay whole.
        prompts: already read.
        sizes: numbers of nodes.
        settings: of the sparse cache.
        make: makes the requests, which set the length of the continuation.
        say: told each row.
    """
    rates = rank_rates(engine.target, prompts[0], settings, make(engine, prompts[0].tokens, "").max_new_tokens)
    rows = []
    for size in sizes:
        for name, shape in shapes(size, rates).items():
            found = [_run(engine, prompt, shape, settings, make) for prompt in prompts]
            tokens, steps = (sum(each) for each in zip(*found, strict=True))
            per_step = round(tokens / steps, 3)
            say(f"  {name} of {size}: {per_step:g} tokens a step")
            rows.append({"shape": name, "nodes": size, "depth": len(shape.levels), "tokens_per_step": per_step})
    return rows


def _run(
    engine: Engine, prompt: Prefilled, shape: Shape, settings: LongContextConfig, make: RequestMaker
) -> tuple[int, int]:
    """Tokens and steps, without the first step, in which a new cache cannot draft."""
    engine.set_drafter(ShapedDrafter(sparse_cache(settings), shape))
    prompt.rewind()
    request = make(engine, prompt.tokens, "")
    for _ in engine.run([request], caches=[prompt.cache]):
        pass
    return sum(request.stats.emitted[1:]), request.stats.steps - 1
