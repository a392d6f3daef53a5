"""What an engine and its drafters find out about the machine: the time, what passes cost, and how exact they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from forerun.models.forward.exactness import Exactness
from forerun.models.forward.scorer import Scorer, SelfTest
from forerun.models.forward.startup_cache import StartupCache
from forerun.policy.cost_curve import CostCurve

_startup = StartupCache()


@dataclass(frozen=True)
class Runtime:
    """How an engine measures. Tests give one with fixed answers, so that drafting repeats exactly.

    By default results are kept for later engines and processes (``StartupCache``).

    Attributes:
        clock: gives seconds, for drafters that go by time.
        costs: measures the passes of a model.
        exactness: finds out whether drafts can change the bits of a model's passes; called with the scorer, its
            position limit, and whether keys and values may lie off the device.
        self_test: tests whether a scorer's logits are the model's own; called with the scorer and the test.
    """

    clock: Callable[[], float] = time.perf_counter
    costs: Callable[[Scorer], CostCurve] = _startup.costs
    exactness: Callable[[Scorer, int | None, bool], Exactness] = _startup.exactness
    self_test: SelfTest = _startup.self_test


_defaults = [Runtime()]


def default_runtime() -> Runtime:
    """The runtime of engines that are given none."""
    return _defaults[-1]


def without_folder(runtime: Runtime) -> Runtime:
    """The same runtime, but what decides on losslessness is measured in this process."""
    cache = StartupCache(lambda: None)
    return replace(runtime, exactness=cache.exactness, self_test=cache.self_test)


@contextmanager
def runtime_as_default(runtime: Runtime) -> Iterator[None]:
    """Let engines that are made meanwhile, in any thread, use this runtime."""
    _defaults.append(runtime)
    try:
        yield
    finally:
        _defaults.remove(runtime)
