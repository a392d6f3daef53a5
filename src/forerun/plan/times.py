"""What the parts of a step take on this machine, as the clock shows it."""

from __future__ import annotations

from forerun.plan.account import SHARE, START
from forerun.plan.passes import ALONE, AS_THE_CURVE_SAYS, Growth, Line, Passes, Rise

PAIR = 2
"""Plain steps that show what one of them takes: among drafts a plain step takes longer, for drafting displaces what it
reads from the processor's caches. So one counts that comes behind another."""


class Times:
    """Times of plain steps, of steps with drafts, of asking for branches and of drafting passes."""

    def __init__(self) -> None:
        self.plain, self.asking = Passes(quantile=ALONE), Passes()
        self.drafted, self.drafting = Passes(self.plain), Growth(self.plain)
        self._rise = Rise(self.plain)
        self._since = 0
        self._before_plain = False

    def step(self, plain: float, added: float, seconds: float, empty: bool) -> None:
        """A step took so long, from the end of drafting to the end of its pass.

        Args:
            plain: what its pass costs by the curve, but for drafts.
            added: what they add.
            seconds: it took.
            empty: whether nothing was drafted.
        """
        self._since += 1
        if not empty:
            self.drafted.learn(plain + added, seconds)
            self._rise.learn(plain, added, seconds)
        elif self._before_plain:
            self.plain.learn(plain, seconds)
            self._since = 0
        self._before_plain = empty

    @property
    def settled(self) -> bool:
        """Whether it is known what plain steps take."""
        return self.plain.unit is not None

    @property
    def rise(self) -> Line:
        """How much longer passes with drafts take than those without, by what the curve says that the drafts add."""
        return self._rise.line if self.settled else AS_THE_CURVE_SAYS

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts, as far as it is known."""
        return self.plain.unit or self.drafted.unit

    @property
    def asking_cost(self) -> float:
        """What asking for a row's branches takes, in units of a pass of cost 1; 0 where nothing is known of it."""
        return (self.asking.unit or 0.0) / self.unit if self.unit else 0.0

    @property
    def drafting_cost(self) -> Line:
        """What chains take to draft, in units of a pass of cost 1; their size, where nothing is known of it."""
        line, unit = self.drafting.line, self.unit
        return Line(line.start / unit, line.each / unit) if line is not None and unit else Line(0.0, 1.0)

    def due(self, gain: float) -> bool:
        """Whether plain steps have to be seen, for drafts that give ``gain`` times as many tokens a second: they never
        were, or not for so long that it costs less than the share of time that may be lost."""
        if not self.settled:
            return gain - 1.0 <= START
        return self._since * SHARE > PAIR * max(gain, 1.0)
