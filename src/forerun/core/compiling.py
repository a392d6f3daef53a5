"""Compilation. Machine code is kept between runs, and thrown away when any source of its package changes.

A compiled function contains the code of the functions it calls and the layout of the arrays it reads. Both come from
other files, but numba looks for changes in the function's own file only. Old machine code over a new layout loops for
ever or crashes. So the stamp on what is kept is a digest of all files of the package.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

COMPILES = not numba.config.DISABLE_JIT
"""Whether anything is compiled in this process."""


def compiled(function: F) -> F:
    """Compile on the first call.

    The machine code is kept beside the module; where no file can be written there, for this process. With
    ``NUMBA_DISABLE_JIT`` the function stays Python. It is compiled without numba's reference counts (``_nrt``), which
    took more time than the work, so it may not allocate anything.
    """
    if not COMPILES:
        return np.errstate(over="ignore")(function)  # hashes are meant to overflow
    try:
        dispatcher = numba.njit(cache=True, _nrt=False, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache can be written
        return cast(F, numba.njit(function, _nrt=False, error_model="numpy"))
    dispatcher._cache._cache_file._source_stamp = sources(Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


@functools.cache
def sources(package: Path) -> str:
    """A digest of the sources that compiled code may come from."""
    files = sorted(package.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
