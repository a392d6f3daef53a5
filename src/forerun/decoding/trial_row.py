"""A row of a lower level: it follows a row of the target, and its tokens are speculative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome, Verdict
from forerun.decoding.device_chain import ChainPiece
from forerun.decoding.row import Row
from forerun.policy.calibration import ChainConfidence


@dataclass(eq=False, kw_only=True)
class TrialRow(Row):
    """A row of a lower level, which follows one of the target's (``upper``). Its tokens are tentative.

    Attributes:
        reading: tokens in the cache, from the prompt's last one on; ``prepared``: whether it has its cache.
        length: draft length; ``least``: probability of full acceptance at which the chain ends earlier.
        probabilities: of the chain's tokens under the model, if it may end early.
    """

    upper: Row = field(repr=False)
    reading: IntArray = field(repr=False)
    prepared: bool = False
    length: int = 0
    least: float = 0.0
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    tentative = True

    def close(self) -> None:
        """Do nothing: the target's row closes the states."""

    @property
    def first(self) -> int:
        """Position of the prompt's last token, which no prefill pass scores."""
        return self.upper.request.prompt_length - 1

    @property
    def missing(self) -> int:
        """Tokens of the chain still to draft."""
        return self.length - len(self.tokens)

    @property
    def wants(self) -> int:
        return self.missing

    def start(self, request: Request, length: int, least: float) -> None:
        self.request, self.length, self.least, self._alive = request.fork(), length, least, 1.0
        self.tokens, self.origins, self.q, self.probabilities = [], [], [], []

    def follow(self) -> None:
        """Drop uncommitted tokens from the cache. The last token is always scored again."""
        cache = self.cache
        if cache.source is not None:
            cache.sync()
            return
        first, end = self.first, min(cache.length, len(self.request) - 1)
        read, text = self.reading[: cache.length - first], self.request.tokens[first:end]
        same = read[: len(text)] == text
        if len(text) < len(read) or not same.all():
            cache.truncate(first + (len(text) if same.all() else int(same.argmin())))

    def commit(self, block: Block, verdict: Verdict) -> None:
        super().commit(block, verdict)
        place, kept = block.start - self.first, np.concatenate((block.pending, block.tree.tokens[verdict.path]))
        self.reading[place : place + len(kept)] = kept

    def extend(self, outcome: Outcome, before: Request | None) -> None:
        """Add what a step committed; ``before`` is a fork from before it, if ``q`` is needed."""
        if before is not None:
            self.q += distributions(outcome, before)
        self.tokens += outcome.verdict.tokens
        self.origins += outcome.origins
        if self.request.finish_reason is not None:
            self.length = 0

    def take_piece(self, piece: ChainPiece, confidence: ChainConfidence) -> None:
        """Add tokens that the cache holds already, except for the last, up to the draft length."""
        first = self.first
        held = self.cache.length - first
        known = np.concatenate((self.request.tokens[first:], np.array(piece.tokens[:-1], np.int64)))
        self.reading[:held] = known[:held]
        for place, token in enumerate(piece.tokens):
            if self.missing <= 0:
                break
            self.tokens.append(token)
            self.origins.append(int(Origin.TARGET))
            self.q += piece.q[place : place + 1]
            self.request.stats.record(0, 0, 1)
            if self.request.append(token):
                self.length = 0
            if self.least > 0:
                self.stop_if_unlikely(piece.chances[place : place + 1], confidence)

    def stop_if_unlikely(self, probabilities: Sequence[float], confidence: ChainConfidence) -> None:
        """End the chain if full acceptance is too unlikely."""
        self.probabilities += probabilities
        for probability in probabilities:
            self._alive *= confidence.chance(probability)
        if self._alive < self.least:
            self.length = 0

    def tree(self, own: Origin) -> DraftTree:
        """Return the chain; ``own`` is the origin of tokens that the level's model chose."""
        origins = np.array([origin or own for origin in self.origins], np.int8)
        return DraftTree.chain(self.tokens, torch.stack(self.q) if self.q else None, origins)


def probabilities(request: Request, outcome: Outcome) -> list[float]:
    """Return a model's probability of each token that a pass committed, before any processor."""
    tokens = outcome.verdict.tokens
    rows = [0, *(node + 1 for node in outcome.verdict.path)][: len(tokens)]
    if outcome.chances is not None:
        return [float(chance) for chance in outcome.chances[rows]]
    logits = outcome.logits[rows]
    chances: list[float] = request.sampler.chances(logits, torch.tensor(tokens, device=logits.device)).tolist()
    return chances


def distributions(outcome: Outcome, before: Request) -> list[torch.Tensor]:
    """Return the distribution that each token was drawn from, ``[V]``; ``before`` is a fork from before the step."""
    drawn_from, verdict = [], outcome.verdict
    for row, token in zip([0, *(node + 1 for node in verdict.path)], verdict.tokens, strict=False):
        drawn_from.append(before.scores(outcome.logits[row]).double().softmax(-1))
        before.append(token)
    return drawn_from
