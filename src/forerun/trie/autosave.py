"""Saving an index while it is used."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from forerun.trie.trie_store import TrieStore

log = logging.getLogger(__name__)


class Destination(Protocol):
    """Where an index is saved, such as a ``Folder``."""

    def save(self, store: TrieStore, /) -> object:
        """Write what is new; an ``OSError`` is logged, and saving is tried again."""

    def close(self) -> None:
        """Nothing is saved any more."""


class AutoSaver:
    """Saves what an index learned, some time after it has changed and at the end.

    Its thread sleeps until something has changed, so an idle program does nothing. Steps wait for it only while memory
    is copied.

    Args:
        trie: the index.
        destination: where it is saved.
        interval: seconds from a change to the save that has it.
    """

    def __init__(self, trie: TrieStore, destination: Destination, interval: float) -> None:
        self._trie, self._destination, self._interval = trie, destination, interval
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="forerun-keeper", daemon=True)

    def start(self) -> None:
        """Save changes from now on."""
        self._trie.notify(self._changed.set)
        self._changed.set()  # files may have been learned from
        self._thread.start()

    def close(self) -> None:
        """Save what is new, and close the destination."""
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
