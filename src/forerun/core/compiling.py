"""Compilation with machine code cached between runs, and dropped when any source it may contain changes.

A compiled function contains its small callees, constants and array layouts from other files and folders; large
functions are compiled once and called (``called_code``). numba only checks the function's own file, and stale code over
a new layout crashes or never ends. So cached code is stamped with a digest of entire folders (``stamp_of``); tracking
each name to its file would be finer, and easier to get wrong.
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
PACKAGE = Path(__file__).parents[1]


def compiled(function: Function, nogil: bool = False) -> Function:
    """Compile on the first call, and cache machine code of this package beside the module; other code only in this
    process.

    With ``NUMBA_DISABLE_JIT`` the function stays Python. numba's reference counting (``_nrt``) is off, because it cost
    more than the work, so the function may not allocate. ``nogil`` lets other threads run Python meanwhile.
    """
    if not COMPILES:
        return np.errstate(over="ignore")(function)  # hashes overflow on purpose
    return cast(Function, _dispatcher(_Compiled, function, nogil=nogil))


def can_be_kept(function: Callable[..., Any]) -> bool:
    """Return whether a compiled function's machine code has a folder to be cached in."""
    return isinstance(cast(Any, function)._cache, KeptCode)


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether machine code for this processor is cached, for any argument types."""
    kept = cast(Any, function)._cache
    return isinstance(kept, KeptCode) and kept.holds_any(cast(Any, function).targetctx)


class _Dispatcher(CPUDispatcher):  # type: ignore[misc]  # numba has no types
    """numba's dispatcher; concurrent processes compile a function once."""

    def compile(self, sig: Any) -> Any:
        kept = self._cache
        if not isinstance(kept, KeptCode) or tuple(normalize_signature(sig)[0]) in self.overloads:
            return super().compile(sig)
        with kept.alone(sig, self.targetctx):
            return super().compile(sig)


class _Compiled(_Dispatcher):
    """A function that Python calls; compiled callers use ``inner``: Python's wrapper is a third of compile time."""

    @functools.cached_property
    def inner(self) -> Any:
        options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _dispatcher(_Inner, self.py_func, "-inner", **options)

    @property
    def _numba_type_(self) -> Any:
        return self.inner._numba_type_


class _Inner(_Dispatcher):
    """A function for compiled callers: compiled once for all integers, and called, not inlined, if large."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(tuple(map(_widened, args)), {name: _widened(kws[name]) for name in kws})

    def add_overload(self, result: Any) -> None:
        super().add_overload(result)
        call_if_large(result, self.targetctx)


def _widened(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def _dispatcher(kind: type[Any], function: Callable[..., Any], suffix: str = "", **options: bool) -> Any:
    """Return numba's dispatcher; ``suffix`` goes into the names of its cache files."""
    dispatcher = kind(function, targetoptions={"nopython": True, "_nrt": False, "error_model": "numpy", **options})
    package, _, module = function.__module__.partition(".")
    if package == PACKAGE.name:
        with suppress(RuntimeError):  # no writable folder for the cache
            dispatcher._cache = KeptCode(function, suffix, stamp_of(PACKAGE, module.partition(".")[0]))
    return dispatcher


@functools.cache
def stamp_of(package: Path, part: str) -> str:
    """Return a digest of everything that machine code of one part of a package may contain.

    A part is a folder or module directly in the package. Its code comes from its own files and, transitively, from the
    parts it imports; importing the package itself counts as importing all. A compiled function must not call one of a
    higher part through its closure: that is not covered. Versions of code-generating libraries are included, except
    numba's and Python's, which numba checks itself, as it does the processor.
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
    """Return a digest of a Python file, or of all in a folder; raise ValueError if there are none."""
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
