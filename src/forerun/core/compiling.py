"""Compilation. Machine code is kept between runs, and thrown away when a file changes that it may come from.

A compiled function contains the code of the functions it calls, the constants it names and the layout of the arrays it
reads. They come from other files and other folders, but numba looks for changes in the function's own file only. Old
machine code over a new layout loops for ever or crashes. So kept code has a stamp (``stamp_of``), a digest of whole
folders: to follow each name to its file would be finer, and easier to get wrong.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import CPUDispatcher

log = logging.getLogger(__name__)

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


class _Compiled(CPUDispatcher):  # type: ignore[misc]  # numba has no types
    """A compiled function. Compiled code that calls it contains ``inner`` instead: the same without what Python needs
    to call it, which takes a third of the time of compiling."""

    @functools.cached_property
    def inner(self) -> Any:
        options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _dispatcher(CPUDispatcher, self.py_func, "-inner", **options)

    @property
    def _numba_type_(self) -> Any:
        return self.inner._numba_type_


def _dispatcher(kind: type[Any], function: Callable[..., Any], suffix: str = "", **options: bool) -> Any:
    """numba's object for a function, whose machine code is kept in files with this suffix in their names."""
    dispatcher = kind(function, targetoptions={"nopython": True, "_nrt": False, "error_model": "numpy", **options})
    package, _, module = function.__module__.partition(".")
    if package == PACKAGE.name:
        with suppress(RuntimeError):  # no folder for the cache can be written
            dispatcher.enable_caching()
            kept, stamp = dispatcher._cache, stamp_of(PACKAGE, module.partition(".")[0])
            kept._cache_file = MachineCodeFile(kept.cache_path, kept._impl.filename_base + suffix, stamp)
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


class MachineCodeFile(IndexDataCacheFile):  # type: ignore[misc]  # numba has no types
    """The file in which numba keeps a function's machine code. It names code by its signature and its sources' stamp.

    numba numbers the code of a function's signatures by an index file. Two processes that compile at once give one
    number to different code, and one of them then runs the code of another signature. An index that names a class by a
    name it no longer has cannot be read at all.

    Args:
        folder: where the files are.
        name: of the function.
        stamp: of its sources; code with another stamp is removed.
    """

    def __init__(self, folder: str, name: str, stamp: str) -> None:
        super().__init__(folder, name, stamp)
        self._folder, self._name = Path(folder), name

    def save(self, key: Any, data: Any) -> None:
        """Keep code, whose file is complete before the index names it."""
        known: dict[Any, str] = self._load_index()
        if not known:
            self._remove()
        digest = hashlib.sha256(f"{self._source_stamp} {key!r}".encode()).hexdigest()
        known[key] = f"{self._name}.{digest[:16]}.nbc"
        try:
            self._save_data(known[key], data)
            self._save_index(known)
        except OSError as error:  # such as a full disk; this process has the code
            log.warning("machine code of %s is not kept: %s", self._name, error)

    def load(self, key: Any) -> Any:
        """Code that was kept; None if there is none, or it is damaged: then it is compiled again."""
        try:
            return super().load(key)
        except Exception:  # unpickling fails in as many ways as files can be damaged
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index())
        except Exception:  # unpickling fails in as many ways as classes can change
            return {}

    def _remove(self) -> None:
        """Remove what the index does not name any more; another process finds it missing, and compiles."""
        for file in self._folder.glob(f"{self._name}.*.nbc"):
            with suppress(OSError):
                file.unlink()
