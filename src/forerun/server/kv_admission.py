"""Whether there is room for a request's keys and values: in one memory, or on the device and off it."""

from __future__ import annotations

from collections.abc import Callable

from forerun.kv.kv_tiers import Tiers, least
from forerun.kv.placement import NoRoomError
from forerun.server.ticket import Ticket

KEPT = 0.25
"""Part of the device's bytes that texts leave to others while there are free places, if they can go elsewhere."""
ADVICE = "shorten the prompt or generate fewer tokens"


class KVAdmission:
    """Bytes of one memory, which requests hold from their admission to their end.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def check(self, ticket: Ticket) -> None:
        """Refuse what can never have room.

        Raises:
            ValueError: with the numbers.
        """
        if ticket.needs > self.limit:
            raise ValueError(
                f"the request needs {ticket.needs:,} bytes for keys and values, and there are {self.limit:,}; {ADVICE}"
            )

    def fits(self, ticket: Ticket) -> bool:
        """Whether there is room now."""
        return self.taken + ticket.needs <= self.limit

    def take(self, ticket: Ticket) -> None:
        """A request is admitted."""
        self.taken += ticket.needs

    def give(self, ticket: Ticket) -> None:
        """It has ended."""
        self.taken -= ticket.needs

    @property
    def usage(self) -> float:
        """The part that is taken."""
        return self.taken / self.limit


class TieredRoom(KVAdmission):
    """Bytes of all tiers. The caches themselves are counted by the engine's ``Tiers``, whoever has them; what draft
    levels take is on the device, and counted here.

    Args:
        tiers: of the engine.
        places: how many more texts may come now.
    """

    def __init__(self, tiers: Tiers, places: Callable[[], int]) -> None:
        super().__init__(0)
        self._tiers, self._places = tiers, places
        tiers.leave = self._left_to_others

    def check(self, ticket: Ticket) -> None:
        """See ``KVAdmission.check``."""
        try:
            self._tiers.placed(ticket.tokens, ticket.drafting, empty=True)
        except NoRoomError as error:
            raise ValueError(f"{error}; {ADVICE}") from None

    def fits(self, ticket: Ticket) -> bool:
        """See ``KVAdmission.fits``."""
        try:
            self._tiers.placed(ticket.tokens, ticket.drafting)
        except NoRoomError:
            return False
        return True

    def take(self, ticket: Ticket) -> None:
        """See ``KVAdmission.take``."""
        self._tiers.lend(ticket.drafting)

    def give(self, ticket: Ticket) -> None:
        """See ``KVAdmission.give``."""
        self._tiers.lend(-ticket.drafting)

    @property
    def usage(self) -> float:
        """See ``KVAdmission.usage``; of the tiers that have limits."""
        limits = {tier: size for tier, size in self._tiers.memory.limits.items() if size != float("inf")}
        taken = self._tiers.taken
        return sum(taken[tier] for tier in limits) / max(1.0, sum(limits.values()))

    def _left_to_others(self, tokens: int) -> int:
        """Bytes on the device that a new text leaves to those that may come: their buffers, if they are as long."""
        each = least(self._tiers.shape, tokens)
        return each * max(0, min(self._places() - 1, int(KEPT * self._tiers.memory.device) // each))
