"""Saves an index in the background while requests use it."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from forerun.trie.trie_store import TrieStore

log = logging.getLogger(__name__)


class Destination(Protocol):
    """Where an index is saved, such as a ``Folder``."""

    def save(self, store: TrieStore, /) -> object:
        """Write what changed. OSErrors are logged, and the save is retried."""

    def close(self) -> None:
        """Stop saving."""


class AutoSaver:
    """Saves an index on close, and ``interval`` seconds after each change; steps wait only while memory is copied."""

    def __init__(self, trie: TrieStore, destination: Destination, interval: float) -> None:
        self._trie, self._destination, self._interval = trie, destination, interval
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="forerun-keeper", daemon=True)

    def start(self) -> None:
        self._trie.notify(self._changed.set)
        self._changed.set()  # covers files indexed before now
        self._thread.start()

    def close(self) -> None:
        """Save what changed, and close the destination."""
        self._trie.notify(None)
        self._closing.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._save()
        self._destination.close()

    def _work(self) -> None:
        while self._changed.wait() and not self._closing.wait(self._interval):
            self._changed.clear()
            if not self._save():
                self._changed.set()

    def _save(self) -> bool:
        try:
            self._destination.save(self._trie)
        except OSError as error:
            log.warning("%s: %s", error.filename, error.strerror)
            return False
        except Exception:
            log.exception("the index was not saved")
            return False
        return True
