"""What an engine and its drafters find out about the machine: the time, what passes cost, and how exact they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.pass_timing import costs_of
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve


@dataclass(frozen=True)
class Runtime:
    """How an engine measures. Tests give one with fixed answers, so that drafting repeats exactly.

    Attributes:
        clock: gives seconds, for drafters that go by time.
        costs: measures the passes of a model.
        exactness: finds out whether drafts can change the bits of a model's passes; called with the scorer, its
            position limit, and whether keys and values may lie off the device.
    """

    clock: Callable[[], float] = time.perf_counter
    costs: Callable[[Scorer], CostCurve] = costs_of
    exactness: Callable[[Scorer, int | None, bool], Exactness] = probe


_defaults = [Runtime()]


def default_runtime() -> Runtime:
    """The runtime of engines that are given none."""
    return _defaults[-1]


@contextmanager
def runtime_as_default(runtime: Runtime) -> Iterator[None]:
    """Let engines that are made meanwhile, in any thread, use this runtime."""
    _defaults.append(runtime)
    try:
        yield
    finally:
        _defaults.remove(runtime)
