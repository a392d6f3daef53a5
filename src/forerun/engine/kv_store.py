"""Texts read once: keys and values of prompts' beginnings on disk, for later prompts that begin alike.

A text is a file (``kv_file.py``), under a fingerprint of the model and the machine,
and a digest of its namespace. It is mapped, not read. The tensors of views over it lie beside it. A thread writes;
whoever looks for a text that is being written gets a copy. Nothing here ends a request: what cannot be kept is read
again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forerun.core.fairness import eviction, owner_of
from forerun.engine.prefix_sharing import KEY_BYTES, Keys, common
from forerun.kernels.attention.attention import Rows
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_file import Area, DamagedFileError, KVFile, inode_of, tensor_areas, text_areas, write
from forerun.kv.shared_prefix import SharedPrefix, Tensors
from forerun.trie.trie_file import sync_folder

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
Result = TypeVar("Result")

KV_FILE_SUFFIX, UNFINISHED_SUFFIX = ".safetensors", ".unfinished"
OWNER_PREFIX = "of-"
"""Begins the name of a tenant's folder."""
STAT_BLOCK_BYTES = 512
"""Bytes of the blocks in which POSIX counts what a file takes."""
MIN_STORED_TOKENS = 512
"""Minimum tokens of a text that is kept. A shorter one is read in about the time in which a file is made, found and
checked, and a server would make a file for every question."""
GROWTH_DIVISOR = 8
"""A text is written anew where at least 1/8 of it is not kept yet. So a conversation is written a few times as it
grows, and a question about a book does not write the book again."""
DISK_SHARE = 0.25
"""The store's default limit: a share of the disk space that is free or taken by the store."""
MAX_PENDING_FILES = 8
"""Maximum number of files that wait to be written; each keeps a text's cache in memory. Further texts are not kept."""


StoredText = tuple[str, int]
"""The name of a text that is kept, and how many of a prompt's chunks it holds."""


@dataclass(frozen=True)
class _PendingText:
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
        limit: maximum bytes on disk; by default a quarter of the space that is free or taken by the store.
        expiry: seconds after their last use in which texts go; None to keep them.
        key: of the files' checksums: files that were written without it are not used. None for checksums that find
            damage alone.

    Raises:
        ValueError: for a limit below 0, an expiry that is not above 0, or an empty key.
        OSError: if the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: str | Path,
        mark: str,
        limit: int | None = None,
        expiry: float | None = None,
        key: bytes | None = None,
    ) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"the store's limit is {limit} bytes; it must be 0 or more")
        if (expiry is not None and expiry <= 0) or key == b"":
            raise ValueError(f"the store's expiry is {expiry} seconds; it must be above 0, and a key may not be empty")
        self._key = key
        self._files = DiskLRU(Path(folder), limit if limit is not None else 1 << 62, expiry)
        if limit is None:
            self._files.limit = int(DISK_SHARE * (shutil.disk_usage(folder).free + self._files.nbytes))
        self._mark = mark
        self._texts: dict[str, Keys] = {}  # of the files whose headers were read
        self._verified: set[tuple[int, int, str]] = set()  # by this process, or written by it
        self._written: set[str] = set()  # names of the files that were written since this was opened
        self._pending: dict[str, _PendingText] = {}
        self._jobs: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "forerun-kv-store")  # ends its work before the process ends
        self._closed = False

    @property
    def limit(self) -> int:
        """Maximum bytes on disk."""
        return self._files.limit

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._files.nbytes

    def find(self, keys: Keys, namespace: str, least: int = 0) -> tuple[SharedPrefix, int] | None:
        """The text that shares the most chunks with a prompt, if more than ``least`` of them, and how many."""
        return _safely("no kept text can be looked for", lambda: self._find(keys, namespace, least))

    def _find(self, keys: Keys, namespace: str, least: int) -> tuple[SharedPrefix, int] | None:
        for name, count in self._matches(keys, self._folder(namespace)):
            if count <= least:
                break
            if (beginning := self._open(name)) is not None:
                return beginning, count
        return None

    def keep(self, keys: Keys, namespace: str, chunk: int, cache: FullCache) -> StoredText | None:
        """Keep a prompt's beginning, unless most of it is kept. A shorter one that it holds is dropped.

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

    def _keep(self, keys: Keys, namespace: str, chunk: int, cache: FullCache) -> StoredText | None:
        length = len(keys) * chunk
        if length < MIN_STORED_TOKENS or not cache.layers:  # a model without keys and values has nothing to map
            return None
        space = self._folder(namespace)
        for name, count in self._matches(keys, space)[:1]:
            if (len(keys) - count) * GROWTH_DIVISOR < len(keys):
                return name, count
        name = f"{space}/{keys[-1].hex()}{KV_FILE_SUFFIX}"
        layers: dict[int, Rows] = {layer: cache.read(layer, 0, length) for layer in cache.layers}
        text = _PendingText(keys, layers, length, max(length, cache.capacity))
        with self._lock:
            self._pending[name] = text
        if self._write(lambda: self._write_text(name, text)):
            return name, len(keys)
        self._done(name)
        return None

    def add_state(self, name: str, part: str, tensors: Tensors) -> None:
        """Keep the tensors of a view over a text that is kept, unless they are kept already.

        Args:
            name: of the text.
            part: of the view (``View.state_name``).
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

    def close(self, mark: Callable[[], str] | None = None) -> None:
        """Write what waits, and keep nothing more; kept texts can still be found.

        Args:
            mark: computes the fingerprint anew. If it is another one by now, the texts that were written go: a change
                of the model went unseen, and nobody knows which of them were computed before it.
        """
        self._closed = True
        self._writer.shutdown()
        written, self._written = self._written, set()
        if written and mark is not None and _safely("no fingerprint could be computed", mark) != self._mark:
            log.warning("%s stored texts are removed: the model's weights were changed unseen", len(written))
            for name in written:
                self._files.drop(name)
                self._texts.pop(name, None)

    def _folder(self, namespace: str) -> str:
        """The folder of a namespace, without its name; those of one tenant are in one folder."""
        inside = hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()
        owner = owner_of(namespace)
        if not owner:
            return f"{self._mark}/{inside}"
        return f"{self._mark}/{OWNER_PREFIX}{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}/{inside}"

    def _matches(self, keys: Keys, space: str) -> list[tuple[str, int]]:
        """All texts of a namespace with the chunks that they share with a prompt, most first."""
        shared = [(name, common(keys, others)) for name, others in self._stored_keys(space).items()]
        return sorted(shared, key=lambda item: -item[1])

    def _stored_keys(self, space: str) -> dict[str, Keys]:
        """The texts of a namespace, on disk and on their way there."""
        names = dict.fromkeys(self._files.names(space))
        for name in list(self._texts):  # a copy, as the writer's thread changes it meanwhile
            if name.startswith(space) and name not in names:
                self._texts.pop(name, None)
        texts: dict[str, Keys] = {}
        for name in names:
            keys = self._texts.get(name)
            if keys is None and (file := self._read(name)) is not None:
                keys = self._texts[name] = _split(file.metadata["keys"])
            if keys is not None:
                texts[name] = keys
        with self._lock:
            texts |= {name: text.keys for name, text in self._pending.items() if name.startswith(space)}
        return texts

    def _read(self, name: str, verified: bool = False) -> KVFile | None:
        """A file. A damaged one goes. Its data are compared with their checksums when they are first wanted."""
        try:
            file = KVFile(self._files.folder / name, self._key)
            if verified and file.identity not in self._verified:
                file.verify()
                self._verified.add(file.identity)
            return file
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            log.warning("%s; it is removed, and the text is read again", error)
            self._files.drop(name)
        except (OSError, MemoryError) as error:
            log.warning("a kept text cannot be used (%s); it is read again", error)
        return None

    def _open(self, name: str) -> SharedPrefix | None:
        with self._lock:
            text = self._pending.get(name)
        if text is not None:
            try:
                return SharedPrefix.of(text.layers, text.length, text.capacity)
            except (OSError, MemoryError) as error:
                log.warning("there is no memory to share a beginning: %s", error)
                return None
        file = self._read(name, verified=True)
        if file is None:
            return None
        self._files.use(name)
        return file.prefix(int(file.metadata["length"]), lambda part: self._state_of(name, part))

    def _state_of(self, name: str, part: str) -> Tensors | None:
        file = self._read(_part(name, part), verified=True)
        return None if file is None else file.tensors()

    def _write_text(self, name: str, text: _PendingText) -> None:
        try:
            header = {"keys": b"".join(text.keys).hex(), "length": str(text.length)}
            self._put(name, text_areas(text.layers, text.capacity), header)
            space = name.rpartition("/")[0]
            for other, keys in self._stored_keys(space).items():
                if other != name and common(text.keys, keys) == len(keys):
                    self._files.drop(other)
                    self._texts.pop(other, None)
        finally:
            self._done(name)

    def _put(self, name: str, areas: Sequence[Area], header: dict[str, str], after: str | None = None) -> None:
        if after is not None and ((self._files.folder / name).exists() or not (self._files.folder / after).exists()):
            return
        size, places = sum(area.tensor.nbytes for area in areas), []

        def fill(file: int) -> None:
            write(file, areas, header, self._key)
            places.append(inode_of(file))

        if not self._files.put(name, size, fill):
            log.warning("a text of %s bytes is not kept: the store's limit is %s", f"{size:,}", f"{self.limit:,}")
            return
        self._written.add(name)
        if (file := self._read(name)) is not None and file.identity[:2] in places:
            self._verified.add(file.identity)

    def _write(self, job: Callable[[], None]) -> bool:
        """Whether there is room for a job."""
        with self._lock:
            self._jobs = {each for each in self._jobs if not each.done()}
            if self._closed or len(self._jobs) >= MAX_PENDING_FILES:
                return False
            self._jobs.add(self._writer.submit(_safely, "a text could not be kept", job))
            return True

    def _done(self, name: str) -> None:
        with self._lock:
            self._pending.pop(name, None)


def _safely(failed: str, job: Callable[[], Result]) -> Result | None:
    """Run a job; an error is only logged, because no request depends on the store."""
    try:
        return job()
    except Exception as error:
        log.warning("%s: %s", failed, error)
    return None


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix(KV_FILE_SUFFIX)}.{part}{KV_FILE_SUFFIX}"


def _split(keys: str) -> Keys:
    data = bytes.fromhex(keys)
    return [data[place : place + KEY_BYTES] for place in range(0, len(data), KEY_BYTES)]


class DiskLRU:
    """Files by name. A name is ``folder/.../group.safetensors`` or ``folder/.../group.part.safetensors``; the files of
    a group go together.

    Args:
        folder: made if it is not there, for its owner alone.
        limit: the most bytes on disk.
        expiry: seconds after their last use in which files go; None to keep them.

    Raises:
        OSError: if the folder cannot be made or written.
        NotImplementedError: where there are no locks on files.
    """

    def __init__(self, folder: Path, limit: int, expiry: float | None = None) -> None:
        if fcntl is None:
            raise NotImplementedError("kv_store needs locks on files (fcntl), which this system does not have")
        self.folder, self.limit, self._expiry = folder, limit, expiry
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._newest = max((used for _, _, used in self._files()), default=0)
        with self._alone():
            self._sweep()
            self._make_room(0)

    def put(self, name: str, size: int, write: Callable[[int], None]) -> bool:
        """Write a file.

        Args:
            name: of a file that is replaced if it is there.
            size: bytes that it will take.
            write: fills an empty file, given its descriptor.

        Returns:
            False if it is larger than all that may be there.

        Raises:
            OSError: if it cannot be written; nothing of it is left then.
        """
        if size > self.limit:
            return False
        path = self.folder / name
        with self._alone():
            self._sweep()
            self._make_room(size)
            for folder in reversed(Path(name).parents[:-1]):  # a mode does not hold for the parents of what is made
                (self.folder / folder).mkdir(mode=0o700, exist_ok=True)
            file, temporary = tempfile.mkstemp(UNFINISHED_SUFFIX, ".", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            write(file)
            os.fsync(file)
            with self._alone():
                self._touch(Path(temporary))
                Path(temporary).replace(path)
                self._make_room(0)
            sync_folder(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return True

    def names(self, within: str) -> list[str]:
        """The groups in a folder: names of their files without a part. Those that have expired go first."""
        self._expire(within)
        try:
            entries = os.listdir(self.folder / within)  # noqa: PTH208 - a third of the time
        except FileNotFoundError:
            return []
        return [f"{within}/{name}" for name in entries if name.endswith(KV_FILE_SUFFIX) and name.count(".") == 1]

    def use(self, name: str) -> None:
        """A file is used now."""
        with suppress(FileNotFoundError):
            self._touch(self.folder / name)

    def _touch(self, path: Path) -> None:
        """Note that a file is used later than all others, also if the clock was set back."""
        self._newest = max(time.time_ns(), self._newest + 1)
        os.utime(path, ns=(self._newest, self._newest))

    def drop(self, name: str) -> None:
        """Remove a file, and all of its group if it is no part."""
        path = self.folder / name
        for each in path.parent.glob(f"{path.name.removesuffix(KV_FILE_SUFFIX)}.*"):
            each.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size, _ in self._files())

    def _files(self, within: str = "") -> Iterator[tuple[Path, int, int]]:
        """All files in a folder with the bytes that they take, and when they were used last."""
        for path in (self.folder / within).rglob(f"*{KV_FILE_SUFFIX}"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                yield path, stat.st_blocks * STAT_BLOCK_BYTES, stat.st_mtime_ns

    def _make_room(self, size: int) -> None:
        """Remove groups until ``size`` bytes more are within the limit: of the tenant who has the most, the one that
        was used least recently."""
        self._expire("")
        groups: dict[Path, list[tuple[int, int]]] = defaultdict(list)
        for path, nbytes, used in self._files():
            groups[path.parent / path.name.partition(".")[0]].append((used, nbytes))
        ordered = sorted(groups, key=lambda group: max(groups[group]))
        sizes = {group: sum(nbytes for _, nbytes in groups[group]) for group in ordered}
        while sizes and sum(sizes.values()) + size > self.limit:
            oldest = eviction([(group, _owner(group), nbytes) for group, nbytes in sizes.items()])
            assert oldest is not None
            self.drop(str(oldest.relative_to(self.folder)) + KV_FILE_SUFFIX)
            del sizes[oldest]

    def _expire(self, within: str) -> None:
        """Remove files whose last use is too long ago."""
        if self._expiry is None:
            return
        last = time.time_ns() - int(self._expiry * 1e9)
        for path, _, used in self._files(within):
            if used < last:
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what dead processes did not finish. NFS locks only files that are open for writing."""
        for path in self.folder.rglob(f".*{UNFINISHED_SUFFIX}"):
            with suppress(FileNotFoundError), path.open("r+b") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or thread is here meanwhile; never for long."""
        file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _owner(group: Path) -> str:
    """The folder of the tenant whose a group is."""
    return next((part for part in group.parts if part.startswith(OWNER_PREFIX)), "")
