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
from dataclasses import dataclass, field

import numpy as np

from forerun.calibration import ByOdds
from forerun.drafters.base import Drafter, OuterDrafter
from forerun.ledger import Purse
from forerun.line import Line
from forerun.request import Request
from forerun.tree import DraftTree
from forerun.verify import Outcome

MEMORY = 0.95
"""What remains of the weight of a measurement, or of a tested draft, after the next one."""
RECENT = 0.98
"""What remains of tokens and seconds after a step, of which the worth of time is taken."""
AGREEING = 0.2
"""A token of probability p is taken to be accepted with probability p to this power at first: where a model is not sure
either, the target often chooses the same."""
PRIOR = (4.0, 0.8)
"""Drafts that the first guess at a request's acceptance counts for, and the guess."""
LONGEST_PAUSE = 100
"""Steps without drafts, at most, before they are tried again."""
TRIAL = 2
"""Drafts of such a trial."""
FIRST = (0, 0, 0, TRIAL, 2 * TRIAL)
"""Drafts of the first steps, to learn what they cost. The first one of all is not counted: caches are cold then."""
ALLOWANCE, INTEREST, REOPENING, SAVINGS = 2.0, 0.02, 1.0, 16.0
"""Passes that drafts may cost before they pay, what they are given for each step without them, what must be there
before they are tried again, and what they may lose of what they saved: two in a hundred and two is the worst case."""
EASY = 0.98
"""Acceptance at which drafting has to pay if trials that succeed shall be repeated soon."""


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
        self._costs: dict[int, _Costs] = {}
        self._step: _Step | None = None
        self._drafted: set[int] = set()  # requests that had drafts
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
        costs, most = self._costs_of(requests), min(self.most, budget)
        length = costs.next_length([self._acceptance[r.id].value for r in requests], most)
        if length and self._chains and not costs.trying:
            length = most  # its end is found as it grows
        self._chains, self._price = {}, 0.0 if costs.trying else costs.price
        self._chances = {request.id: self._acceptance[request.id].value for request in requests}
        began = self._clock()
        trees = self.inner.propose_batch(requests, length) if length else [DraftTree.empty()] * len(requests)
        ended = self._clock()
        drafted = {request.id for request, tree in zip(requests, trees, strict=True) if len(tree)}
        fresh, self._drafted = not drafted <= self._drafted, self._drafted | drafted
        settled = all(len(request) > request.prompt_length for request in requests)  # else the pass ends the prefill
        self._step = _Step(costs, ended - began, ended, sum(map(len, trees)), len(trees), fresh) if settled else None
        return trees

    def _enough(self, request: Request, likely: float) -> bool:
        """Whether the token behind this one would bring less than the time it takes is worth."""
        self._chains.setdefault(request.id, []).append(likely)
        self._chances[request.id] *= float(self._calibration.rates(_chain([likely]))[0])
        return self._chances[request.id] < self._price

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Learn how long the step took, and which drafts were accepted."""
        accepted, drafted = len(outcome.verdict.path), outcome.tree.drafted
        if drafted and (likely := self._chains.get(request.id, [])[:drafted]):
            came = np.arange(len(likely)) < accepted
            self._calibration.forget()
            self._calibration.count(_chain(likely), np.arange(len(likely)) <= accepted, came)
        if self._step is not None:
            self._step.observe(len(outcome.verdict.tokens), 0 < drafted == accepted, self._clock())
            if self._step.ended:
                self._step.costs.learn(self._step)
                self._step = None
        self._acceptance[request.id].count(accepted, drafted)
        super().observe(request, outcome)

    def _costs_of(self, requests: Sequence[Request]) -> _Costs:
        """Batches of like size and context share their costs; a context twice as long begins with those of the half."""
        bucket = len(requests) << 8 | sum(map(len, requests)).bit_length()
        if bucket not in self._costs:
            self._costs[bucket] = copy.deepcopy(self._costs.get(bucket - 1) or _Costs())
        return self._costs[bucket]

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self._acceptance.pop(request.id, None)
        self._drafted.discard(request.id)
        super().finish(request)


def _chain(likely: Sequence[float]) -> DraftTree:
    """A chain whose model found each token so likely, as the target is thought to agree before it has shown."""
    count, chance = len(likely), np.cumprod(np.power(likely, AGREEING), dtype=np.float64)
    return DraftTree(np.zeros(count, np.int64), np.arange(-1, count - 1), probability=chance)


@dataclass
class _Step:
    """A step under way: seconds of drafting, when it ended, drafted tokens and rows; then what came of it.

    ``fresh`` where a row has drafts for the first time: a sparse cache may make its first choice then.
    """

    costs: _Costs
    drafting: float
    proposed: float
    drafted: int
    rows: int
    fresh: bool
    verifying: float = 0.0
    tokens: int = 0
    seen: int = 0
    foreseen: bool = False

    def observe(self, tokens: int, foreseen: bool, now: float) -> None:
        """A row's tokens, and whether all its drafts were accepted; at the first row's time the pass is over."""
        self.verifying = self.verifying or now - self.proposed
        self.tokens, self.seen, self.foreseen = self.tokens + tokens, self.seen + 1, self.foreseen or foreseen

    @property
    def ended(self) -> bool:
        """Whether all rows have been observed."""
        return self.seen >= self.rows


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


@dataclass
class _Costs:
    """Seconds of a step at one length of context, and the pauses that drafting takes there."""

    plain: Line = field(default_factory=Line)  # a pass without drafts
    verifying: Line = field(default_factory=Line)  # one with drafts, by their number
    drafting: float = 0.0  # a token
    drafts: int = 0
    steps: int = 0
    pause: int = 1
    rested: int = 0
    hopeful: bool = False
    trying: bool = True
    earned: float = 0.0
    spent: float = 0.0
    purse: Purse = field(default_factory=lambda: Purse(ALLOWANCE, INTEREST, REOPENING, SAVINGS))

    @property
    def price(self) -> float:
        """Tokens a row that are worth what another draft costs."""
        return self.earned / self.spent * (self.drafting + self.verifying.slope) if self.spent else 0.0

    def learn(self, step: _Step) -> None:
        """Take in what a step took, and what it gave a row."""
        self.steps += 1
        if self.steps == 1 or step.fresh:
            return
        (self.verifying if step.drafted else self.plain).learn(step.drafted / step.rows, step.verifying)
        seconds, tokens = step.drafting + step.verifying, step.tokens / step.rows
        self.purse.enter(tokens, seconds, self.plain.at(0), step.drafted > 0)
        self.earned, self.spent = RECENT * self.earned + tokens, RECENT * self.spent + seconds
        if step.foreseen:
            self.encourage()
        if step.drafted:
            each = step.drafting * step.rows / step.drafted
            self.drafting = each if not self.drafts else MEMORY * self.drafting + (1 - MEMORY) * each
            self.drafts += 1

    def next_length(self, acceptance: Sequence[float], most: int) -> int:
        """Drafts a row: at first none and some; then what pays, or a pause and a trial."""
        self.trying = self.steps < len(FIRST)
        if self.trying:
            return min(most, FIRST[self.steps])
        if not self.purse.open:
            return 0
        length = self.best_length(acceptance, most)
        if length:
            self.pause, self.rested = 1, 0
            return length
        if self.rested < self.pause:
            self.rested += 1
            return 0
        self.trying = True
        self.hopeful = self.best_length([EASY] * len(acceptance), most) > 0
        self.pause, self.rested = min(LONGEST_PAUSE, (2 if self.hopeful else 8) * self.pause), 0
        return min(most, TRIAL)

    def encourage(self) -> None:
        """All drafts were accepted: try again soon, if that could ever pay."""
        if self.hopeful:
            self.pause = 1

    def best_length(self, acceptance: Sequence[float], most: int) -> int:
        """The length with the most tokens a second."""
        lengths = np.arange(most + 1)
        powers = np.array(acceptance)[:, None] ** lengths
        tokens = powers.cumsum(1).sum(0)  # 1 + a + ... + a^n, over the rows
        plain = self.plain.at(0)
        seconds = (self.verifying.at(0) or plain) + lengths * (self.verifying.slope + self.drafting)
        seconds[0] = plain  # no point of that line: a second token in a pass costs more than a third
        return int(np.argmax(tokens / seconds.clip(1e-9)))
