"""Draft chains on the device, with one transfer for all tokens. The next pass depends only on the last token's id,
which stays there while the CPU prepares further passes. Greedy rows, and sampled ones whose processor only divides by a
temperature, are chosen inside the pass: noise depends on seed and position, which its tables hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.block import Block, RowScores
from forerun.core.request import Request
from forerun.core.transfers import adjoined, to_cpu
from forerun.core.tree import DraftTree, IntArray
from forerun.decoding.row import Row
from forerun.models.forward.scorer import Scorer

TOKENS_BEFORE_A_LOOK = 3
"""Tokens between transfers of a chain that may end early, as long as TriForce's inner chains. A small model's pass
costs as much as a few transfers, and at most two passes are wasted."""
UNKNOWN = np.zeros(1, np.int64)


class ChainPiece(NamedTuple):
    """A row's part of a chain: tokens, optionally each one's probability before processors, and under rejection
    sampling the distribution ``q`` that each was drawn from, ``[V]``."""

    tokens: list[int]
    chances: list[float]
    q: list[torch.Tensor]


def fits(model: Scorer, requests: Sequence[Request]) -> bool:
    """Return whether the device can choose all these requests' tokens."""
    return model.by_tables and all(request.sampler.rowwise for request in requests)


@torch.inference_mode()
def draft(model: Scorer, rows: Sequence[Row], count: int, chances: bool) -> list[ChainPiece]:
    """Choose ``count`` tokens per row, with probabilities if ``chances``, at a level without sources. The caches end up
    with all but the last; the requests do not change."""
    requests, caches = [row.request for row in rows], [row.cache for row in rows]
    blocks = [row.block(DraftTree.empty()) for row in rows]
    chosen: list[torch.Tensor] = []  # [rows] per pass
    found: list[torch.Tensor] = []  # [1] per pass and row
    q: list[list[torch.Tensor]] = [[] for _ in rows]
    for turn in range(count):
        for block, request in zip(blocks, requests, strict=True):
            block.noise = request.sampler.noise([len(request) + turn])
        scores = model.score_rows(blocks, caches)
        chosen.append(adjoined([_choice(*each, turn) for each in zip(scores, requests, q, strict=True)]))
        ids = torch.split(chosen[-1], 1)
        if chances:
            given = zip(requests, scores, ids, strict=True)
            found += [request.sampler.chances(row.logits, token) for request, row, token in given]
        for cache, block in zip(caches, blocks, strict=True):
            cache.commit(block, [])
        blocks = [Block(UNKNOWN, DraftTree.empty(), c.length, ids=own) for c, own in zip(caches, ids, strict=True)]
    bits = [each.view(torch.int64) for each in found]
    drafted, *rest = to_cpu([torch.cat(chosen), *([torch.cat(bits)] if bits else [])])
    return list(_pieces(drafted.reshape(count, -1), rest, q))


def _choice(row: RowScores, request: Request, drawn_from: list[torch.Tensor], turn: int) -> torch.Tensor:
    """Return the token ``turn`` tokens after the request, ``[1]``: the pass's choice, or one from its logits ``[1, V]``
    if a processor does more than divide. Append its distribution to ``drawn_from``, if needed."""
    sampler = request.sampler
    best = None if sampler.divisor is None else row.best
    if best is not None and sampler.method != "rejection":
        return best
    scores = sampler.scores_of_rows(row.logits)
    if sampler.method == "rejection":
        drawn_from.append(scores[0].double().softmax(-1))
    return sampler.choices(scores, [len(request) + turn]) if best is None else best


def _pieces(tokens: IntArray, chances: Sequence[IntArray], q: list[list[torch.Tensor]]) -> Iterator[ChainPiece]:
    bits = [each.view(np.float64).reshape(tokens.shape) for each in chances]
    for row, own in enumerate(q):
        yield ChainPiece(tokens[:, row].tolist(), bits[0][:, row].tolist() if bits else [], own)
