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
FIRST = (0, 0, 0, TRIAL)
"""Drafts of the first steps, to learn what they cost. The first one of all is not counted: caches are cold then."""
ALLOWANCE, INTEREST, SAVINGS = 2.0, 0.01, 16.0
"""Passes that drafts may cost before they pay, what they are given for each step without them, and what they may lose
of what they saved: one in a hundred and the allowance is the worst case."""
UNKNOWN = 1 << 30
"""Drafts that are affordable before it is known what they cost."""
SETTLING = 0.02
"""Seconds of plain steps in a row after which one takes what it takes where nothing is drafted at all. Behind a prompt,
and among drafts, caches hold other things than its own, and a short one takes up to a third longer."""
SOONEST, CHECK = 16, 800
"""Steps with drafts from one such row to the next: at least, and for each plain step that a step saves. Seeing that
costs about a hundredth."""
OUTLIER, SELDOM = 4.0, 50
"""A step that takes so many times what was to be expected was held up by something else and does not count; of so many
steps one."""
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
        costs = self._costs_of(requests)
        most = min(self.most, budget)
        length = 0 if costs.closed else self._length(costs, requests, most)
        began = self._clock()
        trees = self.inner.propose_batch(requests, length) if length else [DraftTree.empty()] * len(requests)
        ended = self._clock()
        settled = all(len(request) > request.prompt_length for request in requests)  # else the pass ends the prefill
        self._step = _Step(costs, ended - began, ended, sum(map(len, trees)), len(trees)) if settled else None
        return trees

    def _length(self, costs: _Costs, requests: Sequence[Request], most: int) -> int:
        """Drafts a row. Where the inner drafter asks whether a chain is long enough, its end is found as it grows."""
        self._chances = {request.id: self._acceptance[request.id].value for request in requests}
        length = costs.next_length(list(self._chances.values()), most)
        if length and self._chains and not costs.trying:
            length = most
        self._chains, self._price = {}, 0.0 if costs.trying else costs.price
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
                self._step.costs.learn(self._step)
                self._step = None
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
        super().finish(request)


def _chain(likely: Sequence[float]) -> DraftTree:
    """A chain whose model found each token so likely, as the target is thought to agree before it has shown."""
    count, chance = len(likely), np.cumprod(np.power(likely, AGREEING), dtype=np.float64)
    return DraftTree(np.zeros(count, np.int64), np.arange(-1, count - 1), probability=chance)


@dataclass(slots=True)
class _Step:
    """A step under way: seconds of drafting, when it ended, drafted tokens and rows; then what came of it."""

    costs: _Costs
    drafting: float
    proposed: float
    drafted: int
    rows: int
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
class _Plain:
    """Seconds of a pass without drafts where nothing is drafted at all; until one was seen, of any without drafts.

    Attributes:
        seconds: 0 where nothing was measured.
        row: what the passes since the last draft took together.
    """

    seconds: float = 0.0
    row: float = 0.0
    _seen: int = 0

    def learn(self, seconds: float) -> bool:
        """Take in a measurement; true for one behind enough of its like."""
        settled, self.row = self.row >= SETTLING, self.row + seconds
        self._seen += settled
        if self._seen > 1:
            self.seconds += settled * (seconds - self.seconds) * max(1 / self._seen, 1 - MEMORY)
        else:
            self.seconds = min(seconds, self.seconds or seconds)
        return settled

    def disturb(self) -> None:
        """There was a draft."""
        self.row = 0.0


@dataclass
class _Costs:
    """Seconds of a step at one length of context, and the pauses that drafting takes there."""

    plain: _Plain = field(default_factory=lambda: _Plain())
    verifying: Line = field(default_factory=Line)  # one with drafts, by their number
    drafting: float = 0.0  # a token
    drafts: int = 0
    steps: int = 0
    open: bool = True
    pause: int = 1
    rested: int = 0
    unchecked: int = 0
    watching: bool = False
    excusing: int = 0
    hopeful: bool = False
    trying: bool = True
    earned: float = 0.0
    spent: float = 0.0
    purse: Purse = field(default_factory=lambda: Purse(ALLOWANCE, INTEREST, SAVINGS))

    @property
    def closed(self) -> bool:
        """Whether drafts have lost all that they may."""
        return not self.open and self.steps >= len(FIRST)

    @property
    def price(self) -> float:
        """Tokens a row that are worth what another draft costs."""
        return self.earned / self.spent * (self.drafting + self.verifying.slope) if self.spent else 0.0

    @property
    def affordable(self) -> int:
        """Drafts a row that may all be wrong, by what there is left to lose."""
        each, plain = self.drafting + self.verifying.slope, self.plain.seconds
        if not each or not plain:
            return UNKNOWN
        return max(0, int(((self.purse.balance + 1) * plain - self.verifying.at(0)) / each))

    @property
    def doubtful(self) -> bool:
        """Whether it is time to see again what plain steps take: the less drafts gain, the sooner."""
        gain = self.earned / self.spent * self.plain.seconds if self.spent else 1.0
        return self.unchecked >= max(SOONEST, CHECK * (gain - 1))

    def learn(self, step: _Step) -> None:
        """Take in what a step took, and what it gave a row."""
        self.steps += 1
        self.unchecked += 1
        if step.drafted:
            self.plain.disturb()
        if self.steps == 1 or self._excuse(step):
            return
        tokens, seconds = step.tokens / step.rows, step.drafting + step.verifying
        if step.drafted:
            self.verifying.learn(step.drafted / step.rows, step.verifying)
            each = step.drafting * step.rows / step.drafted
            self.drafting = each if not self.drafts else MEMORY * self.drafting + (1 - MEMORY) * each
            self.drafts += 1
        elif self.plain.learn(step.verifying):
            self.unchecked = 0
        self.purse.enter(tokens, seconds, self.plain.seconds, step.drafted > 0)
        self.open = self.purse.balance > 0 if self.open else self.affordable >= TRIAL
        self.earned, self.spent = RECENT * self.earned + tokens, RECENT * self.spent + seconds
        if step.foreseen:
            self.encourage()

    def _excuse(self, step: _Step) -> bool:
        """Whether a step took so long that something else must have held it up; seldom."""
        each = step.drafted / step.rows
        expected = max(self.plain.seconds, each and self.verifying.at(each) + each * self.drafting)
        excused = 0 < OUTLIER * expected < step.drafting + step.verifying and self.steps >= self.excusing
        if excused:
            self.excusing = self.steps + SELDOM
            self.steps -= not self.drafts  # the trial is made again
        return excused

    def next_length(self, acceptance: Sequence[float], most: int) -> int:
        """Drafts a row: at first none and some; then what pays, or a pause and a trial."""
        self.trying = self.steps < len(FIRST)
        if self.trying:
            return min(most, FIRST[self.steps])
        length = self.best_length(acceptance, most)
        if length:
            self.pause, self.rested = 1, 0
            self.watching = self.unchecked > 0 if self.watching else self.doubtful
            return 0 if self.watching else length
        if self.rested < self.pause or self.affordable < TRIAL:
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
        plain = self.plain.seconds
        seconds = (self.verifying.at(0) or plain) + lengths * (self.verifying.slope + self.drafting)
        seconds[0] = plain  # no point of that line: a second token in a pass costs more than a third
        return int(np.argmax(tokens / seconds.clip(1e-9)))
