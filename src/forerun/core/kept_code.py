"""Cache files with machine code of compiled functions. A file lists the symbols to load before it (``called_code``)."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

from forerun.core.called_code import called_apart, code_of, load, needed_by

log = logging.getLogger(__name__)

NO_CODE = llvm.parse_assembly("").as_bitcode()


class _Packing(CompileResultCacheImpl):  # type: ignore[misc]  # numba has no types
    def reduce(self, result: Any) -> Any:
        """Add the symbols it needs to numba's form, and drop LLVM code that no caller inlines."""
        (name, kind, (code, shared)), *rest = result._reduce()
        module, apart = code_of(result)._final_module, called_apart(result)
        shared = NO_CODE if apart else shared
        defined = [each.name for each in (*module.functions, *module.global_variables) if not each.is_declaration]
        return needed_by(module), apart, defined, ((name, kind, (code, shared)), *rest)

    def rebuild(self, target_context: Any, kept: Any) -> Any:
        needed, apart, defined, packed = kept
        load(needed)
        symbols = [SimpleNamespace(name=name, is_declaration=False) for name in defined]
        module = SimpleNamespace(functions=symbols, global_variables=[])
        target_context.codegen()._engine._load_defined_symbols(module)
        return super().rebuild(target_context, packed)._replace(metadata={"apart": apart})


class KeptCode(FunctionCache):  # type: ignore[misc]  # numba has no types
    """The machine code of one function, by signature, in files with this ``suffix``; code with another ``stamp`` is
    removed.

    Raises RuntimeError if no folder is writable, and TypeError if the closure holds more than integers: numba looks for
    code by the closure, in which compiled functions differ from process to process.
    """

    _impl_class = _Packing

    def __init__(self, function: Callable[..., Any], suffix: str, stamp: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not isinstance(cell.cell_contents, int):
                raise TypeError(
                    f"{function.__qualname__} must get {name} from its module: code is found by the closure"
                )
        super().__init__(function)
        self._cache_file = MachineCodeFile(self.cache_path, self._impl.filename_base + suffix, stamp)

    def holds_any(self, target_context: Any) -> bool:
        processor = target_context.codegen().magic_tuple()
        return any(key[1] == processor for key in self._cache_file.known())

    @contextmanager
    def alone(self, sig: Any, target_context: Any) -> Iterator[None]:
        """Lock this signature: other processes that would compile it wait, and then find the code."""
        target_context.refresh()
        with self._cache_file.alone(self._index_key(sig, target_context.codegen())):
            yield


class MachineCodeFile(IndexDataCacheFile):  # type: ignore[misc]  # numba has no types
    """numba's cache file of a function's machine code, named by signature and by the stamp of its sources.

    numba numbers signatures in an index file. Two processes that compile at once give one number to different code, and
    one then runs the other's. An index that names a renamed class cannot be read at all.
    """

    def __init__(self, folder: str, name: str, stamp: str) -> None:
        super().__init__(folder, name, stamp)
        self._folder, self._name = Path(folder), name

    def save(self, key: Any, data: Any) -> None:
        """Cache code; the file is complete before the index names it."""
        known: dict[Any, str] = self._load_index()
        if not known:
            self._remove()
        known[key] = self._file_of(key)
        try:
            self._save_data(known[key], data)
            self._save_index(known)
        except OSError as error:  # such as a full disk; this process has the code
            log.warning("cannot cache machine code of %s: %s", self._name, error)

    def _file_of(self, key: Any) -> str:
        digest = hashlib.sha256(f"{self._source_stamp} {key!r}".encode()).hexdigest()
        return f"{self._name}.{digest[:16]}.nbc"

    @contextmanager
    def alone(self, key: Any) -> Iterator[None]:
        """Lock this code against compilation in other processes; cached code needs no lock."""
        file = self._folder / self._file_of(key)
        if file.exists() or os.name != "posix":
            yield
            return
        import fcntl  # POSIX only

        lock = file.with_suffix(".lock")
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:  # nothing is writable, so nothing compiled here is cached
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
            os.close(descriptor)

    def known(self) -> Iterable[Any]:
        return self._load_index().keys()

    def load(self, key: Any) -> Any:
        """Return cached code; None if it is missing or damaged, and so compiled again."""
        try:
            return super().load(key)
        except Exception:  # damaged files raise errors of many types
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index())
        except Exception:  # renamed classes raise errors of many types
            return {}

    def _remove(self) -> None:
        for file in self._folder.glob(f"{self._name}.*.nbc"):
            with suppress(OSError):
                file.unlink()
