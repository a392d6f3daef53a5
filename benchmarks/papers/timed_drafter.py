"""Times a drafter's proposals and updates, step by step.

A trie notes what was committed and learns it when it is asked for drafts. So that each time is of its own work, it is
made to learn as soon as it has noted, and both are the update.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter
from forerun.drafting.trie_drafter import TrieDrafter


@dataclass(frozen=True)
class Times:
    """Seconds of each proposal, and of each update after a step."""

    retrieve: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class TimedDrafter(OuterDrafter):
    """Passes every call on to a drafter and measures its time.

    Args:
        inner: the drafter.
        times: collects the measurements; several drafters may share it.
    """

    def __init__(self, inner: Drafter, times: Times) -> None:
        super().__init__(inner)
        self.times = times

    def propose(self, context: PassContext) -> list[DraftTree] | None:
        begin = time.perf_counter()
        trees = super().propose(context)
        self.times.retrieve.append(time.perf_counter() - begin)
        return trees

    def observe(self, request: Request, outcome: Outcome) -> None:
        begin = time.perf_counter()
        update(self.inner, request, outcome)
        self.times.update.append(time.perf_counter() - begin)


def update(drafter: Drafter, request: Request, outcome: Outcome) -> None:
    """Let a drafter observe a step, and learn from it at once."""
    drafter.observe(request, outcome)
    if isinstance(drafter, TrieDrafter):
        drafter.learn(request)
