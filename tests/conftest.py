"""One thread: the models here are so small that a second one only costs. And no clock: engines plan by fixed costs."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch, which imports Triton: its kernels run without a GPU

import gc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")
# of a property: `make matrix` tries many
settings.register_profile("few", max_examples=12, deadline=None)
settings.register_profile("many", max_examples=200, deadline=None)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", metavar="K/N", help="run the k-th of n parts of the tests")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Here and not above: who starts the workers collects nothing, and need not spend seconds on the import. What is
    imported stays; to look for garbage in it, then or later, takes as long as many tests."""
    import torch

    gc.disable()
    torch.set_num_threads(1)


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
def serve() -> Iterator[Callable[..., Any]]:
    """Starts a ``LiveServer`` that ends with the test."""
    from support.live_server import LiveServer

    with ExitStack() as stack:
        yield lambda *given, **told: stack.enter_context(LiveServer(*given, **told))


def compile_part() -> None:
    """Compile what almost every test needs: each worker half of it; nothing where there are no workers.

    A clean checkout has no machine code, and compiling it costs a minute, which every worker would spend.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        return

    import torch
    from support.tiny import PROMPTS, tiny

    from forerun.engine.engine import Engine
    from forerun.trie.trie import Trie

    if int(worker.removeprefix("gw")) % 2:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            Engine(tiny("llama", dtype), "none").generate(PROMPTS[1], max_new_tokens=2)
    else:
        trie = Trie()
        trie.begin(0, "", [1, 2, 3, 1, 2])
        trie.extend(0, [3, 1])
        trie.finish(0)


@pytest.fixture(autouse=True, scope="session")
def every_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from support.fixed_runtime import fixed_runtime

    with fixed_runtime(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # processes leave the user's folder alone
        gc.collect()
        gc.freeze()
        gc.enable()
        compile_part()
        yield
    gc.unfreeze()  # or native libraries would report it as leaked


@pytest.fixture(scope="module")
def called_again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands find what earlier calls have found out about their model, as a user's do."""
    from support.fixed_runtime import fixed_runtime

    with fixed_runtime(tmp_path_factory.mktemp("startup")):
        yield
