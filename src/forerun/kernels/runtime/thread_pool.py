"""The threads that a kernel runs on: torch's own if possible, else a pool.

After a matrix product torch's threads spin for a while, waiting for more work. A second set of threads would compete
with them for the same cores. So kernels run on torch's threads, through the OpenMP entry point that compilers use
(``GOMP_parallel``, in GNU's and LLVM's libraries). The pool is for systems without it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

Function = Callable[[int], None]


def run(address: int, argument: int, threads: int) -> None:
    """Call the C function at ``address`` on up to ``threads`` threads at once, each with the same argument."""
    if threads == 1:
        callable_at(address)(argument)
    elif (parallel := openmp()) is not None:
        parallel(address, argument, threads, 0)
    else:
        run_in_pool(callable_at(address), argument, threads)


def run_in_pool(function: Function, argument: int, threads: int) -> None:
    """Call ``function`` here and in the pool. Pool calls that have not started when this one ends are cancelled."""
    calls = [pool().submit(function, argument) for _ in range(threads - 1)]
    try:
        function(argument)
    finally:  # the argument's memory may be reused only when no thread reads it
        for call in calls:
            if not call.cancel():
                call.result()


@functools.cache
def callable_at(address: int) -> Function:
    """The C function at ``address``; calling it releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@functools.cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of torch's own OpenMP library, if torch uses OpenMP."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(path for name in ("libgomp*", "libiomp5*", "libomp*") for path in folder.glob(name)):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return function
    return None


@functools.cache
def pool() -> ThreadPoolExecutor:
    """This process's pool of threads."""
    return ThreadPoolExecutor(os.cpu_count(), "forerun-kernel")
