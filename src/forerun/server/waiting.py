"""Requests that wait for a place, in an order that is fair to tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from forerun.server.ticket import Ticket


class QueueFullError(Exception):
    """There are as many requests waiting as may wait.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait already, as many as may; try again in {retry_after:.0f} seconds")
        self.retry_after = retry_after


class Waiting:
    """One queue for each tenant. Whose tenant has been served the fewest tokens comes next.

    A tenant that comes back after a pause starts level with the one that was served least of those that are there: what
    it did not use is not saved up.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Ticket]] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for queue in self._queues.values() for ticket in queue)

    def add(self, ticket: Ticket) -> None:
        """At the end of its tenant's queue."""
        if ticket.tenant not in self._served:
            self._served[ticket.tenant] = min(self._served.values(), default=0.0)
        self._queues.setdefault(ticket.tenant, deque()).append(ticket)

    def next(self) -> Ticket | None:
        """Who is to be admitted next; None if nobody waits."""
        if not self._queues:
            return None
        tenant = min(self._queues, key=lambda name: self._served[name])
        return self._queues[tenant][0]

    def remove(self, ticket: Ticket) -> bool:
        """Take one out, wherever it stands; whether it was there."""
        queue = self._queues.get(ticket.tenant, deque())
        if ticket not in queue:
            return False
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.tenant]
        return True

    def serve(self, tenant: str, tokens: int) -> None:
        """A tenant's requests have taken so many tokens of passes."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def forget(self, present: set[str]) -> None:
        """Keep account only of tenants that are present or wait."""
        for tenant in set(self._served) - present - set(self._queues):
            del self._served[tenant]
