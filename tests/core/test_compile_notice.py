"""One line tells of a long compilation; short ones, and those of other packages, are silent."""

import logging
from types import SimpleNamespace
from typing import Any

from forerun.core import compile_notice
from forerun.core.compile_notice import MESSAGE, CompileNotice


def compiles(notice: CompileNotice, module: str, clock: list[float], seconds: float) -> None:
    happened: Any = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})
    notice.on_start(happened)
    clock[0] += seconds
    notice.on_end(happened)


def test_only_a_long_compilation_of_this_package_is_told(monkeypatch, caplog):
    clock, counted = [0.0], list[int]()
    monkeypatch.setattr(compile_notice.time, "monotonic", lambda: clock[0])
    notice = CompileNotice()
    notice.on_function = counted.append
    with caplog.at_level(logging.INFO, logger="forerun"):
        compiles(notice, "other.kernels", clock, 60)
        compiles(notice, "forerun.kernels.linear.linear", clock, 1)
        assert caplog.messages == [] and counted == [1]
        for _ in range(3):
            compiles(notice, "forerun.trie.trie", clock, 1.5)
    assert caplog.messages == [MESSAGE] and counted == [1, 2, 3, 4]
