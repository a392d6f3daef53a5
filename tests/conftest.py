"""One thread: the models here are so small that a second one only costs. And no clock: engines plan by fixed costs."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch, which imports Triton: its kernels run without a GPU

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.models.forward import exactness
from forerun.policy.cost_curve import CostCurve

torch.set_num_threads(1)


class Ticks:
    """A clock that goes on by a millisecond whenever it is looked at: what is timed takes the same each time."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``one_in(n)``, leave all but every n-th set of parameters to ``make matrix``."""
    seen: Counter[object] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None and item.get_closest_marker("matrix") is None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.matrix)
            seen[test] += 1


@pytest.fixture
def houses() -> Iterator[list[Any]]:
    """Servers that a test builds (``house.House``); they end with it."""
    built: list[Any] = []
    yield built
    for each in built:
        each.close()


@pytest.fixture(autouse=True, scope="session")
def fixed_costs():
    """What engines plan by where they would measure, and a clock for drafters that watch the time; and what engines
    find out about a model, once for each."""
    known: dict[tuple[int, type], tuple[Any, exactness.Exactness]] = {}

    def probe(scorer: Any, limit: int | None = None, offloads: bool = False) -> exactness.Exactness:
        key = (id(scorer.model), type(scorer))
        if key not in known:
            known[key] = (scorer.model, exactness.probe(scorer, limit))  # the model is kept, or its id would be reused
        return known[key][1]

    ticks = Ticks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.models.forward.pass_timing.measure", lambda scorer: CostCurve.linear(24))
        patch.setattr("forerun.engine.engine.probe", probe)
        patch.setattr("forerun.drafting.hierarchy.time", SimpleNamespace(perf_counter=ticks))
        patch.setitem(
            AdaptiveDrafter.__init__.__kwdefaults__, "clock", lambda: 0.0
        )  # nothing but the curve says what costs
        yield
