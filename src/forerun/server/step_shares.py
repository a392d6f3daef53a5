"""Which rows a step has while several tenants run some, so that nobody's next token waits long for others' rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forerun.engine.result import Commit
from forerun.server.admission import ScheduledRequest

MAX_SLOWDOWN = 2.0
"""A step may take twice as long as one with the rows of that tenant alone that runs the fewest."""
MIN_SHARED_DRAFT = 4
"""Drafts of other tenants' rows are cut to this, before rows sit steps out."""
TIMED_STEPS = 64
"""Steps from whose times the cost of a token is known."""
NEW_WEIGHT = 0.1
"""Weight of a step in the mean length of a tenant's drafts."""


class StepPlan(NamedTuple):
    """Ids of the requests that sit a step out, and the longest drafts of others."""

    resting: set[int]
    budgets: Mapping[int, int]


class StepShares:
    """Plans steps. Where a token more costs little, as with large models whose weights take the time, all rows step
    together. Where each costs as much as the first, a tenant has no more tokens in a step than the one that has the
    fewest, and its rows take turns."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=TIMED_STEPS)  # tokens and seconds
        self._drafts: dict[str, float] = {}  # mean lengths, by tenant
        self._last: dict[int, int] = {}
        self._turns = 0

    def plan(self, running: Sequence[ScheduledRequest]) -> StepPlan:
        """The next step."""
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

    def learn(self, stepped: Sequence[tuple[str, Commit]], seconds: float) -> None:
        """A step that only decoded has taken some time; ``stepped``: its commits by tenant."""
        self._steps.append((sum(1 + commit.proposed for _, commit in stepped), seconds))
        for tenant, commit in stepped:
            if tenant in self._drafts:
                self._drafts[tenant] += NEW_WEIGHT * (commit.proposed - self._drafts[tenant])

    def _in_turn(self, tenants: Mapping[str, list[ScheduledRequest]], fewest: str, most: int) -> list[int]:
        """Requests of all tenants but one, those first that have sat out the longest, as many of each tenant."""
        queues = [sorted(rows, key=lambda each: self._last[each.request.id]) for rows in tenants.values()]
        others = [queue for tenant, queue in zip(tenants, queues, strict=True) if tenant != fewest]
        places = range(max(map(len, others)))
        turns = [queue[place].request.id for place in places for queue in others if place < len(queue)]
        return turns[: max(most, len(others))]

    def _tokens_for_others(self, own: float, tenants: int) -> float:
        """Tokens that a step has beside those of the tenant with the fewest rows."""
        tokens, seconds = np.array(self._steps or [(1, 1.0)]).T
        fixed = 0.0  # the part of a step's time that does not depend on its tokens, in times of a token
        if np.ptp(tokens) > 0:
            each, rest = np.polyfit(tokens, seconds, 1)
            fixed = float(np.clip(rest / max(each, 1e-9), 0.0, 1e6))
        return max((tenants - 1) * own, (MAX_SLOWDOWN - 1) * (fixed + own))
