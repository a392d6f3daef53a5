"""Times a drafter's proposals and updates, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafters.base import Drafter, OuterDrafter


@dataclass(frozen=True)
class Times:
    """Seconds of each proposal, and of each update after a step."""

    retrieve: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class Clocked(OuterDrafter):
    """Passes every call on to a drafter and measures its time.

    Args:
        inner: the drafter.
        times: collects the measurements; several drafters may share it.
    """

    def __init__(self, inner: Drafter, times: Times) -> None:
        super().__init__(inner)
        self.times = times

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """See ``Drafter.propose_batch``."""
        begin = time.perf_counter()
        trees = super().propose_batch(requests, budget)
        self.times.retrieve.append(time.perf_counter() - begin)
        return trees

    def observe(self, request: Request, outcome: Outcome) -> None:
        """See ``Drafter.observe``."""
        begin = time.perf_counter()
        super().observe(request, outcome)
        self.times.update.append(time.perf_counter() - begin)
