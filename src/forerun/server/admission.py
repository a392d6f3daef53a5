"""Decide which requests run, which wait, and who is next: tenants get equal shares of every limited resource."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from forerun.core.request import Request
from forerun.engine.result import Commit
from forerun.kv.kv_tiers import DeviceReserve, NoRoomError, Tiers, min_device_bytes

log = logging.getLogger(__name__)

RESERVED_DEVICE_FRACTION = 0.25
"""Device memory kept free for new requests while old ones can be offloaded."""
SMALLER_REQUEST = "shorten the prompt or generate fewer tokens"

Ending = Literal["finished", "cancelled", "deadline", "displaced", "error"]


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a scheduler; raises ValueError for one under 1 (``waiting``: under 0)."""

    memory: int  # bytes of keys and values of running requests, unless the engine has ``tiers``
    rows: int = 16
    waiting: int = 128
    step: int = 256  # prompt tokens prefilled per step
    tenants: int = 1

    def __post_init__(self) -> None:
        for name, smallest in (("memory", 1), ("rows", 1), ("waiting", 0), ("step", 1), ("tenants", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")


@dataclass(eq=False)
class ScheduledRequest:
    """A submitted request. Its callbacks run in the scheduler's thread and must return at once."""

    request: Request
    tenant: str
    on_commit: Callable[[Commit], None]
    on_end: Callable[[Ending], None]  # called once; ``request.error`` then has an error's details
    deadline: float | None = None  # by ``time.monotonic``; the request then ends with the tokens it has
    needs: int = 0  # bytes of its keys and values
    tokens: int = 0  # its maximum length, including drafts
    drafting: int = 0  # the part of ``needs`` for draft levels
    placed: bool = False  # whether it occupies a place in the queue, as no row was free when it came
    admitted: float | None = None  # start by ``time.monotonic``
    ending: Ending | None = None

    def end(self, how: Ending) -> None:
        """Notify the client, once; log its failure."""
        if self.ending is None:
            self.ending = how
            attempt(partial(self.on_end, how), "the end of a request could not be delivered to its client")

    def seconds_left(self, now: float) -> float:
        """Estimate the time until a running request ends, at its maximum length and its speed so far."""
        elapsed, tokens = now - (self.admitted or now), max(1, len(self.request.generated))
        left = elapsed / tokens * self.request.remaining
        return left if self.deadline is None else min(left, self.deadline - now)


def attempt(job: Callable[[], Any], failure: str) -> bool:
    """Run a job; return whether it succeeded, and log its ``failure``."""
    try:
        job()
    except Exception:
        log.exception(failure)
        return False
    return True


class QueueFullError(Exception):
    """The queue is full. ``retry_after``: seconds until a place is likely to be free."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"the queue is full, {waiting} requests are waiting; try again in {retry_after} seconds")
        self.retry_after = retry_after


class FairShare:
    """One resource, divided equally among tenants; unused shares are lent, but ``reserve`` waits for new tenants."""

    def __init__(self, capacity: float, tenants: int = 1, reserve: float = 0) -> None:
        self.capacity, self._tenants, self._reserve = capacity, tenants, reserve
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """The amount that all tenants use."""
        return sum(self._used.values())

    def used_by(self, tenant: str) -> int:
        """Return the amount that a tenant uses."""
        return self._used[tenant]

    def share(self, tenant: str) -> float:
        """Return the amount that a tenant may always have."""
        present = len(self._used.keys() | {tenant})
        return self.capacity / (present + (present < self._tenants))

    def allows(self, tenant: str, amount: int) -> bool:
        """Return whether a tenant may acquire ``amount`` more now."""
        free = self.capacity - self.used - amount
        reserve = self._reserve if len(self._used) < self._tenants else 0
        return free >= reserve or (free >= 0 and self.within_share(tenant, amount))

    def within_share(self, tenant: str, amount: int) -> bool:
        """Return whether a tenant has nothing yet, or stays within its share with ``amount`` more."""
        mine = self._used.get(tenant, 0)
        return not mine or mine + amount <= self.share(tenant)

    def acquire(self, tenant: str, amount: int) -> None:
        if amount:
            self._used[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        self._used[tenant] -= amount
        if self._used[tenant] <= 0:
            del self._used[tenant]

    def lender(self, tenant: str) -> str | None:
        """Return the tenant furthest beyond its share, if ``tenant`` is within its own."""
        most = max(self._used, key=self._used.__getitem__, default=tenant)
        lends = most != tenant and self.within_share(tenant, 1) and self._used[most] > self.share(tenant)
        return most if lends else None


class Admission:
    """All waiting and running requests; the tenant that has been served the fewest tokens is next. One that returns
    after a pause starts level with the least served one present: unused shares are not saved up. An engine's ``tiers``
    count caches themselves; then only draft levels, on the device, are charged here."""

    def __init__(self, limits: SchedulerLimits, tiers: Tiers | None = None) -> None:
        self.limits = limits
        self.running: dict[int, ScheduledRequest] = {}
        self._queues: dict[str, deque[ScheduledRequest]] = {}
        self._served: dict[str, float] = {}
        self._places = FairShare(limits.waiting, limits.tenants)
        self._rows = FairShare(limits.rows, limits.tenants, reserve=1)
        self._starting = False
        self._tiers = tiers
        memory = float(limits.memory) if tiers is None else sum(tiers.memory.limits.values())
        self._memory = FairShare(memory, limits.tenants, reserve=memory / limits.rows)

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._queues.values()))

    @property
    def usage(self) -> float:
        """The used fraction of the memory for keys and values."""
        if self._tiers is None:
            return self._memory.used / self._memory.capacity
        limits, used = self._tiers.memory.limits, self._tiers.taken
        bounded = {tier: size for tier, size in limits.items() if size != math.inf}
        return sum(used[tier] for tier in bounded) / max(1.0, sum(bounded.values()))

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter([*self.running.values(), *(each for queue in self._queues.values() for each in queue)])

    def check(self, request: ScheduledRequest) -> None:
        """Raise a ValueError, with the numbers, for a request that can never fit."""
        if self._tiers is not None:
            try:
                self._tiers.placement(request.tokens, DeviceReserve(request.drafting), empty=True)
            except NoRoomError as error:
                raise ValueError(f"{error}; {SMALLER_REQUEST}") from None
        elif request.needs > self._memory.capacity:
            raise ValueError(
                f"the request needs {request.needs:,} bytes for keys and values, and there are "
                f"{self._memory.capacity:,}; {SMALLER_REQUEST}"
            )

    def check_places(self, tenant: str, requests: int) -> None:
        """Raise a QueueFullError if so many requests cannot all be placed, before any work for them."""
        share = math.floor(self._places.share(tenant)) - self._places.used_by(tenant)
        if requests > self._free_rows + max(self.limits.waiting - self._places.used, share):
            raise QueueFullError(self.waiting, self.retry_after(tenant))

    def add(self, request: ScheduledRequest) -> ScheduledRequest | None:
        """Enqueue a request; return the one that loses its place to it, if any. Raise QueueFullError if none does."""
        displaced, tenant = None, request.tenant
        starts = self._free_rows > 0 and self._rows.allows(tenant, 1 + self._starting_next) and self._has_room(request)
        if not starts and not self._places.allows(tenant, 1):
            lender = self._places.lender(tenant)
            if lender is None:
                raise QueueFullError(self.waiting, self.retry_after(tenant))
            displaced = self._queues[lender][-1]
            self.remove(displaced)
        self._served.setdefault(tenant, min(self._served.values(), default=0.0))
        self._queues.setdefault(tenant, deque()).append(request)
        if not starts:
            self._place(request)
        return displaced

    def next(self) -> ScheduledRequest | None:
        """Start and return the next request, or None; no request overtakes one that waits for memory."""
        for tenant in sorted(self._queues, key=self._served.__getitem__):
            request = self._queues[tenant][0]
            room, allowed = self._has_room(request), self._memory.allows(tenant, request.needs)
            if self._rows.allows(tenant, 1) and room and allowed:
                self.remove(request)
                self._start(request)
                return request
            if not room and self._memory.within_share(tenant, request.needs):
                return None
        return None

    def postpone(self, request: ScheduledRequest) -> None:
        """Put a request that could not start back at the front of its tenant's queue."""
        self.started()
        self.remove(request)
        self._served.setdefault(request.tenant, 0.0)
        self._queues.setdefault(request.tenant, deque()).appendleft(request)
        self._place(request)

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove a request; return whether it was present."""
        tenant = request.tenant
        if self.running.pop(request.request.id, None) is not None:
            self._rows.release(tenant, 1)
            self._memory.release(tenant, request.needs)
            if self._tiers is not None:
                self._tiers.charge(-request.drafting)
        else:
            queue = self._queues.get(tenant, deque())
            if request not in queue:
                return False
            queue.remove(request)
            if request.placed:
                request.placed = False
                self._places.release(tenant, 1)
            if not queue:
                del self._queues[tenant]
        return True

    def serve(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant's requests added to passes."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def forget(self) -> None:
        """Drop the counts of tenants without requests."""
        for tenant in self._served.keys() - self._queues.keys() - {each.tenant for each in self.running.values()}:
            del self._served[tenant]

    def retry_after(self, tenant: str) -> int:
        """Estimate the seconds until a row is free for a tenant, from the running requests."""
        now = time.monotonic()
        left = sorted(each.seconds_left(now) for each in list(self.running.values()))
        rounds, place = divmod(self._places.used_by(tenant), max(1, len(left)))
        return max(1, math.ceil(left[place] + rounds * left[-1])) if left else 1

    def reserve(self, request: ScheduledRequest) -> DeviceReserve | None:
        """Return the device memory that the request from ``next`` must leave free, if the engine has tiers."""
        return None if self._tiers is None else DeviceReserve(wanted=self._wanted(self._tiers, request))

    def started(self) -> None:
        """Note that the request from ``next`` has its cache, or has ended."""
        self._starting = False

    @property
    def _starting_next(self) -> int:
        """Count requests that came while rows were free, and have not started yet."""
        return self.waiting - self._places.used

    @property
    def _free_rows(self) -> int:
        return 0 if self._places.used else self.limits.rows - len(self.running) - self._starting_next

    def _place(self, request: ScheduledRequest) -> None:
        request.placed = True
        self._places.acquire(request.tenant, 1)

    def _start(self, request: ScheduledRequest) -> None:
        self._starting = True
        self.running[request.request.id] = request
        self._rows.acquire(request.tenant, 1)
        self._memory.acquire(request.tenant, request.needs)
        if self._tiers is not None:
            self._tiers.charge(request.drafting)

    def _wanted(self, tiers: Tiers, request: ScheduledRequest) -> int:
        """Return the bytes of device buffers that a request leaves to later ones of its length, if it can."""
        each = min_device_bytes(tiers.shape, request.tokens)
        reserved = int(RESERVED_DEVICE_FRACTION * tiers.memory.device) // each
        return each * max(0, min(self.limits.rows - len(self.running) + self._starting - 1, reserved))

    def _has_room(self, request: ScheduledRequest) -> bool:
        if self._tiers is None:
            return self._memory.used + request.needs <= self._memory.capacity
        try:
            self._tiers.placement(request.tokens, DeviceReserve(request.drafting, self._wanted(self._tiers, request)))
        except NoRoomError:
            return False
        return True
