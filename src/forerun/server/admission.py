"""Who waits, who runs and who is next: tenants have equal shares of everything that a server has only so much of."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

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
    """What a scheduler takes on.

    Attributes:
        memory: bytes for keys and values of all running requests; an engine's ``tiers`` have their own limits.
        rows: requests that may run at once.
        waiting: requests that may wait.
        step: tokens of texts that a step may read; see ``Batch``.
        tenants: that share all this.

    Raises:
        ValueError: for a limit under 1 (``waiting``: under 0).
    """

    memory: int
    rows: int = 16
    waiting: int = 128
    step: int = 256
    tenants: int = 1

    def __post_init__(self) -> None:
        for name, smallest in (("memory", 1), ("rows", 1), ("waiting", 0), ("step", 1), ("tenants", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")


@dataclass(eq=False)
class ScheduledRequest:
    """A submitted request: it waits, runs and ends.

    Both callbacks run in the scheduler's thread and must return at once.

    Attributes:
        request: what is decoded.
        tenant: its owner.
        on_commit: called with each step's tokens.
        on_end: called once with the ending; ``request.error`` has an error's details.
        deadline: when it is ended with the tokens it has, by ``time.monotonic``; None for never.
        needs: bytes of keys and values that it takes in all.
        tokens: its text at its longest, drafts included.
        drafting: the part of ``needs`` that draft levels take.
        placed: whether it takes one of the places to wait, as no row was free when it came.
        admitted: when it began to run, by ``time.monotonic``; None before.
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
    placed: bool = False
    admitted: float | None = None
    ending: Ending | None = None

    def end(self, how: Ending) -> None:
        """Tell its client, once. A client that fails does not stop the others."""
        if self.ending is None:
            self.ending = how
            try:
                self.on_end(how)
            except Exception:
                log.exception("the end of a request could not be delivered to its client")

    def seconds_left(self, now: float) -> float:
        """Time until a running request ends, if it is as long as it may be and goes on as before."""
        elapsed, tokens = now - (self.admitted or now), max(1, len(self.request.generated))
        left = elapsed / tokens * self.request.remaining
        return left if self.deadline is None else min(left, self.deadline - now)


class QueueFullError(Exception):
    """The queue is full.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests wait already, and no more may; try again in {retry_after} seconds")
        self.retry_after = retry_after


class FairShare:
    """One resource of a server, divided among its tenants.

    Each has an equal share. What it does not use is lent to the others, but for a part that is kept as long as there
    are tenants who have nothing of it.

    Args:
        capacity: how much there is.
        tenants: that may come.
        kept: for tenants who have nothing.
    """

    def __init__(self, capacity: float, tenants: int = 1, kept: float = 0) -> None:
        self.capacity, self._tenants, self._kept = capacity, tenants, kept
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """How much all tenants have together."""
        return sum(self._used.values())

    def of(self, tenant: str) -> int:
        return self._used[tenant]

    def share(self, tenant: str) -> float:
        """What a tenant may have at any time."""
        present = len(self._used.keys() | {tenant})
        return self.capacity / (present + (present < self._tenants))

    def allows(self, tenant: str, amount: int) -> bool:
        """Whether a tenant may take more now."""
        free = self.capacity - self.used - amount
        kept = self._kept if len(self._used) < self._tenants else 0
        return free >= kept or (free >= 0 and self.owed(tenant, amount))

    def owed(self, tenant: str, amount: int) -> bool:
        """Whether a tenant has nothing yet, or stays within its share with this."""
        mine = self._used.get(tenant, 0)
        return not mine or mine + amount <= self.share(tenant)

    def take(self, tenant: str, amount: int) -> None:
        if amount:
            self._used[tenant] += amount

    def give(self, tenant: str, amount: int) -> None:
        """Count what a tenant gives back."""
        self._used[tenant] -= amount
        if self._used[tenant] <= 0:
            del self._used[tenant]

    def debtor(self, tenant: str) -> str | None:
        """Who has the most beyond their share, so that a tenant within its own may take from them."""
        most = max(self._used, key=self._used.__getitem__, default=tenant)
        return most if most != tenant and self.owed(tenant, 1) and self._used[most] > self.share(tenant) else None


class Admission:
    """All requests that wait or run. The tenant that has been served the fewest tokens comes next.

    A request holds its row and its bytes of keys and values from its admission to its end. A tenant that comes back
    after a pause starts level with the least served of those present: unused shares are not saved up.

    Args:
        limits: the scheduler's.
        tiers: the engine's, which count the caches themselves; draft levels lie on the device and are charged here.
            None to count all here.
    """

    def __init__(self, limits: SchedulerLimits, tiers: Tiers | None = None) -> None:
        self.limits = limits
        self.running: dict[int, ScheduledRequest] = {}
        self._queues: dict[str, deque[ScheduledRequest]] = {}
        self._served: dict[str, float] = {}
        self._places = FairShare(limits.waiting, limits.tenants)
        self._rows = FairShare(limits.rows, limits.tenants, kept=1)
        self._starting = False
        self._tiers, memory = tiers, float(limits.memory)
        if tiers is not None:
            memory = sum(tiers.memory.limits.values())
        self._memory = FairShare(memory, limits.tenants, kept=memory / limits.rows)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues.values()))

    @property
    def usage(self) -> float:
        """The used part of all memory for keys and values."""
        if self._tiers is None:
            return self._memory.used / self._memory.capacity
        limits, used = self._tiers.memory.limits, self._tiers.taken
        bounded = {tier: size for tier, size in limits.items() if size != math.inf}
        return sum(used[tier] for tier in bounded) / max(1.0, sum(bounded.values()))

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter([*self.running.values(), *(each for queue in self._queues.values() for each in queue)])

    def check(self, request: ScheduledRequest) -> None:
        """Refuse a request that can never fit.

        Raises:
            ValueError: with the numbers.
        """
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

    def check_places(self, tenant: str, texts: int) -> None:
        """Refuse texts for which there are not enough places, before any work for them is done.

        Raises:
            QueueFullError: says when to come again.
        """
        share = math.floor(self._places.share(tenant)) - self._places.of(tenant)
        if texts > self._free_rows + max(self.limits.waiting - self._places.used, share):
            raise QueueFullError(self.waiting, self.retry_after(tenant))

    def add(self, request: ScheduledRequest) -> ScheduledRequest | None:
        """Let a request wait.

        Returns:
            The request that has lost its place to it: the newest of the tenant that waits with the most, where that is
            more than its share. None if there was a free place.

        Raises:
            QueueFullError: if all places are taken, and no other tenant has more than its share.
        """
        displaced, tenant = None, request.tenant
        starts = self._free_rows > 0 and self._rows.allows(tenant, 1 + self._starting_next) and self._has_room(request)
        if not starts and not self._places.allows(tenant, 1):
            debtor = self._places.debtor(tenant)
            if debtor is None:
                raise QueueFullError(self.waiting, self.retry_after(tenant))
            displaced = self._queues[debtor][-1]
            self.remove(displaced)
        self._served.setdefault(tenant, min(self._served.values(), default=0.0))
        self._queues.setdefault(tenant, deque()).append(request)
        if not starts:
            self._place(request)
        return displaced

    def next(self) -> ScheduledRequest | None:
        """The request to start next, which runs from now on; None if none may start.

        A tenant that would have more than its share is passed over if there is no room for that. No request overtakes
        another one that waits for memory, or a large one might wait for ever.
        """
        for tenant in sorted(self._queues, key=self._served.__getitem__):
            request = self._queues[tenant][0]
            room, allowed = self._has_room(request), self._memory.allows(tenant, request.needs)
            if self._rows.allows(tenant, 1) and room and allowed:
                self.remove(request)
                self._start(request)
                return request
            if not room and self._memory.owed(tenant, request.needs):
                return None
        return None

    def postpone(self, request: ScheduledRequest) -> None:
        """Let a request that could not start after all wait on, before all others of its tenant."""
        self.started()
        self.remove(request)
        self._served.setdefault(request.tenant, 0.0)
        self._queues.setdefault(request.tenant, deque()).appendleft(request)
        self._place(request)

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove; return True if it was present."""
        tenant = request.tenant
        if self.running.pop(request.request.id, None) is not None:
            self._rows.give(tenant, 1)
            self._memory.give(tenant, request.needs)
            if self._tiers is not None:
                self._tiers.charge(-request.drafting)
        else:
            queue = self._queues.get(tenant, deque())
            if request not in queue:
                return False
            queue.remove(request)
            if request.placed:
                request.placed = False
                self._places.give(tenant, 1)
            if not queue:
                del self._queues[tenant]
        return True

    def serve(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant's requests took in passes."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def forget(self) -> None:
        """Drop the counts of tenants that neither run nor wait."""
        for tenant in self._served.keys() - self._queues.keys() - {each.tenant for each in self.running.values()}:
            del self._served[tenant]

    def retry_after(self, tenant: str) -> int:
        """Seconds until a row is likely to be free for a tenant, by the rows that run."""
        now = time.monotonic()
        left = sorted(each.seconds_left(now) for each in list(self.running.values()))
        rounds, place = divmod(self._places.of(tenant), max(1, len(left)))
        return max(1, math.ceil(left[place] + rounds * left[-1])) if left else 1

    def reserve(self, request: ScheduledRequest) -> DeviceReserve | None:
        """What the request from ``next`` leaves free on the device, where the engine's tiers count its cache."""
        return None if self._tiers is None else DeviceReserve(wanted=self._wanted(self._tiers, request))

    def started(self) -> None:
        """The request from ``next`` has its cache now, or has ended."""
        self._starting = False

    @property
    def _starting_next(self) -> int:
        """How many requests came while rows were free, and have not started yet."""
        return self.waiting - self._places.used

    @property
    def _free_rows(self) -> int:
        """Rows for new requests: none if others wait for one."""
        return 0 if self._places.used else self.limits.rows - len(self.running) - self._starting_next

    def _place(self, request: ScheduledRequest) -> None:
        request.placed = True
        self._places.take(request.tenant, 1)

    def _start(self, request: ScheduledRequest) -> None:
        self._starting = True
        self.running[request.request.id] = request
        self._rows.take(request.tenant, 1)
        self._memory.take(request.tenant, request.needs)
        if self._tiers is not None:
            self._tiers.charge(request.drafting)

    def _wanted(self, tiers: Tiers, request: ScheduledRequest) -> int:
        """Device bytes that a request leaves free if it can: the buffers of later texts of the same length."""
        each = min_device_bytes(tiers.shape, request.tokens)
        reserved = int(RESERVED_DEVICE_FRACTION * tiers.memory.device) // each
        return each * max(0, min(self.limits.rows - len(self.running) + self._starting - 1, reserved))

    def _has_room(self, request: ScheduledRequest) -> bool:
        """Whether its keys and values fit now."""
        if self._tiers is None:
            return self._memory.used + request.needs <= self._memory.capacity
        try:
            self._tiers.placement(request.tokens, DeviceReserve(request.drafting, self._wanted(self._tiers, request)))
        except NoRoomError:
            return False
        return True
