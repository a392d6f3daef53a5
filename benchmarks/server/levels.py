"""How much is asked at a time: by so many clients that wait for their answers, or by arrivals that wait for nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from benchmarks.server.load_requests import LoadRequest

TURNS = 4
"""Answers for each client of a closed loop, at least. With fewer, a level is mostly its beginning and its end, when not
all clients are there."""


@dataclass(frozen=True)
class Level:
    """A load, and what is asked under it.

    Attributes:
        kind: ``clients``, each of which asks again when it has its answer (closed loop), or ``rate``, at which requests
            arrive whatever becomes of the others (open loop).
        value: the number of clients, or requests per second.
        requests: in the order in which they are sent.
        seed: of the arrivals.
    """

    kind: Literal["clients", "rate"]
    value: float
    requests: Sequence[LoadRequest]
    seed: int

    @property
    def name(self) -> str:
        """As tables have it."""
        if self.kind == "rate":
            return f"{self.value:g} per second"
        return f"{self.value:g} client" + "s" * (self.value != 1)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which ``count`` requests of a Poisson process arrive; the first one's is 0.

    Args:
        rate: requests per second.
        count: of requests.
        seed: of the gaps, which are exponential and independent.
    """
    rng, at, found = Random(f"arrivals/{seed}"), 0.0, list[float]()
    for _ in range(count):
        found.append(at)
        at += rng.expovariate(rate)
    return found


def build(
    clients: Sequence[int], rates: Sequence[float], least: int, requests: Sequence[LoadRequest], seed: int
) -> list[Level]:
    """The levels of one round. Each has requests of its own, so that no answer is known from an earlier level.

    Args:
        clients: of the closed loops.
        rates: of the open loops, in requests per second.
        least: requests of each level; see ``TURNS``.
        requests: as many as ``needed`` says, or more.
        seed: of the arrivals.
    """
    left = iter(requests)
    closed = [Level("clients", each, list(islice(left, size(each, least))), seed) for each in clients]
    return [*closed, *(Level("rate", each, list(islice(left, least)), seed) for each in rates)]


def size(clients: int, least: int) -> int:
    """Requests of a closed loop."""
    return max(least, TURNS * clients)


def needed(clients: Sequence[int], rates: Sequence[float], least: int) -> int:
    """Requests of all levels of a round."""
    return sum(size(each, least) for each in clients) + least * len(rates)
