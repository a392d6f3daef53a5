"""Choose the rows of a step, so that no tenant's next token waits long for other tenants' rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forerun.engine.result import Commit
from forerun.server.admission import ScheduledRequest

MAX_SLOWDOWN = 2.0
"""Maximum cost of a step, relative to one with only the rows of the tenant that runs the fewest."""
MIN_SHARED_DRAFT = 4
"""Length to which other tenants' drafts are cut before their rows skip steps."""
TIMED_STEPS = 64
"""Number of recent steps from which the cost of a token is estimated."""
NEW_WEIGHT = 0.1
"""Weight of a step in a tenant's mean draft length."""


class StepPlan(NamedTuple):
    """Ids of the requests that skip a step, and the draft lengths allowed to others."""

    skipping: set[int]
    budgets: Mapping[int, int]


class StepShares:
    """A planner of steps with rows of several tenants.

    If another token costs little, as in large models, all rows step together. If every token costs as much as the
    first, a tenant's rows take turns: it has no more tokens in a step than the tenant with the fewest.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=TIMED_STEPS)  # tokens and seconds
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
            return StepPlan(set(), {})
        fewest = min(tenants, key=lambda tenant: len(tenants[tenant]))
        others = len(running) - len(tenants[fewest])
        tokens = self._tokens_for_others(len(tenants[fewest]) * (1 + self._drafts[fewest]), len(tenants))
        draft = max(MIN_SHARED_DRAFT, math.floor(tokens / others) - 1)
        stepping = self._in_turn(tenants, fewest, max(1, math.floor(tokens / (1 + draft) + 1e-6)))
        self._last.update({number: self._turns + place for place, number in enumerate(stepping, 1)})
        self._turns += len(stepping)
        own = {each.request.id for each in tenants[fewest]}
        return StepPlan(self._last.keys() - stepping - own, dict.fromkeys(stepping, draft))

    def record(self, stepped: Sequence[tuple[str, Commit]], seconds: float) -> None:
        """Record the time of a step without prefill; ``stepped`` has its commits by tenant."""
        self._steps.append((sum(1 + commit.proposed for _, commit in stepped), seconds))
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
        tokens, seconds = np.array(self._steps or [(1, 1.0)]).T
        fixed = 0.0  # constant part of a step's time, in units of a token's
        if np.ptp(tokens) > 0:
            each, rest = np.polyfit(tokens, seconds, 1)
            fixed = float(np.clip(rest / max(each, 1e-9), 0.0, 1e6))
        return max((tenants - 1) * own, (MAX_SLOWDOWN - 1) * (fixed + own))
