"""The file in which numba keeps a function's machine code, made safe for sources that change and for many processes.

numba numbers the code of a function's signatures by an index file. Two processes that compile at once give one number
to different code, and one of them then runs the code of another signature. An index that names a class by a name it no
longer has cannot be read at all.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile


class MachineCodeFile(IndexDataCacheFile):  # type: ignore[misc]  # numba has no types
    """Names code by what it is: its signature and the stamp on its sources.

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
        self._save_data(known[key], data)
        self._save_index(known)

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
