"""A folder with one trie file per namespace, replaced atomically when it changes; damaged files are renamed."""

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
    """Stores one trie, for one process at a time, in a folder that only its owner can read.

    Raises:
        ValueError: if another process uses the folder.
        OSError: if the folder cannot be created or written.
    """

    def __init__(self, path: Path, vocabulary: str) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self._vocabulary = path, vocabulary
        self._lock = _lock_file(path / LOCK)
        self._written: dict[str, int] = {}
        """By namespace, the change (``TrieStore.changes``) that its file contains; 0 for none."""
        for left in path.glob(f".*{TRIE_SUFFIX}.*.tmp"):  # left by a killed process
            left.unlink()

    def read(self) -> list[Content]:
        """Read the files, one namespace each, least recently written first. Damaged files are renamed and logged.

        Raises:
            ValueError: if a file has another vocabulary.
            OSError: if one cannot be read.
        """
        found = []
        for file in sorted(self.path.glob(f"*{TRIE_SUFFIX}"), key=lambda each: each.stat().st_mtime_ns):
            try:
                content = trie_file.read(file)
                if [*map(self._file, content.namespaces)] != [file]:
                    raise TrieFileError(f"{file} is not named after its namespace")
            except TrieFileError as error:
                aside = file.rename(file.with_suffix(DAMAGED))
                log.warning("%s; renamed to %s", error, aside.name)
                continue
            if content.vocabulary != self._vocabulary:
                raise ValueError(f"{file} has another vocabulary; use a separate folder for each")
            found.append(content)
            self._written |= dict.fromkeys(content.namespaces, 0)
        return found

    def holds(self, changes: Mapping[str, int]) -> None:
        """Mark the files of these namespaces as current, by the numbers of ``TrieStore.changes``."""
        self._written |= changes

    def save(self, store: TrieStore) -> int:
        """Write the namespaces that changed, remove the files of dropped ones, and return the number of files written.

        Raises:
            OSError: if a file cannot be written. It stays unchanged until the next call; the others are written.
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
        """Release the folder for other processes."""
        self._lock.close()

    def _file(self, name: str) -> Path:
        return self.path / (hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + TRIE_SUFFIX)


def _lock_file(path: Path) -> IO[bytes]:
    """Open a file and lock it (on POSIX) until it is closed or the process ends."""
    file = path.open("ab")
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another process uses {path.parent}; each process needs a separate folder") from None
    return file
