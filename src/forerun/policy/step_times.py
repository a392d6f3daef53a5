"""What the parts of a step take on this machine, as the clock shows it."""

from __future__ import annotations

from forerun.policy.exploration_budget import SHARE, START
from forerun.policy.pass_times import ALONE, AS_THE_CURVE_SAYS, Growth, Line, Passes, Rise

PAIR = 2
"""Plain steps that it takes to measure one. Drafting displaces what the next pass reads from the processor's caches, so
only a plain step that follows another one is measured."""


class StepTimes:
    """Times of plain steps, of steps with drafts, of asking for branches and of drafting passes.

    Args:
        loaded: seconds of a pass of cost 1, if they were measured before any step. They stand for those of steps until
            some were measured.
    """

    def __init__(self, loaded: float | None = None) -> None:
        self._loaded = loaded
        self.plain, self.asking = Passes(quantile=ALONE, warm=True), Passes(quantile=ALONE)
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
            self.plain.bound(plain, seconds)
            self.drafted.learn(plain + added, seconds)
            self._rise.learn(plain, added, seconds)
        elif self._before_plain:
            self.plain.learn(plain, seconds)
            self._since = 0
        self._before_plain = empty

    @property
    def settled(self) -> bool:
        """Whether it is known what plain steps take."""
        return self.plain.unit is not None or self._loaded is not None

    @property
    def drafts_known(self) -> bool:
        """Whether chains were measured. Until then their cost is a guess, and may be far too high."""
        return self.drafting.known

    @property
    def rise(self) -> Line:
        """The correction of the curve for passes with drafts; see ``Rise``."""
        return self._rise.line if self.plain.unit is not None else AS_THE_CURVE_SAYS

    @property
    def unit(self) -> float | None:
        """Seconds of a pass of cost 1 without drafts, as far as it is known. Passes with drafts may take longer than
        they cost, so until plain steps were measured the least that is known counts."""
        known = (self.drafted.unit, self._loaded)
        return self.plain.unit or min((unit for unit in known if unit is not None), default=None)

    @property
    def asking_cost(self) -> float:
        """What asking for a row's branches takes, in units of a pass of cost 1; 0 until steps have shown both. The
        first times find the processor's caches cold."""
        unit = self.plain.unit or self.drafted.unit
        return (self.asking.unit or 0.0) / unit if unit else 0.0

    @property
    def drafting_cost(self) -> Line:
        """What chains take to draft, in units of a pass of cost 1; in proportion to their size until it is known."""
        line, unit = self.drafting.line, self.unit
        return Line(line.start / unit, line.each / unit) if line is not None and unit else Line(0.0, 1.0)

    def due(self, gain: float) -> bool:
        """Whether to measure a plain step now, though drafts give ``gain`` times as many tokens a second.

        It is due if none was measured yet, or the last one was so long ago that another costs less than ``SHARE`` of
        the time since then. Where it is known from loading what such a step takes, only one that follows
        another is due.
        """
        if self.plain.unit is None and (self._loaded is None or self._before_plain):
            return gain - 1.0 <= START
        return self._since * SHARE > PAIR * max(gain, 1.0)
