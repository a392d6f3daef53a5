"""Kept machine code is used again, until a file changes that it may come from."""

import logging
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numba
import numpy as np
import pytest
from support.processes import fork

from forerun.core import called_code, compile_notice, compiling, kept_code
from forerun.core.compile_notice import MESSAGE, CompileNotice
from forerun.core.compiling import COMPILES, compiled, sources, stamp_of
from forerun.core.kept_code import MachineCodeFile

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system"),
]
CONSTANT = "SCALE = 10\n"
INNER = "from forerun.core.compiling import compiled\n@compiled\ndef inner(x):\n    return x + 1\n"
OUTER = """
from forerun.core.compiling import compiled
from forerun.low.deep.constant import SCALE
from forerun.middle.inner import inner
@compiled
def outer(x):
    return inner(x) * SCALE
"""
SCRIPT = "from forerun.high.outer import outer; print(outer(1), sum(outer.stats.cache_hits.values()))"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the same name: compiled code in two parts, and a constant in a subfolder of a third."""
    root = tmp_path / "forerun"
    files = {
        "__init__.py": "", "low/deep/constant.py": CONSTANT, "middle/inner.py": INNER, "high/outer.py": OUTER,
        "top.py": "from forerun.high.outer import outer\n", "all/everything.py": "import forerun\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "core").mkdir()
    for module in (compiling, called_code, kept_code):
        shutil.copy(module.__file__, root / "core")
    return root


def stamps(package: Path) -> dict[str, str]:
    stamp_of.cache_clear()
    sources.cache_clear()
    return {part: stamp_of(package, part) for part in ("low", "middle", "high", "top", "all")}


def test_a_stamp_changes_with_what_the_part_imports_and_the_libraries_and_with_nothing_above_it(package, monkeypatch):
    every = set(stamps(package))
    assert len(set(stamps(package).values())) == len(every)
    for edit, expected in (
        (lambda: None, set()),
        (lambda: (package / "low/deep/constant.py").write_text("SCALE = 11\n"), {"low", "high", "top", "all"}),
        (lambda: (package / "middle/inner.py").rename(package / "middle/renamed.py"), {"middle", "high", "top", "all"}),
        (lambda: (package / "top.py").write_text(""), {"top", "all"}),
        (lambda: (package / "core/compiling.py").write_text(""), {"middle", "high", "all"}),  # "top" is empty
        (lambda: monkeypatch.setattr("llvmlite.__version__", "0"), every),
        (lambda: monkeypatch.setattr("numpy.__version__", "0"), every),
    ):
        before = stamps(package)
        edit()
        after = stamps(package)
        assert {part for part in every if after[part] != before[part]} == expected


def test_a_folder_without_sources_has_no_digest(tmp_path):
    with pytest.raises(ValueError, match="no Python files"):
        sources(tmp_path)


def start(script: str, path: Path, name: str = "written") -> tuple[int, Path]:
    """Start a process that runs a script with the package in a folder; returns its id, and the file that it writes.

    A fork of this one, as the import of numba costs more than all else that is done here.
    """
    file = path / name

    def work() -> bool:
        for module in [each for each in sys.modules if each.partition(".")[0] == "forerun"]:
            del sys.modules[module]
        sys.path.insert(0, str(path))
        sys.dont_write_bytecode = True
        numba.config.CACHE_DIR = ""  # NUMBA_CACHE_DIR, if set: code is to be kept beside the package
        with file.open("w") as output, redirect_stdout(output):
            exec(script, {})
        return True

    return fork(work), file


def run(script: str, path: Path) -> str:
    child, file = start(script, path)
    assert os.waitpid(child, 0)[1] == 0
    return file.read_text()


def test_compiled_code_has_a_new_value_after_another_parts_file_changed(package):
    """By a constant and by a function, and else the code of an earlier process is used."""
    assert [run(SCRIPT, package.parent) for _ in range(2)] == ["20 0\n", "20 1\n"]
    (package / "low/deep/constant.py").write_text("SCALE = 11\n")
    assert run(SCRIPT, package.parent) == "22 0\n"
    (package / "middle/inner.py").write_text(INNER.replace("+ 1", "+ 2"))
    assert run(SCRIPT, package.parent) == "33 0\n"
    (package / "top.py").write_text("")
    assert run(SCRIPT, package.parent) == "33 1\n"


@pytest.mark.skipif(not COMPILES, reason="nothing is compiled")
def test_only_what_python_calls_is_compiled_for_python():
    @compiled
    def twice(x: int) -> int:
        return 2 * x

    @compiled
    def four_times(x: int) -> int:
        return twice(twice(x))

    called, caller = cast(Any, twice), cast(Any, four_times)
    assert four_times(3) == 12
    assert caller.signatures and not caller.inner.signatures
    assert called.inner.signatures and not called.signatures
    assert twice(3) == 6 and called.signatures


ROW = "from typing import NamedTuple\nclass Row(NamedTuple):\n    a: int\n"
TAKES_ROW = """from forerun.core.compiling import compiled
from forerun.low.row import Row
@compiled
def first(row):
    return row.a
"""


def test_code_for_a_class_that_was_renamed_is_compiled_anew(package):
    row, user = package / "low/row.py", package / "high/first.py"
    row.write_text(ROW)
    user.write_text(TAKES_ROW)
    script = "from forerun.high.first import first; from forerun.low.row import {0}; print(first({0}(3)))"
    assert run(script.format("Row"), package.parent) == "3\n"
    row.write_text(ROW.replace("Row", "Line"))
    user.write_text(TAKES_ROW.replace("Row", "Line"))
    assert run(script.format("Line"), package.parent) == "3\n"


class Late(MachineCodeFile):
    """Of a process that read the index before others wrote theirs."""

    def _load_index(self) -> dict[object, str]:
        return {}


def test_processes_that_compile_at_once_never_read_each_others_code(tmp_path):
    files = [Late(str(tmp_path), "f", "stamp") for _ in range(2)]
    files[0].save("one", 1)
    files[1].save("two", 2)
    read = MachineCodeFile(str(tmp_path), "f", "stamp")
    assert (read.load("one"), read.load("two")) == (None, 2)
    read.save("one", 1)
    assert (read.load("one"), read.load("two")) == (1, 2)


def test_code_of_other_sources_is_removed(tmp_path):
    MachineCodeFile(str(tmp_path), "f", "before").save("one", 1)
    MachineCodeFile(str(tmp_path), "other", "before").save("one", 1)
    after = MachineCodeFile(str(tmp_path), "f", "after")
    assert after.load("one") is None
    after.save("one", 2)
    assert after.load("one") == 2
    assert sorted(file.name.partition(".")[0] for file in tmp_path.glob("*.nbc")) == ["f", "other"]


@pytest.mark.skipif(not COMPILES, reason="nothing is compiled")
def test_code_that_cannot_be_kept_or_is_damaged_is_compiled(package, monkeypatch):
    assert run(SCRIPT, package.parent) == "20 0\n"
    for code in package.rglob("*.nbc"):
        code.write_bytes(code.read_bytes()[:20])
    assert [run(SCRIPT, package.parent) for _ in range(2)] == ["20 0\n", "20 1\n"]
    file = MachineCodeFile(str(package), "function", "stamp")
    monkeypatch.setattr(file, "_save_data", Mock(side_effect=OSError("no space left on device")))
    file.save("key", "data")
    assert file.load("key") is None


LARGE = (
    """
from forerun.core.compiling import compiled
@compiled
def small(x):
    return x + 1
@compiled
def large(table, x):
    total = 0
"""
    + "".join(f"    total += table[{k} + x] * {k + 2} // (x + {k + 1})\n" for k in range(40))
    + """
    return total
@compiled
def caller(table, x):
    return large(table, small(x)) + large(table, 3)
@compiled
def outermost(table, x):
    return caller(table, x) + large(table, x)
"""
)
CALLS_LARGE = """
import numpy as np
from forerun.high.large import caller, large, outermost
print(outermost(np.arange(100), 1), len(large.inner.overloads), sum(outermost.stats.cache_misses.values()))
"""


@pytest.mark.skipif(not COMPILES, reason="nothing is compiled")
def test_a_large_function_is_compiled_once_and_called_by_the_kept_code_of_others(package):
    (package / "high/large.py").write_text(LARGE)
    plain = {"table": np.arange(100)}
    exec(LARGE.replace("from forerun.core.compiling import compiled", "compiled = lambda f: f"), plain)
    expected = plain["outermost"](plain["table"], 1)
    assert run(CALLS_LARGE, package.parent) == f"{expected} 1 1\n"
    assert run(CALLS_LARGE, package.parent) == f"{expected} 1 0\n"
    for file in package.rglob("large.large-*"):  # of the function that others call
        file.unlink()
    assert run(CALLS_LARGE, package.parent) == f"{expected} 1 0\n"
    sizes = {file.name.partition("-")[0]: file.stat().st_size for file in package.rglob("*.nbc")}
    assert max(sizes, key=lambda name: sizes[name]) == "large.large"  # which no caller contains
    assert not list(package.rglob("*.lock"))


def test_processes_that_need_the_same_code_compile_it_once(package):
    (package / "high/large.py").write_text(LARGE)
    script = f"{CALLS_LARGE}\nprint(sum(each.inner.stats.cache_misses.total() for each in (caller, large)))"
    processes = [start(script, package.parent, f"written {number}") for number in range(3)]
    assert [os.waitpid(child, 0)[1] for child, _ in processes] == [0] * 3
    outputs = [file.read_text().split() for _, file in processes]
    assert sum(int(output[-1]) for output in outputs) == 2 and len({output[0] for output in outputs}) == 1


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


def test_code_that_no_other_process_would_find_is_refused():
    constant, other = 3, compiled(lambda x: x)
    kept_code.KeptCode(lambda x: x + constant, "", "stamp")
    with pytest.raises(TypeError, match="must get other from its module"):
        kept_code.KeptCode(lambda x: other(x), "", "stamp")
