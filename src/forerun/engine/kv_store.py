"""Texts read once: keys and values of prompts' beginnings on disk, for later prompts that begin alike.

A text is a file (``keyfile.py``) on a shelf (``shelf.py``), under the fingerprint of what its bits depend on and a
digest of its namespace. It is mapped, not read. What views made of it lies beside it. A thread writes; whoever waits
for a text that is being written gets a copy. Nothing here ends a request: what cannot be kept is read again.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from forerun.engine.prefixes import DIGEST, Keys, common
from forerun.kv.disk_lru import SUFFIX, DiskLRU
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_file import Area, DamagedFileError, KVFile, place_of, tensor_areas, text_areas, write
from forerun.kv.kv_rows import Rows
from forerun.kv.shared_prefix import SharedPrefix, Tensors

log = logging.getLogger(__name__)
T = TypeVar("T")

LEAST = 512
"""Tokens of a text that is kept, at least. A shorter one is read in about the time in which a file is made, found and
checked, and a server would make a file for every question."""
GROWN = 8
"""A text is written anew where at least 1/8 of it is not kept yet. So a conversation is written a few times as it
grows, and a question about a book does not write the book again."""
SHARE = 0.25
"""Part of the disk that is free, or taken by the store, which it may take by default."""
WAITING = 8
"""Files that wait to be written, at most; each keeps a text's cache in memory. What comes then is not kept."""


Kept = tuple[str, int]
"""The name of a text that is kept, and how many of a prompt's chunks it holds."""


class Found(NamedTuple):
    """A text that shares chunks with a prompt."""

    beginning: SharedPrefix
    chunks: int


@dataclass(frozen=True)
class _Waiting:
    """A text that is being written."""

    keys: Keys
    layers: dict[int, Rows]
    length: int
    capacity: int


class KVStore:
    """Beginnings of prompts in a folder, up to a number of bytes; those that were used least recently go first.

    Processes may share the folder. Threads may share the store.

    Args:
        folder: made if it is not there.
        mark: a fingerprint; texts of another one are not seen.
        limit: bytes on disk, at most; by default a quarter of what is free or taken by it.

    Raises:
        ValueError: for a limit below 0.
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, mark: str, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"the store's limit is {limit} bytes; it must be 0 or more")
        self._shelf = DiskLRU(Path(folder), limit if limit is not None else 1 << 62)
        if limit is None:
            self._shelf.limit = int(SHARE * (shutil.disk_usage(folder).free + self._shelf.nbytes))
        self._mark = mark
        self._texts: dict[str, Keys] = {}  # of the files whose headers were read
        self._verified: set[tuple[int, int, str]] = set()  # by this process, or written by it
        self._waiting: dict[str, _Waiting] = {}
        self._jobs: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "forerun-kv-store")  # ends its work before the process ends
        self._closed = False

    @classmethod
    def of(cls, folder: str | Path | None, mark: Callable[[], str], limit: int | None) -> KVStore | None:
        """A store, if there is a folder.

        Raises:
            ValueError: for a limit without one.
        """
        if folder is None and limit is not None:
            raise ValueError(f"kv_store_limit is {limit}, and there is no kv_store")
        return None if folder is None else cls(folder, mark(), limit)

    @property
    def limit(self) -> int:
        """Bytes on disk, at most."""
        return self._shelf.limit

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._shelf.nbytes

    def find(self, keys: Keys, namespace: str, least: int = 0) -> Found | None:
        """The text that shares the most chunks with a prompt, if more than ``least`` of them."""
        return _safely("no kept text can be looked for", lambda: self._find(keys, namespace, least))

    def _find(self, keys: Keys, namespace: str, least: int) -> Found | None:
        for name, count in self._alike(keys, self._space(namespace)):
            if count <= least:
                break
            if (beginning := self._open(name)) is not None:
                return Found(beginning, count)
        return None

    def keep(self, keys: Keys, namespace: str, chunk: int, cache: FullCache) -> Kept | None:
        """Keep a prompt's beginning, unless most of it is kept; what is kept of a shorter one that it holds goes.

        The cache may go on meanwhile: the tokens that it has committed do not change.

        Args:
            keys: of chunks that the cache holds.
            namespace: of the prompt.
            chunk: tokens of a chunk.
            cache: of the prompt.

        Returns:
            The text that holds all of it, or most; None if none will.
        """
        return _safely("a text could not be kept", lambda: self._keep(keys, namespace, chunk, cache))

    def _keep(self, keys: Keys, namespace: str, chunk: int, cache: FullCache) -> Kept | None:
        length = len(keys) * chunk
        if length < LEAST:
            return None
        space = self._space(namespace)
        for held, count in self._alike(keys, space)[:1]:
            if (len(keys) - count) * GROWN < len(keys):
                return held, count
        name = f"{space}/{keys[-1].hex()}{SUFFIX}"
        layers: dict[int, Rows] = {layer: cache.read(layer, 0, length) for layer in cache.layers}
        text = _Waiting(keys, layers, length, max(length, cache.capacity))
        with self._lock:
            self._waiting[name] = text
        if self._write(lambda: self._write_text(name, text)):
            return name, len(keys)
        self._done(name)
        return None

    def note(self, name: str, part: str, tensors: Tensors) -> None:
        """Keep what a view made of a text that is kept, unless there is such a thing already.

        Args:
            name: of the text.
            part: of the view (``View.keepsake``).
            tensors: not to be changed any more.
        """
        beside = _part(name, part)
        if tensors:
            self._write(lambda: self._put(beside, tensor_areas(tensors), {}, after=name))

    def flush(self) -> None:
        """Wait until all is written."""
        with self._lock:
            jobs = set(self._jobs)
        wait(jobs)

    def close(self) -> None:
        """Write what waits, and keep nothing more; what is kept can still be found."""
        self._closed = True
        self._writer.shutdown()

    def _space(self, namespace: str) -> str:
        """The folder of a namespace; it does not tell its name."""
        return f"{self._mark}/{hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()}"

    def _alike(self, keys: Keys, space: str) -> list[tuple[str, int]]:
        """All texts of a namespace with the chunks that they share with a prompt, most first."""
        shared = [(name, common(keys, others)) for name, others in self._known(space).items()]
        return sorted(shared, key=lambda item: -item[1])

    def _known(self, space: str) -> dict[str, Keys]:
        """The texts of a namespace, on disk and on their way there."""
        names = dict.fromkeys(self._shelf.names(space))
        for name in list(self._texts):  # a copy, as the writer's thread changes it meanwhile
            if name.startswith(space) and name not in names:
                self._texts.pop(name, None)
        found: dict[str, Keys] = {}
        for name in names:
            keys = self._texts.get(name)
            if keys is None and (file := self._read(name)) is not None:
                keys = self._texts[name] = _split(file.told["keys"])
            if keys is not None:
                found[name] = keys
        with self._lock:
            found |= {name: text.keys for name, text in self._waiting.items() if name.startswith(space)}
        return found

    def _read(self, name: str, verified: bool = False) -> KVFile | None:
        """A file. A damaged one goes. Its data are compared with their checksums when they are first wanted."""
        try:
            file = KVFile(self._shelf.folder / name)
            if verified and file.identity not in self._verified:
                file.verify()
                self._verified.add(file.identity)
            return file
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            log.warning("%s; it is removed, and the text is read again", error)
            self._shelf.drop(name)
        except (OSError, MemoryError) as error:
            log.warning("a kept text cannot be used (%s); it is read again", error)
        return None

    def _open(self, name: str) -> SharedPrefix | None:
        with self._lock:
            text = self._waiting.get(name)
        if text is not None:
            try:
                return SharedPrefix.of(text.layers, text.length, text.capacity)
            except (OSError, MemoryError) as error:
                log.warning("there is no memory to share a beginning: %s", error)
                return None
        file = self._read(name, verified=True)
        if file is None:
            return None
        self._shelf.use(name)
        return file.beginning(int(file.told["length"]), lambda part: self._noted(name, part))

    def _noted(self, name: str, part: str) -> Tensors | None:
        file = self._read(_part(name, part), verified=True)
        return None if file is None else file.tensors()

    def _write_text(self, name: str, text: _Waiting) -> None:
        try:
            told = {"keys": b"".join(text.keys).hex(), "length": str(text.length)}
            self._put(name, text_areas(text.layers, text.capacity), told)
            space = name.rpartition("/")[0]
            for other, keys in self._known(space).items():
                if other != name and common(text.keys, keys) == len(keys):
                    self._shelf.drop(other)
                    self._texts.pop(other, None)
        finally:
            self._done(name)

    def _put(self, name: str, areas: Sequence[Area], told: dict[str, str], after: str | None = None) -> None:
        if after is not None and ((self._shelf.folder / name).exists() or not (self._shelf.folder / after).exists()):
            return
        size, places = sum(area.tensor.nbytes for area in areas), []

        def fill(file: int) -> None:
            write(file, areas, told)
            places.append(place_of(file))

        if not self._shelf.put(name, size, fill):
            log.warning("a text of %s bytes is not kept: the store's limit is %s", f"{size:,}", f"{self.limit:,}")
        elif (file := self._read(name)) is not None and file.identity[:2] in places:
            self._verified.add(file.identity)

    def _write(self, job: Callable[[], None]) -> bool:
        """Whether there is room for a job."""
        with self._lock:
            self._jobs = {each for each in self._jobs if not each.done()}
            if self._closed or len(self._jobs) >= WAITING:
                return False
            self._jobs.add(self._writer.submit(_safely, "a text could not be kept", job))
            return True

    def _done(self, name: str) -> None:
        with self._lock:
            self._waiting.pop(name, None)


def _safely(failed: str, job: Callable[[], T]) -> T | None:
    """Nobody waits for what is kept, so nobody is told of an error but the log."""
    try:
        return job()
    except Exception as error:
        log.warning("%s: %s", failed, error)
    return None


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix(SUFFIX)}.{part}{SUFFIX}"


def _split(keys: str) -> Keys:
    data = bytes.fromhex(keys)
    return [data[place : place + DIGEST] for place in range(0, len(data), DIGEST)]
