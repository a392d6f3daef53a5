"""The admission queue: what a scheduler takes on, who runs next, and whether their keys and values fit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from forerun.core.request import Request
from forerun.engine.result import Commit
from forerun.kv.kv_tiers import NoRoomError, Tiers, min_device_bytes

log = logging.getLogger(__name__)

RESERVED_DEVICE_FRACTION = 0.25
"""Device memory kept free for new requests while old ones can be offloaded."""
SMALLER_REQUEST = "shorten the prompt or generate fewer tokens"

Ending = Literal["finished", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What a scheduler takes on.

    Attributes:
        memory: bytes for keys and values of all running requests; an engine's ``tiers`` have their own limits.
        rows: requests that may run at once.
        waiting: requests that may wait.
        step: tokens of texts that a step may read; see ``Batch``.

    Raises:
        ValueError: for a limit under 1 (``waiting``: under 0).
    """

    memory: int
    rows: int = 16
    waiting: int = 128
    step: int = 256

    def __post_init__(self) -> None:
        for name, smallest in (("memory", 1), ("rows", 1), ("waiting", 0), ("step", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")


@dataclass(eq=False)
class ScheduledRequest:
    """A submitted request: it waits, runs and ends.

    Both callbacks run in the scheduler's thread and must return at once.

    Attributes:
        request: what is decoded.
        tenant: its owner; tenants get equal shares.
        on_commit: called with each step's tokens.
        on_end: called once with the ending; ``request.error`` has an error's details.
        deadline: when it is ended with the tokens it has, by ``time.monotonic``; None for never.
        needs: bytes of keys and values that it takes in all.
        tokens: its text at its longest, drafts included.
        drafting: the part of ``needs`` that draft levels take.
        submitted, admitted, ended: by ``time.monotonic``; None before.
        ending: how it ended.
    """

    request: Request
    tenant: str
    on_commit: Callable[[Commit], None]
    on_end: Callable[[Ending], None]
    deadline: float | None = None
    needs: int = 0
    tokens: int = 0
    drafting: int = 0
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    ended: float | None = None
    ending: Ending | None = None

    def end(self, how: Ending) -> None:
        """Tell its client, once. A client that fails does not stop the others."""
        if self.ending is None:
            self.ending, self.ended = how, time.monotonic()
            try:
                self.on_end(how)
            except Exception:
                log.exception("the end of a request could not be delivered to its client")


class QueueFullError(Exception):
    """The queue is full.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait already, and no more may; try again in {retry_after:.0f} seconds")
        self.retry_after = retry_after


class FairQueue:
    """One queue for each tenant. The tenant that has been served the fewest tokens comes next.

    A tenant that comes back after a pause starts level with the least served of those present: unused shares are not
    saved up.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[ScheduledRequest]] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (request for queue in self._queues.values() for request in queue)

    def add(self, request: ScheduledRequest) -> None:
        """Append to the tenant's queue."""
        if request.tenant not in self._served:
            self._served[request.tenant] = min(self._served.values(), default=0.0)
        self._queues.setdefault(request.tenant, deque()).append(request)

    def next(self) -> ScheduledRequest | None:
        """The request to admit next; None if the queue is empty."""
        if not self._queues:
            return None
        tenant = min(self._queues, key=lambda name: self._served[name])
        return self._queues[tenant][0]

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove; return True if it was present."""
        queue = self._queues.get(request.tenant, deque())
        if request not in queue:
            return False
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]
        return True

    def serve(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant's requests took in passes."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def forget(self, present: set[str]) -> None:
        """Drop the counts of tenants that neither run nor wait."""
        for tenant in set(self._served) - present - set(self._queues):
            del self._served[tenant]


class KVAdmission:
    """Bytes of one memory. A request holds its bytes from its admission to its end.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def check(self, request: ScheduledRequest) -> None:
        """Refuse a request that can never fit.

        Raises:
            ValueError: with the numbers.
        """
        if request.needs > self.limit:
            raise ValueError(
                f"the request needs {request.needs:,} bytes for keys and values, and there are {self.limit:,}; "
                f"{SMALLER_REQUEST}"
            )

    def fits(self, request: ScheduledRequest) -> bool:
        """Whether there is room now."""
        return self.used + request.needs <= self.limit

    def acquire(self, request: ScheduledRequest) -> None:
        """Count an admitted request."""
        self.used += request.needs

    def release(self, request: ScheduledRequest) -> None:
        """Stop counting a request that has ended."""
        self.used -= request.needs

    @property
    def usage(self) -> float:
        """The used part of the memory."""
        return self.used / self.limit


class TieredKVAdmission(KVAdmission):
    """Bytes of all tiers. The engine's ``Tiers`` count the caches themselves. Draft levels lie on the device and are
    counted here.

    Args:
        tiers: the engine's.
        places: how many more requests may start now.
    """

    def __init__(self, tiers: Tiers, places: Callable[[], int]) -> None:
        super().__init__(0)
        self._tiers, self._places = tiers, places
        tiers.device_reserve = self._left_to_others

    def check(self, request: ScheduledRequest) -> None:
        try:
            self._tiers.placement(request.tokens, request.drafting, empty=True)
        except NoRoomError as error:
            raise ValueError(f"{error}; {SMALLER_REQUEST}") from None

    def fits(self, request: ScheduledRequest) -> bool:
        try:
            self._tiers.placement(request.tokens, request.drafting)
        except NoRoomError:
            return False
        return True

    def acquire(self, request: ScheduledRequest) -> None:
        self._tiers.charge(request.drafting)

    def release(self, request: ScheduledRequest) -> None:
        self._tiers.charge(-request.drafting)

    @property
    def usage(self) -> float:
        """The used part of the tiers that have limits."""
        limits = {tier: size for tier, size in self._tiers.memory.limits.items() if size != float("inf")}
        used = self._tiers.taken
        return sum(used[tier] for tier in limits) / max(1.0, sum(limits.values()))

    def _left_to_others(self, tokens: int) -> int:
        """Device bytes that a new text leaves free: the buffers of later texts of the same length."""
        each = min_device_bytes(self._tiers.shape, tokens)
        reserved = int(RESERVED_DEVICE_FRACTION * self._tiers.memory.device) // each
        return each * max(0, min(self._places() - 1, reserved))
