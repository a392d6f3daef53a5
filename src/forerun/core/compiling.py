"""Compilation. Machine code is kept between runs, and thrown away when a file changes that it may come from.

A compiled function contains the code of the small functions it calls, the constants it names and the layout of the
arrays it reads. Large functions are compiled once and called (``called_code``). All this comes from other files and
other folders, but numba looks for changes in the function's own file only. Old machine code over a new layout loops for
ever or crashes. So kept code has a stamp (``stamp_of``), a digest of whole folders: to follow each name to its file
would be finer, and easier to get wrong.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core.registry import CPUDispatcher
from numba.core.sigutils import normalize_signature

from forerun.core.called_code import call_if_large
from forerun.core.kept_code import KeptCode

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILES = not numba.config.DISABLE_JIT
"""Whether anything is compiled in this process."""
PACKAGE = Path(__file__).parents[1]


def compiled(function: Function, nogil: bool = False) -> Function:
    """Compile on the first call.

    The machine code of this package's functions is kept beside the module. Where no file can be written there, and for
    functions of others, it is kept for this process. With ``NUMBA_DISABLE_JIT`` the function stays Python. It is
    compiled without numba's reference counts (``_nrt``), which took more time than the work, so it may not allocate
    anything. With ``nogil`` other threads run Python meanwhile.
    """
    if not COMPILES:
        return np.errstate(over="ignore")(function)  # hashes are meant to overflow
    return cast(Function, _dispatcher(_Compiled, function, nogil=nogil))


def can_be_kept(function: Callable[..., Any]) -> bool:
    """Whether there is a folder for a compiled function's machine code."""
    return isinstance(cast(Any, function)._cache, KeptCode)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether a compiled function's machine code for this processor is kept, for any types of arguments."""
    kept = cast(Any, function)._cache
    return isinstance(kept, KeptCode) and kept.holds_any(cast(Any, function).targetctx)


class _Dispatcher(CPUDispatcher):  # type: ignore[misc]  # numba has no types
    """numba's object for a function. Processes that need it at once compile it once."""

    def compile(self, sig: Any) -> Any:
        kept = self._cache
        if not isinstance(kept, KeptCode) or tuple(normalize_signature(sig)[0]) in self.overloads:
            return super().compile(sig)
        with kept.alone(sig, self.targetctx):
            return super().compile(sig)


class _Compiled(_Dispatcher):
    """A compiled function. Compiled code that calls it contains or calls ``inner`` instead: the same without what
    Python needs to call it, which takes a third of the time of compiling."""

    @functools.cached_property
    def inner(self) -> Any:
        options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _dispatcher(_Inner, self.py_func, "-inner", **options)

    @property
    def _numba_type_(self) -> Any:
        return self.inner._numba_type_


class _Inner(_Dispatcher):
    """A function for compiled callers. It is compiled once for all integers, known or not, and called rather than
    contained if it is large."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(tuple(map(_widened, args)), {name: _widened(kws[name]) for name in kws})

    def add_overload(self, result: Any) -> None:
        super().add_overload(result)
        call_if_large(result, self.targetctx)


def _widened(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def _dispatcher(kind: type[Any], function: Callable[..., Any], suffix: str = "", **options: bool) -> Any:
    """numba's object for a function, whose machine code is kept in files with this suffix in their names."""
    dispatcher = kind(function, targetoptions={"nopython": True, "_nrt": False, "error_model": "numpy", **options})
    package, _, module = function.__module__.partition(".")
    if package == PACKAGE.name:
        with suppress(RuntimeError):  # no folder for the cache can be written
            dispatcher._cache = KeptCode(function, suffix, stamp_of(PACKAGE, module.partition(".")[0]))
    return dispatcher


@functools.cache
def stamp_of(package: Path, part: str) -> str:
    """A digest of what machine code of one part of a package may come from.

    A part is a folder or a module directly in the package. Its code comes from its own files and from the parts it
    imports, however deep. An import of the package itself counts as one of every part. Not covered is a function of a
    higher part in the closure of a compiled one: no part may hand any down.

    Other versions of the libraries that write the code give another stamp. The versions of numba and Python and the
    processor's name and features are not in it, because numba compares them itself.
    """
    own = re.compile(rf"^\s*(?:from|import)\s+{re.escape(package.name)}\b(?:\.(\w+))?", re.MULTILINE)
    every = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
    covered, waiting = set[str](), {part}
    while waiting:
        current = waiting.pop()
        covered.add(current)
        for file in _files(_path(package, current)):
            names = set(own.findall(file.read_text("utf-8")))
            waiting |= (every if "" in names else names & every) - covered
    digests = [sources(path) for path in (_path(package, each) for each in sorted(covered)) if _files(path)]
    return hashlib.sha256("\0".join([llvmlite.__version__, np.__version__, *digests]).encode()).hexdigest()


@functools.cache
def sources(path: Path) -> str:
    """A digest of a Python file, or of the names and contents of all Python files in a folder, however deep.

    Raises:
        ValueError: if there are none: what is digested was moved.
    """
    files = _files(path)
    if not files:
        raise ValueError(f"{path} has no Python files")
    lines = [f"{file.relative_to(path.parent)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _path(package: Path, part: str) -> Path:
    folder = package / part
    return folder if folder.is_dir() else folder.with_suffix(".py")
