"""Choose the rows of a step, so that no tenant's next token waits long for other tenants' rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from forerun.engine.prefill_pacing import RECENT_STEPS, STEPS_BESIDE
from forerun.engine.result import Commit
from forerun.server.admission import ScheduledRequest

MAX_SLOWDOWN = 2.0
"""Maximum cost of a step, relative to one with only the rows of the tenant that runs the fewest."""
MIN_SHARED_DRAFT = 4
"""Length to which other tenants' drafts are cut before their rows skip steps."""
NEW_WEIGHT = 0.1
"""Weight of a step in a tenant's mean draft length."""
HALF_LIFE = 1000
"""Steps after which a median of no new steps counts half. From 100 to 3,000, simulated limits do not change."""


class StepPlan(NamedTuple):
    """Ids of the requests that skip a step, and the draft lengths allowed to others."""

    skipping: set[int]
    budgets: Mapping[int, int]


class _Times:
    """The median seconds (interrupted steps, ten times as long, distort a mean) and mean tokens of recent steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.tokens, self.seconds, self.last = 0.0, 0.0, 0

    def add(self, tokens: int, seconds: float, step: int) -> None:
        self._seconds.append(seconds)
        self.seconds, self.last = median(self._seconds), step
        self.tokens += (tokens - self.tokens) / len(self._seconds)


class StepTimeLine:
    """A line through median step times, one point per power of two of tokens: else frequent lengths set its slope."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        self._times.setdefault(tokens.bit_length(), _Times()).add(tokens, seconds, self._steps)

    @property
    def most(self) -> float:
        """Tokens up to which the line is known: twice as many as any step had."""
        return 2 * max((each.tokens for each in self._times.values()), default=0.5)

    @property
    def fixed(self) -> float:
        """The constant part of a step's time, in units of a token's; 0 if nothing is known."""
        points = [
            (0.5 ** ((self._steps - each.last) / HALF_LIFE), each.tokens, each.seconds) for each in self._times.values()
        ]
        total = sum(weight for weight, _, _ in points)
        if len(points) < 2 or not total:
            return 0.0
        tokens, seconds = (sum(point[0] * point[part] for point in points) / total for part in (1, 2))
        spread = sum(weight * (each - tokens) ** 2 for weight, each, _ in points)
        slope = sum(weight * (each - tokens) * (time - seconds) for weight, each, time in points) / spread
        return max(0.0, seconds / slope - tokens) if slope > 0 else math.inf


class StepShares:
    """A planner of steps with rows of several tenants, of ``tenants`` that may come.

    If another token costs little, as in large models, all rows step together. If every token costs as much as the
    first, a tenant's rows take turns: it has no more tokens in a step than the tenant with the fewest. A tenant that is
    alone gets shorter drafts where others may come, whose first token waits for the step under way.
    """

    def __init__(self, tenants: int = 1) -> None:
        self._tenants, self._line = tenants, StepTimeLine()
        self._drafts: dict[str, float] = {}  # mean lengths, by tenant
        self._last: dict[int, int] = {}
        self._turns = 0

    def plan(self, running: Sequence[ScheduledRequest]) -> StepPlan:
        tenants: dict[str, list[ScheduledRequest]] = {}
        for each in running:
            tenants.setdefault(each.tenant, []).append(each)
        self._last = {each.request.id: self._last.get(each.request.id, 0) for each in running}
        self._drafts = {tenant: self._drafts.get(tenant, 0.0) for tenant in tenants}
        if len(tenants) < 2:
            return StepPlan(set(), self._budgets(running) if self._tenants > 1 else {})
        fewest = min(tenants, key=lambda tenant: len(tenants[tenant]))
        others = len(running) - len(tenants[fewest])
        tokens = self._tokens_for_others(len(tenants[fewest]) * (1 + self._drafts[fewest]), len(tenants))
        draft = max(MIN_SHARED_DRAFT, _floor(tokens / others) - 1)
        stepping = self._in_turn(tenants, fewest, max(1, _floor(tokens / (1 + draft))))
        self._last.update({number: self._turns + place for place, number in enumerate(stepping, 1)})
        self._turns += len(stepping)
        own = {each.request.id for each in tenants[fewest]}
        return StepPlan(self._last.keys() - stepping - own, dict.fromkeys(stepping, draft))

    def record(self, stepped: Sequence[tuple[str, Commit]], seconds: float) -> None:
        """Record the time of a step without prefill; ``stepped`` has its commits by tenant."""
        self._line.add(sum(1 + commit.proposed for _, commit in stepped), seconds)
        for tenant, commit in stepped:
            if tenant in self._drafts:
                self._drafts[tenant] += NEW_WEIGHT * (commit.proposed - self._drafts[tenant])

    def _in_turn(self, tenants: Mapping[str, list[ScheduledRequest]], fewest: str, most: int) -> list[int]:
        """Select requests of all tenants but ``fewest``, equally, the longest skipped first."""
        queues = [sorted(rows, key=lambda each: self._last[each.request.id]) for rows in tenants.values()]
        others = [queue for tenant, queue in zip(tenants, queues, strict=True) if tenant != fewest]
        places = range(max(map(len, others)))
        turns = [queue[place].request.id for place in places for queue in others if place < len(queue)]
        return turns[: max(most, len(others))]

    def _tokens_for_others(self, own: float, tenants: int) -> float:
        """Return the tokens of a step for all tenants but the one with the fewest rows."""
        room = (MAX_SLOWDOWN - 1) * (self._line.fixed + own)
        return max((tenants - 1) * own, min(room, self._line.most))

    def _budgets(self, running: Sequence[ScheduledRequest]) -> Mapping[int, int]:
        """Return draft lengths with which a step costs up to ``STEPS_BESIDE`` times one without drafts."""
        rows = len(running)
        drafts = min((STEPS_BESIDE - 1) * (self._line.fixed + rows), self._line.most)
        return dict.fromkeys((each.request.id for each in running), max(MIN_SHARED_DRAFT, _floor(drafts / rows)))


def _floor(number: float) -> int:
    return math.floor(number + 1e-6)
