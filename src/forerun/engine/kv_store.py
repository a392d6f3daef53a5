"""Keys and values of prompts' prefixes on disk, for later prompts that share them.

Each prefix is a file (``kv_file.py``), named by a fingerprint of model and machine and a digest of its namespace; it is
mapped, not read. The tensors of views over it are files beside it. One thread writes; a lookup of a file in progress
returns a copy. No error here ends a request: what cannot be stored is prefilled again.
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
STAT_BLOCK_BYTES = 512
"""Block size in which POSIX counts disk usage."""
MIN_STORED_TOKENS = 512
"""Minimum tokens to store: a shorter prefix is prefilled as fast as a file is written, found and verified."""
GROWTH_DIVISOR = 8
"""Write a prefix again if at least 1/8 of it is new: a growing conversation is written a few times, and a question
about a book does not rewrite the book."""
DISK_SHARE = 0.25
"""Default limit: share of the disk space that is free or used by the store."""
MAX_PENDING_FILES = 8
"""Maximum files waiting to be written, each of which keeps a cache in memory; further prefixes are not stored."""


StoredText = tuple[str, int]
"""The name of a stored prefix, and how many of a prompt's chunks it holds."""


@dataclass(frozen=True)
class _PendingText:
    keys: Keys
    layers: dict[int, Rows]
    length: int
    capacity: int


class KVStore:
    """Prefixes in a folder, up to a number of bytes; the least recently used are evicted. Processes may share the
    folder, and threads the store.

    Args:
        mark: a fingerprint; prefixes with another one are invisible.
        limit: maximum bytes on disk; by default a quarter of the space that is free or used by the store.
        expiry: seconds after their last use until prefixes are removed; None to keep them.
        key: of the files' checksums; files written without it are not used. None for checksums that only detect damage.

    Raises:
        ValueError: for a negative limit, an expiry that is not positive, or an empty key.
        OSError: if the folder cannot be created or written.
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
        self._texts: dict[str, Keys] = {}  # of files whose headers were read
        self._verified: set[tuple[int, int, str]] = set()  # verified or written by this process
        self._written: set[str] = set()  # names of files written since this was opened
        self._pending: dict[str, _PendingText] = {}
        self._jobs: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "forerun-kv-store")  # finishes its work before the process ends
        self._closed = False

    @property
    def limit(self) -> int:
        """Maximum bytes on disk."""
        return self._files.limit

    @property
    def nbytes(self) -> int:
        return self._files.nbytes

    def find(self, keys: Keys, namespace: str, least: int = 0) -> tuple[SharedPrefix, int] | None:
        """Return the prefix that shares the most chunks with a prompt, and how many, if more than ``least``."""
        return _safely("cannot look up a stored prefix", lambda: self._find(keys, namespace, least))

    def _find(self, keys: Keys, namespace: str, least: int) -> tuple[SharedPrefix, int] | None:
        for name, count in self._matches(keys, self._folder(namespace)):
            if count <= least:
                break
            if (beginning := self._open(name)) is not None:
                return beginning, count
        return None

    def keep(self, keys: Keys, namespace: str, chunk: int, cache: FullCache) -> StoredText | None:
        """Store a prompt's prefix, unless most of it is stored, and drop a shorter one that it contains; return the
        file that holds all or most of it, or None. ``keys`` are of its chunks, of ``chunk`` tokens. The cache may
        continue meanwhile."""
        return _safely("cannot store a prefix", lambda: self._keep(keys, namespace, chunk, cache))

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
        """Store a view's tensors (``View.state_name``), no longer changing, with a stored prefix, unless stored."""
        beside = _part(name, part)
        if tensors:
            self._write(lambda: self._put(beside, tensor_areas(tensors), {}, after=name))

    def flush(self) -> None:
        with self._lock:
            jobs = set(self._jobs)
        wait(jobs)

    def close(self, mark: Callable[[], str] | None = None) -> None:
        """Finish pending writes and store nothing more; stored prefixes can still be found. If the fingerprint that
        ``mark`` recomputes differs, the model changed unnoticed, so files written since the store was opened are
        removed."""
        self._closed = True
        self._writer.shutdown()
        written, self._written = self._written, set()
        if written and mark is not None and _safely("cannot compute a fingerprint", mark) != self._mark:
            log.warning("removed %s stored prefixes: the model's weights changed unnoticed", len(written))
            for name in written:
                self._files.drop(name)
                self._texts.pop(name, None)

    def _folder(self, namespace: str) -> str:
        """Return the folder of a namespace, a digest of its name; a tenant's namespaces are in one folder."""
        inside = hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()
        owner = owner_of(namespace)
        if not owner:
            return f"{self._mark}/{inside}"
        return f"{self._mark}/{OWNER_PREFIX}{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}/{inside}"

    def _matches(self, keys: Keys, space: str) -> list[tuple[str, int]]:
        """Return all prefixes of a namespace with the chunks that they share with a prompt, most first."""
        shared = [(name, common(keys, others)) for name, others in self._stored_keys(space).items()]
        return sorted(shared, key=lambda item: -item[1])

    def _stored_keys(self, space: str) -> dict[str, Keys]:
        names = dict.fromkeys(self._files.names(space))
        for name in list(self._texts):  # a copy, because the writer's thread changes it
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
        """Open a file, dropping it if damaged. Its data are verified on first use."""
        try:
            file = KVFile(self._files.folder / name, self._key)
            if verified and file.identity not in self._verified:
                file.verify()
                self._verified.add(file.identity)
            return file
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            log.warning("%s; removed it, and its prefix needs another prefill", error)
            self._files.drop(name)
        except (OSError, MemoryError) as error:
            log.warning("cannot use a stored prefix (%s); it needs another prefill", error)
        return None

    def _open(self, name: str) -> SharedPrefix | None:
        with self._lock:
            text = self._pending.get(name)
        if text is not None:
            try:
                return SharedPrefix.of(text.layers, text.length, text.capacity)
            except (OSError, MemoryError) as error:
                log.warning("no memory to share a prefix: %s", error)
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
            log.warning("a prefix of %s bytes is not stored: the store's limit is %s", f"{size:,}", f"{self.limit:,}")
            return
        self._written.add(name)
        if (file := self._read(name)) is not None and file.identity[:2] in places:
            self._verified.add(file.identity)

    def _write(self, job: Callable[[], None]) -> bool:
        """Queue a job; return whether there was room."""
        with self._lock:
            self._jobs = {each for each in self._jobs if not each.done()}
            if self._closed or len(self._jobs) >= MAX_PENDING_FILES:
                return False
            self._jobs.add(self._writer.submit(_safely, "cannot store a prefix", job))
            return True

    def _done(self, name: str) -> None:
        with self._lock:
            self._pending.pop(name, None)


def _safely(failed: str, job: Callable[[], Result]) -> Result | None:
    """Run a job, only logging errors: no request depends on the store."""
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
    """Files by name: ``folder/.../group.safetensors`` or ``folder/.../group.part.safetensors``; groups are evicted as a
    whole.

    Args:
        folder: created if missing, for its owner alone.
        limit: maximum bytes on disk.
        expiry: seconds after their last use until files are removed; None to keep them.

    Raises OSError if the folder cannot be created or written, NotImplementedError without file locks.
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
        """Write a file of ``size`` bytes by ``write``, which receives an empty file's descriptor, replacing any of this
        name; return False if it exceeds the limit. If writing raises OSError, nothing is left."""
        if size > self.limit:
            return False
        path = self.folder / name
        with self._alone():
            self._sweep()
            self._make_room(size)
            for folder in reversed(Path(name).parents[:-1]):  # mkdir's mode does not apply to parents
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
        """Return the groups in a folder, as their files without a part, after removing expired ones."""
        self._expire(within)
        try:
            entries = os.listdir(self.folder / within)  # noqa: PTH208 - a third of the time
        except FileNotFoundError:
            return []
        return [f"{within}/{name}" for name in entries if name.endswith(KV_FILE_SUFFIX) and name.count(".") == 1]

    def use(self, name: str) -> None:
        """Mark a file as used now."""
        with suppress(FileNotFoundError):
            self._touch(self.folder / name)

    def _touch(self, path: Path) -> None:
        """Mark a file as the most recently used, even if the clock was set back."""
        self._newest = max(time.time_ns(), self._newest + 1)
        os.utime(path, ns=(self._newest, self._newest))

    def drop(self, name: str) -> None:
        """Remove a file, with its group unless it is a part."""
        path = self.folder / name
        for each in path.parent.glob(f"{path.name.removesuffix(KV_FILE_SUFFIX)}.*"):
            each.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self, within: str = "") -> Iterator[tuple[Path, int, int]]:
        for path in (self.folder / within).rglob(f"*{KV_FILE_SUFFIX}"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                yield path, stat.st_blocks * STAT_BLOCK_BYTES, stat.st_mtime_ns

    def _make_room(self, size: int) -> None:
        """Evict groups until ``size`` more bytes fit: the least recently used one of the largest tenant."""
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
        if self._expiry is None:
            return
        last = time.time_ns() - int(self._expiry * 1e9)
        for path, _, used in self._files(within):
            if used < last:
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove unfinished files of dead processes. NFS locks only files open for writing."""
        for path in self.folder.rglob(f".*{UNFINISHED_SUFFIX}"):
            with suppress(FileNotFoundError), path.open("r+b") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the folder against other processes and threads, briefly."""
        file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _owner(group: Path) -> str:
    return next((part for part in group.parts if part.startswith(OWNER_PREFIX)), "")
