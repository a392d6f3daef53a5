"""What an index starts with: what was kept of it, and the texts of files."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from forerun.core.tree import IntArray
from forerun.server.warming import passages
from forerun.trie.trie import Trie
from forerun.trie.trie_file import Content

log = logging.getLogger(__name__)


def fill(
    trie: Trie,
    encode: Callable[[str], list[int]],
    kept: Sequence[Content],
    files: Sequence[Path],
    places: Callable[[str], list[str]],
    seconds: float,
) -> set[str]:
    """Let an index learn from files, and from what was kept of it.

    Texts of the files that were kept are not learned again. The others come before all that was kept: that was
    generated, so it is what should stay where there is no room for both.

    Args:
        trie: learns; it is empty.
        encode: from a text to its tokens.
        kept: see ``Folder.read``.
        files: to learn from.
        places: the namespaces of the trie that learn what a file has under a name.
        seconds: for the files; what is left after that is told of in the log.

    Returns:
        Namespaces that learned from files what was not kept of them.

    Raises:
        ValueError: for a wrong line in a file; see ``warming``.
        OSError: if a file cannot be read.
    """
    known = {name: set(map(_digest, texts)) for each in kept for name, texts in each.namespaces.items()}
    fresh, learned, until = set(), 0, time.monotonic() + seconds
    for passage in chain.from_iterable(map(passages, files)):
        if time.monotonic() > until:
            told = "%s:%d and all behind it was not learned: the %g seconds of warm_seconds are over"
            log.warning(told, passage.file, passage.line, seconds)
            break
        tokens = np.array(encode(passage.text), np.int64)
        for name in places(passage.namespace):
            if _digest(tokens) not in known.get(name, ()):
                trie.warm(name, [tokens])
                fresh.add(name)
                learned += len(tokens)
    for each in kept:
        trie.adopt(each.mixer)
        for name, texts in each.namespaces.items():
            trie.warm(name, texts)
    if files or kept:
        total = sum(len(text) for each in kept for texts in each.namespaces.values() for text in texts)
        log.info("learned %s tokens of files that are new, and %s that were kept", f"{learned:,}", f"{total:,}")
    return fresh


def _digest(tokens: IntArray) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
