"""What drafts pay by the clock at one length of context: what steps take there, what was lost, and when to try again.

Where nothing pays, drafts are tried now and then, and what that may cost is bounded. The measure is a step without
drafts as it is where nothing is drafted at all: among drafts such a step takes longer, and they would seem to pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.plan.ledger import Purse
from forerun.plan.line import MEMORY, Line

RECENT = 0.98
"""What remains of tokens and seconds after a step, of which the worth of time is taken."""
LONGEST_PAUSE = 100
"""Steps without drafts, at most, before they are tried again."""
TRIAL = 1
"""Drafts of such a trial."""
FIRST = (0, 0, 0, TRIAL)
"""Drafts of the first steps, to learn what they cost. The first one of all is not counted: caches are cold then."""
ALLOWANCE, INTEREST, SAVINGS = 2.0, 0.01, 16.0
"""Passes that drafts may cost before they pay, what they are given for each step without them, and what they may lose
of what they saved. The last draft may lose more than there is, and what is excused or cold is not booked."""
UNKNOWN = 1 << 30
"""Drafts that are affordable before it is known what they cost."""
SETTLING = 0.02
"""Seconds of plain steps in a row after which one takes what it takes where nothing is drafted at all. Behind a prompt,
and among drafts, caches hold other things than its own, and a short one takes up to a third longer."""
SOONEST, CHECK = 16, 800
"""Steps with drafts from one such row to the next: at least, and for each plain step that a step saves. Seeing that
costs about a hundredth."""
MEASURED = 8
"""Of so many steps one is measured where drafting is closed, for a short step feels the measuring."""
OUTLIER, SELDOM = 4.0, 50
"""A step that takes so many times what was to be expected was held up by something else and does not count; of so many
steps one."""
COLD = 1.5
"""Plain steps that the first pass with drafts is taken to last, at most: it is cold, and no measure of the next."""
EASY = 0.98
"""Acceptance at which drafting has to pay if trials that succeed shall be repeated soon."""


@dataclass(slots=True)
class Step:
    """A step under way: seconds of drafting, when it ended, drafted tokens and rows; then what came of it."""

    pace: Pace
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
        if self._seen < 2:
            self.seconds = min(seconds, self.seconds or seconds)
        elif settled:
            self.seconds += (seconds - self.seconds) * max(1 / self._seen, 1 - MEMORY)
        return settled

    def disturb(self) -> None:
        """There was a draft."""
        self.row = 0.0


@dataclass
class Pace:
    """How many drafts pay at one length of context, and the pauses that drafting takes there.

    Attributes:
        plain, verifying: seconds of a pass without drafts, and of one with them by their number.
        drafting: seconds of drafting a token.
        drafts, steps: how many steps with drafts, and of any kind, were learned from.
        purse, open: what drafts may lose, and whether they have not lost it.
        pause, rested: steps without drafts until they are tried again, and how many of these are over.
        trying, hopeful: whether a trial is under way, and whether drafts could pay here if they were mostly right.
        unchecked, watching: steps since it was seen what plain steps take, and whether it is being looked at.
        excusing: the step from which one that was held up is excused again.
        earned, spent: tokens a row and seconds, of late.
    """

    plain: _Plain = field(default_factory=_Plain)
    verifying: Line = field(default_factory=Line)
    drafting: float = 0.0
    drafts: int = 0
    steps: int = 0
    purse: Purse = field(default_factory=lambda: Purse(ALLOWANCE, INTEREST, SAVINGS))
    open: bool = True
    pause: int = 1
    rested: int = 0
    trying: bool = True
    hopeful: bool = False
    unchecked: int = 0
    watching: bool = False
    excusing: int = 0
    earned: float = 0.0
    spent: float = 0.0

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

    def learn(self, step: Step) -> None:
        """Take in what a step took, and what it gave a row."""
        self.steps += 1
        self.unchecked += 1
        if step.drafted:
            self.plain.disturb()
        if self.steps == 1 or self._excuse(step):
            return
        verifying = step.verifying
        if step.drafted:
            verifying = verifying if self.drafts else min(verifying, COLD * self.plain.seconds)
            self.verifying.learn(step.drafted / step.rows, verifying)
            each = step.drafting * step.rows / step.drafted
            self.drafting = each if self.drafts < 2 else MEMORY * self.drafting + (1 - MEMORY) * each
            self.drafts += 1
        elif self.plain.learn(verifying):
            self.unchecked = 0
        tokens, seconds = step.tokens / step.rows, step.drafting + verifying
        self.purse.enter(tokens, seconds, self.plain.seconds, step.drafted > 0)
        self.open = self.purse.balance > 0 if self.open else self.affordable >= TRIAL
        self.earned, self.spent = RECENT * self.earned + tokens, RECENT * self.spent + seconds
        if step.foreseen:
            self.encourage()

    def rest(self) -> bool:
        """Whether a step without drafts, while closed, needs no measuring; most do not."""
        self.rested += 1
        measured = self.rested % MEASURED == 0
        if not measured:
            self.purse.rest()
            self.open = self.affordable >= TRIAL
        return not measured

    def _excuse(self, step: Step) -> bool:
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
        self.open = self.affordable >= TRIAL
        if self.rested < self.pause or not self.open:
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
