"""Time of a pass by rows, drafted tokens and context (the Lookahead paper's figures 1 and 6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from statistics import median

import numpy as np
import torch

from forerun.bench.machine import Row
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine

SEED = 0


@torch.inference_mode()
def pass_rows(
    engine: Engine, rows: Sequence[int], drafts: Sequence[int], contexts: Sequence[int], rounds: int
) -> list[Row]:
    """Median milliseconds of a pass, measured in shuffled order; each row has one token and a chain of drafts.

    Args:
        engine: of the target.
        rows: batch sizes to measure.
        drafts: lengths of each row's chain to measure, besides 0.
        contexts: tokens in each row's cache.
        rounds: measurements of each case, after one warm-up.
    """
    found: list[Row] = []
    for context in contexts:
        text = np.random.default_rng(SEED).integers(0, engine.target.vocabulary, context + max(drafts) + 1)
        caches = [engine.prefill(text[: context + 1].tolist(), max(drafts) + 1) for _ in range(max(rows))]
        kinds = [(size, count) for size in rows for count in (0, *drafts)]
        seconds: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        order = Random(SEED)
        for _ in range(rounds + 1):
            for size, count in order.sample(kinds, len(kinds)):  # after a large pass the next one finds cold memory
                tokens = text[context : context + count + 1]
                block = Block(tokens[:1], DraftTree.chain(tokens[1:]), context)
                begin = time.perf_counter()
                engine.target.score([block] * size, caches[:size])[-1][-1, -1].item()
                seconds[size, count].append(time.perf_counter() - begin)
        found += [_row(context, kind, seconds[kind][1:], median(seconds[kind[0], 0][1:])) for kind in kinds]
    return found


def _row(context: int, kind: tuple[int, int], seconds: Sequence[float], plain: float) -> Row:
    size, count = kind
    return {
        "context": context,
        "rows": size,
        "drafts": count,
        "milliseconds": round(1000 * median(seconds), 3),
        "slowest": round(1000 * max(seconds), 3),
        "fastest": round(1000 * min(seconds), 3),
        "ratio_to_no_drafts": round(median(seconds) / plain, 3),
    }
