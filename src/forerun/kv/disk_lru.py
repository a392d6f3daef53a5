"""A folder of files under a limit of bytes, which several processes may share.

A file is there whole or not at all: it is written under another name, brought to the disk, and renamed. Who writes
holds a lock on what it writes; so what a dead process left is known, and removed. What was used least recently goes
first; a file that goes stays for those who have it open.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX, UNFINISHED = ".safetensors", ".unfinished"
BLOCK = 512
"""Bytes of the blocks in which POSIX counts what a file takes."""


class DiskLRU:
    """Files by name. A name is ``folder/.../group.safetensors`` or ``folder/.../group.part.safetensors``; the files of
    a group go together.

    Args:
        folder: made if it is not there, for its owner alone.
        limit: bytes on disk, at most.

    Raises:
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            file, temporary = tempfile.mkstemp(UNFINISHED, ".", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            write(file)
            os.fsync(file)
            with self._alone():
                Path(temporary).replace(path)
                self._make_room(0)
            _sync(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return True

    def names(self, within: str) -> list[str]:
        """The groups in a folder: names of their files without a part."""
        try:
            found = os.listdir(self.folder / within)  # noqa: PTH208 - a third of the time
        except FileNotFoundError:
            return []
        return [f"{within}/{name}" for name in found if name.endswith(SUFFIX) and name.count(".") == 1]

    def use(self, name: str) -> Path:
        """Where a file is; it was used now."""
        path = self.folder / name
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    def drop(self, name: str) -> None:
        """Remove a file, and all of its group if it is no part."""
        path = self.folder / name
        for each in path.parent.glob(f"{path.name.removesuffix(SUFFIX)}.*"):
            each.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(taken for _, taken, _ in self._files())

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """All files with the bytes that they take, and when they were used last."""
        for path in self.folder.rglob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                found = path.stat()
                yield path, found.st_blocks * BLOCK, found.st_mtime_ns

    def _make_room(self, size: int) -> None:
        """Remove what was used least recently until ``size`` bytes more are within the limit."""
        groups: dict[Path, list[tuple[int, int]]] = defaultdict(list)
        for path, taken, used in self._files():
            groups[path.parent / path.name.partition(".")[0]].append((used, taken))
        total = size + sum(taken for files in groups.values() for _, taken in files)
        for group, files in sorted(groups.items(), key=lambda item: max(item[1])):
            if total <= self.limit:
                return
            self.drop(str(group.relative_to(self.folder)) + SUFFIX)
            total -= sum(taken for _, taken in files)

    def _sweep(self) -> None:
        """Remove what dead processes did not finish. NFS locks only files that are open for writing."""
        for path in self.folder.rglob(f".*{UNFINISHED}"):
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


def _sync(folder: Path) -> None:
    """Make a renaming last through a power cut."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
