"""Compiles the trie in separate processes while the engine decodes without drafts: some ten seconds, once per machine.

A process waits for a function that another compiles (``KeptCode.alone``), so two that start at opposite ends share
work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba import types

from forerun.core.compile_process import start, step_back
from forerun.core.compiling import COMPILES, can_be_kept, is_kept
from forerun.core.cpu_limit import usable_cores
from forerun.trie import best_first, entry_points, recycled, text_cursor, token_store
from forerun.trie.arrays import Index, tight, valid
from forerun.trie.draft_workspace import Draft, DraftWorkspace
from forerun.trie.logistic_mixer import blank
from forerun.trie.text_cursor import TextCursor
from forerun.trie.trie import Trie

Progress = Callable[[int, int], None]

CALLED_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    entry_points.step,
    entry_points.known_suffix,
    text_cursor.ingest,
    text_cursor.publish,
    text_cursor.withdraw,
    token_store.start_hashes,
    recycled.best_of_rows,
    tight,
    valid,
)
"""What Python calls; these inline or call everything else."""

PROCESSES = 2
"""A third process would only wait for the others."""

POLL_SECONDS = 0.2


def compiled_before() -> bool:
    """Return whether all code is cached, or cannot be, so that other processes cannot help."""
    return not COMPILES or not can_be_kept(entry_points.step) or all(map(is_kept, CALLED_FUNCTIONS))


class Compilation:
    """Processes that compile the trie. They outlive this one, so that the next finds more code."""

    def __init__(self) -> None:
        self._processes = [start(__name__, str(number)) for number in range(min(PROCESSES, usable_cores()))]

    @property
    def running(self) -> bool:
        """Whether any process runs. If one fails, the caller compiles the rest."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, progress: Progress = lambda done, total: None) -> None:
        """Wait until all code is compiled; ``progress`` receives the numbers of functions compiled and in all."""
        while self.running:
            progress(sum(map(is_kept, CALLED_FUNCTIONS)), len(CALLED_FUNCTIONS))
            time.sleep(POLL_SECONDS)


def compile_share(number: int) -> None:
    """Compile the trie, starting at one of ``PROCESSES`` ends."""
    index, cursor, mixer = map(numba.typeof, (Index.allocate(0, 0, 0), TextCursor.start(), blank()))
    shared = (index, index, cursor, mixer, numba.typeof(DraftWorkspace.allocate(1)))
    if number == 0:
        _compile(entry_points._learn_evidence, *shared, types.int64, types.float64)
    else:
        Trie().warm("", [[1, 2, 3]])
        _compile(best_first.grow, *shared, numba.typeof(Draft.allocate(1)), types.int64)
    Trie().warm_up()
    recycled.best_of_rows(*_rows())


def _compile(function: Any, *kinds: Any) -> None:
    function.inner.compile(kinds)


def _rows() -> Iterator[np.ndarray[Any, Any]]:
    yield np.zeros((1, 8), np.float32)
    yield np.empty((1, 8), np.int32)
    yield np.empty((1, 8), np.float32)


if __name__ == "__main__":
    step_back()
    compile_share(int(sys.argv[1]))
