"""Draft chains on the device, with one transfer for all tokens. The next pass depends only on the last token's id,
which stays on the device while the CPU prepares further passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.block import Block, RowScores
from forerun.core.request import Request
from forerun.core.transfers import adjoined, best_of_rows, to_cpu
from forerun.core.tree import DraftTree, IntArray
from forerun.decoding.row import Row
from forerun.models.forward.scorer import Scorer

TOKENS_BEFORE_A_LOOK = 3
"""Tokens between transfers of a chain that may end early; TriForce's inner chains have this length. A small model's
pass costs as much as a few transfers, and at most two passes are wasted."""
UNKNOWN = np.zeros(1, np.int64)


class ChainPiece(NamedTuple):
    """A row's part of a drafted chain: tokens, optionally the model's probability of each before any processor, and
    under rejection sampling the distribution ``q`` that each was drawn from, ``[V]``."""

    tokens: list[int]
    chances: list[float]
    q: list[torch.Tensor]


def fits(model: Scorer, requests: Sequence[Request]) -> bool:
    """Return whether the device can choose all these requests' tokens."""
    return model.by_tables and all(request.sampler.rowwise for request in requests)


@torch.inference_mode()
def draft(model: Scorer, rows: Sequence[Row], count: int, chances: bool) -> list[ChainPiece]:
    """Choose ``count`` tokens for each row of a level without sources; ``chances``: return probabilities, too. The
    caches end up with all tokens but the last; the requests do not change."""
    requests, caches = [row.request for row in rows], [row.cache for row in rows]
    blocks = [row.block(DraftTree.empty()) for row in rows]
    chosen: list[torch.Tensor] = []  # [rows] per pass
    found: list[list[torch.Tensor]] = []  # [1] per pass and row
    q: list[list[torch.Tensor]] = [[] for _ in rows]
    for turn in range(count):
        scores = model.score_rows(blocks, caches)
        chosen.append(_choices(scores, requests, turn, q))
        if chances:
            tokens = torch.split(chosen[-1], 1)
            found.append(
                [
                    request.sampler.chances(row.logits, token)
                    for request, row, token in zip(requests, scores, tokens, strict=True)
                ]
            )
        for cache, block in zip(caches, blocks, strict=True):
            cache.commit(block, [])
        ids = torch.split(chosen[-1], 1)
        blocks = [Block(UNKNOWN, DraftTree.empty(), c.length, ids=own) for c, own in zip(caches, ids, strict=True)]
    bits = [each.view(torch.int64) for turn in found for each in turn]
    drafted, *rest = to_cpu([torch.cat(chosen), *([torch.cat(bits)] if bits else [])])
    return list(_pieces(drafted.reshape(count, -1), rest, q))


def _choices(
    scores: Sequence[RowScores], requests: Sequence[Request], turn: int, q: list[list[torch.Tensor]]
) -> torch.Tensor:
    """Choose each row's token from logits ``[1, V]``, ``turn`` tokens after the request; append distributions to
    ``q``."""
    if all(request.sampler.takes_best for request in requests):
        best = [row.best for row in scores if row.best is not None]
        return adjoined(best) if best else best_of_rows(adjoined([row.logits for row in scores]))
    chosen = []
    for row, request, drawn_from in zip(scores, requests, q, strict=True):
        own = request.sampler.scores_of_rows(row.logits)
        chosen.append(request.sampler.choices(own, [len(request) + turn]))
        if request.sampler.method == "rejection":
            drawn_from.append(own[0].double().softmax(-1))
    return torch.cat(chosen)


def _pieces(tokens: IntArray, chances: Sequence[IntArray], q: list[list[torch.Tensor]]) -> Iterator[ChainPiece]:
    bits = [each.view(np.float64).reshape(tokens.shape) for each in chances]
    for row, own in enumerate(q):
        yield ChainPiece(tokens[:, row].tolist(), bits[0][:, row].tolist() if bits else [], own)
