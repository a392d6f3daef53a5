"""One thread: the models here are so small that a second one only costs. And no clock: engines plan by fixed costs."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch, which imports Triton: its kernels run without a GPU

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from forerun.models.forward.runtime import Runtime, StartupCache, runtime_as_default
from forerun.policy.cost_curve import CostCurve

torch.set_num_threads(1)
pytest.register_assert_rewrite("support")
# of a property: `make matrix` tries many
settings.register_profile("few", max_examples=20, deadline=None)
settings.register_profile("many", max_examples=200, deadline=None)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", metavar="K/N", help="run the k-th of n parts of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked ``one_in(n)``, leave all but every n-th set of parameters to ``make matrix``. Then keep
    the part that is asked for: each test belongs to one by its name."""
    seen: Counter[object] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None and item.get_closest_marker("matrix") is None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.matrix)
            seen[test] += 1
    part, parts = map(int, config.getoption("--part").split("/"))
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part % parts]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part % parts]


@pytest.fixture
def servers() -> Iterator[list[Any]]:
    """Servers that a test builds (``server.LiveServer``); they end with it."""
    built: list[Any] = []
    yield built
    for each in built:
        each.close()


@pytest.fixture(autouse=True, scope="session")
def fixed_runtime(tmp_path_factory: pytest.TempPathFactory):
    """Engines draft by a fixed cost curve and a clock that stands still, and test each model once."""
    kept = StartupCache(lambda: None)
    runtime = Runtime(lambda: 0.0, lambda scorer: CostCurve.linear(24), kept.exactness, kept.self_test)
    with runtime_as_default(runtime), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # processes leave the user's folder alone
        from support.compile_first import compile_part

        compile_part()
        yield
