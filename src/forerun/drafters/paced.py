"""Drafts as many tokens as pay, by the clock: none where verifying and drafting cost more than they save.

For a chain whose tokens are accepted with probability a, a step over n drafts commits (1 - a^(n+1)) / (1 - a) tokens
(Leviathan et al., 2023, equation 1), and takes the time to draft n tokens and to verify them. All three are learned: a
per request, the times per length of context. So drafts are long where the text is easy and the context makes a pass
dear, and there are none where plain decoding is faster; then they are tried again now and then.

A model that drafts knows more: how likely it found each token. From that and from what was accepted of tokens like it a
chain's chance is known as it grows, and it ends where the next token would bring less than the time it takes is worth
elsewhere: early at a word that could be another, late in a passage that is quoted. What is drafted already is kept,
for under rejection sampling a token's own probability must not decide about it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafters.base import Drafter, OuterDrafter
from forerun.plan.calibration import ByOdds
from forerun.plan.line import MEMORY
from forerun.plan.pacing import Pace, Step

AGREEING = 0.2
"""A token of probability p is taken to be accepted with probability p to this power at first: where a model is not sure
either, the target often chooses the same."""
PRIOR = (4.0, 0.8)
"""Drafts that the first guess at a request's acceptance counts for, and the guess."""


class PacedDrafter(OuterDrafter):
    """Tells another drafter how many tokens to draft.

    Args:
        inner: drafts chains, of at most the budget it is given.
        most: tokens of a chain, at most.
        clock: seconds.
    """

    sized = True

    def __init__(self, inner: Drafter, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self.most = most
        self._clock = clock
        self._acceptance: dict[int, _Rate] = {}
        self._paces: dict[int, Pace] = {}
        self._step: Step | None = None
        self._calibration = ByOdds()
        self._chains: dict[int, list[float]] = {}  # how likely the model found the tokens of each row's chain
        self._chances: dict[int, float] = {}  # that all of it is accepted
        self._price = 0.0
        inner.enough = self._enough

    def begin(self, request: Request) -> None:
        """See ``Drafter.begin``."""
        self._acceptance[request.id] = _Rate()
        super().begin(request)

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """Chains of the length that pays for the batch."""
        pace = self._pace_of(requests)
        if pace.closed and pace.rest():
            self._step = None
            return [DraftTree.empty()] * len(requests)
        most = min(self.most, budget)
        length = 0 if pace.closed else self._length(pace, requests, most)
        began = self._clock()
        trees = self.inner.propose_batch(requests, length) if length else [DraftTree.empty()] * len(requests)
        ended = self._clock()
        settled = all(len(request) > request.prompt_length for request in requests)  # else the pass ends the prefill
        self._step = Step(pace, ended - began, ended, sum(map(len, trees)), len(trees)) if settled else None
        return trees

    def _length(self, pace: Pace, requests: Sequence[Request], most: int) -> int:
        """Drafts a row. Where the inner drafter asks whether a chain is long enough, its end is found as it grows."""
        self._chances = {request.id: self._acceptance[request.id].value for request in requests}
        length = pace.next_length(list(self._chances.values()), most)
        if length and self._chains and not pace.trying:
            length = most
        self._chains, self._price = {}, 0.0 if pace.trying else pace.price
        return length

    def _enough(self, request: Request, likely: float) -> bool:
        """Whether the token behind this one would bring less than the time it takes is worth."""
        self._chains.setdefault(request.id, []).append(likely)
        self._chances[request.id] *= float(self._calibration.rates(_chain([likely]))[0])
        return self._chances[request.id] < self._price

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Learn how long the step took, and which drafts were accepted."""
        accepted, drafted = len(outcome.verdict.path), outcome.tree.drafted
        if drafted:
            self._acceptance[request.id].count(accepted, drafted)
            if likely := self._chains.get(request.id, [])[:drafted]:
                came = np.arange(len(likely)) < accepted
                self._calibration.forget()
                self._calibration.count(_chain(likely), np.arange(len(likely)) <= accepted, came)
        if self._step is not None:
            self._step.observe(len(outcome.verdict.tokens), 0 < drafted == accepted, self._clock())
            if self._step.ended:
                self._step.pace.learn(self._step)
                self._step = None
        super().observe(request, outcome)

    def _pace_of(self, requests: Sequence[Request]) -> Pace:
        """Batches of like size and context share their pace; a context twice as long begins with those of the half."""
        bucket = len(requests) << 8 | sum(map(len, requests)).bit_length()
        if bucket not in self._paces:
            self._paces[bucket] = copy.deepcopy(self._paces.get(bucket - 1) or Pace())
        return self._paces[bucket]

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self._acceptance.pop(request.id, None)
        super().finish(request)


def _chain(likely: Sequence[float]) -> DraftTree:
    """A chain whose model found each token so likely, as the target is thought to agree before it has shown."""
    count, chance = len(likely), np.cumprod(np.power(likely, AGREEING), dtype=np.float64)
    return DraftTree(np.zeros(count, np.int64), np.arange(-1, count - 1), probability=chance)


@dataclass
class _Rate:
    """How often drafts are accepted that were put to the test."""

    tested: float = PRIOR[0]
    accepted: float = PRIOR[0] * PRIOR[1]

    @property
    def value(self) -> float:
        return self.accepted / self.tested

    def count(self, accepted: int, drafted: int) -> None:
        fade = MEMORY ** min(accepted + 1, drafted)
        self.tested = self.tested * fade + accepted + (accepted < drafted)
        self.accepted = self.accepted * fade + accepted
