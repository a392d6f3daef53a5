"""A folder that keeps what a trie learned: a file for each namespace, written when it has changed.

A file is replaced as a whole or not at all, so whatever ends the program, the last one that was written is there. One
that is damaged is set aside when the folder is read. Each is a trie file like any other.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from forerun.trie import trie_file
from forerun.trie.trie_file import Content, TrieFileError
from forerun.trie.trie_store import TrieStore

log = logging.getLogger(__name__)

TRIE_SUFFIX, DAMAGED, LOCK = ".trie", ".damaged", ".lock"


class Folder:
    """Keeps one trie, for one process at a time.

    Args:
        path: of the folder, which is made if it is missing; others than its owner cannot read it then.
        vocabulary: a name for what the token ids mean.

    Raises:
        ValueError: if another process keeps its trie there.
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, path: Path, vocabulary: str) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self._vocabulary = path, vocabulary
        self._lock = _lock_file(path / LOCK)
        self._written: dict[str, int] = {}
        """By namespace, the number of the change that its file has (see ``TrieStore.changes``); 0 is none."""
        for left in path.glob(f".*{TRIE_SUFFIX}.*.tmp"):  # by a process that was killed
            left.unlink()

    def read(self) -> list[Content]:
        """The content of the files, one namespace each, those written longest ago first.

        Damaged files are renamed and logged, and not used.

        Raises:
            ValueError: if a file is of another vocabulary.
            OSError: if one cannot be read.
        """
        found = []
        for file in sorted(self.path.glob(f"*{TRIE_SUFFIX}"), key=lambda each: each.stat().st_mtime_ns):
            try:
                content = trie_file.read(file)
                if [*map(self._file, content.namespaces)] != [file]:
                    raise TrieFileError(f"{file} is not named after what it holds")
            except TrieFileError as error:
                aside = file.rename(file.with_suffix(DAMAGED))
                log.warning("%s; it is set aside as %s", error, aside.name)
                continue
            if content.vocabulary != self._vocabulary:
                raise ValueError(f"{file} is of a model with another vocabulary; keep its index in another folder")
            found.append(content)
            self._written |= dict.fromkeys(content.namespaces, 0)
        return found

    def holds(self, changes: Mapping[str, int]) -> None:
        """Note that the files of these namespaces are as the trie is, by the numbers of ``TrieStore.changes``."""
        self._written |= changes

    def save(self, store: TrieStore) -> int:
        """Write the namespaces that have changed since they were written or read; remove the files of dropped ones.

        Returns:
            How many were written.

        Raises:
            OSError: if a file cannot be written. It stays as it was, and the next call tries again. The others are
                written.
        """
        changes, written, failed = store.changes(), 0, None
        for name in self._written.keys() - changes.keys():
            self._file(name).unlink(missing_ok=True)
            del self._written[name]
        for name, number in changes.items():
            if self._written.get(name) != number:
                texts, learned = store.snapshot(name)
                try:
                    trie_file.write(self._file(name), {name: texts}, {name: learned}, self._vocabulary)
                except OSError as error:
                    failed = failed or error
                    continue
                self._written[name] = number
                written += 1
        if failed is not None:
            raise failed
        return written

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _file(self, name: str) -> Path:
        return self.path / (hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + TRIE_SUFFIX)


def _lock_file(path: Path) -> IO[bytes]:
    """An open file that is locked until it is closed, or its process ends; where locks are to be had."""
    file = path.open("ab")
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"{path.parent} keeps the index of another process; each has a folder of its own"
            ) from None
    return file
