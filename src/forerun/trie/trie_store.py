"""What a trie keeps between requests and can save: each namespace's outputs and mixer. Threads take turns. A save holds
the lock only while memory is copied."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.fairness import FairLock, locked
from forerun.core.tree import IntArray
from forerun.trie import arrays, logistic_mixer, trie_file
from forerun.trie.arrays import BYTES_PER_TOKEN, FloatArray
from forerun.trie.logistic_mixer import Mixer
from forerun.trie.namespace import NO_TEXTS, Texts
from forerun.trie.namespace_lru import NamespaceLRU
from forerun.trie.trie_file import TrieFileError

log = logging.getLogger(__name__)

Tokens = Sequence[int] | IntArray


@dataclass(frozen=True)
class TrieConfig:
    """Limits of the index, and the learning rate; raise ValueError for a value out of range.

    Attributes:
        capacity: maximum bytes of a namespace. Beyond it, the oldest outputs are removed.
        namespaces: maximum number of namespaces. Beyond it, the least recently used one without live requests is
            dropped. Together they use up to ``namespaces * capacity`` bytes: 4 GiB by default.
        prompt_capacity: maximum prompt tokens to index; of a longer prompt, the end.
    """

    capacity: int = 1 << 26
    namespaces: int = 64
    prompt_capacity: int = 1 << 20
    learning_rate: float = 0.003

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("capacity", 1 << 16 <= self.capacity <= 1 << 36, "2**16 to 2**36"),
            ("namespaces", self.namespaces >= 1, "at least 1"),
            ("prompt_capacity", 1 <= self.prompt_capacity <= 1 << 24, "1 to 2**24"),
            ("learning_rate", 0 <= self.learning_rate <= 0.1, "0 to 0.1"),
        ):
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")


class TrieStore:
    """Outputs by namespace; ``Trie`` adds live requests."""

    def __init__(self, config: TrieConfig, mixer: Mixer | None) -> None:
        self.config = config
        self.lock = FairLock()
        self._shared = NamespaceLRU(config.capacity, config.namespaces, mixer or logistic_mixer.prior())

    def warm(self, namespace: str, sequences: Iterable[Tokens]) -> None:
        """Index sequences as if ``namespace`` had generated them, without training the mixer.

        Raises:
            ValueError: if a token is not in [0, 2**31), or a sequence is too long; those before it are indexed.
        """
        longest = self.config.capacity // BYTES_PER_TOKEN
        for sequence in sequences:
            if len(sequence) > longest:
                raise ValueError(
                    f"a sequence has {len(sequence):,} tokens; a namespace of {self.config.capacity:,} bytes holds "
                    f"sequences of up to {longest:,}: cut it, or raise TrieConfig.capacity"
                )
            with self.lock:
                self._publish(namespace, sequence)

    @locked
    def withdraw(self, namespace: str) -> None:
        """Remove the namespace's oldest finished output, in time proportional to its length."""
        space = self._shared.open(namespace)
        space.withdraw()
        self._shared.note_change(space)

    @locked
    def tokens(self, namespace: str) -> int:
        return sum(map(len, self._texts(namespace).read()))

    @property
    @locked
    def kept(self) -> int:
        """Bytes used by the outputs of all namespaces."""
        return self._shared.nbytes

    @locked
    def bound(self, limit: int, namespaces: int, per_owner: int | None = None) -> None:
        """Bound the bytes of all namespaces, their number, and that of one owner's (``owner/name``).

        The largest owner's least recently used namespaces are dropped first, then the oldest outputs of the one being
        written. Indexes of live requests are not included. Raises ValueError for a limit under 2**16, or no namespace.
        """
        self._shared.bound(limit, namespaces, per_owner)

    @locked
    def notify(self, on_change: Callable[[], None] | None) -> None:
        """Call ``on_change`` after every change of a namespace; it must return at once, and not use the trie."""
        self._shared.on_change = on_change

    @locked
    def changes(self) -> dict[str, int]:
        """Return the number of each written namespace's last change, least recently used first."""
        return {name: space.changed for name, space in self._shared.items() if space.changed}

    def snapshot(self, namespace: str) -> tuple[list[IntArray], FloatArray]:
        """Return a namespace's outputs, oldest first, and its mixer as a vector; steps wait while memory is copied."""
        with self.lock:
            texts, learned = self._texts(namespace), self._learned(namespace)
        return texts.read(), learned

    @locked
    def adopt(self, namespace: str, mixer: Mixer) -> None:
        self._shared.open(namespace).mixer = mixer

    def save(self, path: str | os.PathLike[str], vocabulary: str = "") -> None:
        """Write all namespaces, and the vocabulary's name, to ``path`` atomically, without prompts. Raises OSError if
        it cannot be written, as on a full disk; ``path`` is unchanged."""
        with self.lock:
            texts = {name: self._texts(name) for name in self._shared}
            learned = {name: self._learned(name) for name in self._shared}
        trie_file.write(path, {name: each.read() for name, each in texts.items()}, learned, vocabulary)

    def load(self, path: str | os.PathLike[str], vocabulary: str = "") -> None:
        """Replace all namespaces by those of a file; beyond the capacity, the latest outputs stay. A file without a
        vocabulary fits any.

        Raises:
            TrieFileError: if the file is truncated, damaged, not a trie, or of another version or vocabulary; nothing
                changes.
            OSError: if it cannot be read.
        """
        content = trie_file.read(path)
        if vocabulary and content.vocabulary not in ("", vocabulary):
            raise TrieFileError(f"{path} has another vocabulary, not the model's")
        self._replace(content.namespaces, content.mixers)

    @locked
    def _replace(self, namespaces: Mapping[str, Iterable[IntArray]], mixers: Mapping[str, Mixer]) -> None:
        self._shared.clear()
        for name, texts in namespaces.items():
            self._shared.open(name).mixer = mixers[name]
            for text in texts:
                self._publish(name, text)

    def _publish(self, name: str, text: Tokens) -> None:
        tokens, space = checked(text), self._shared.open(name)
        if not space.publish(tokens):
            log.warning(
                "a sequence of %s tokens does not fit namespace %r and is not indexed", f"{len(tokens):,}", name
            )
        self._shared.note_change(space)

    def _learned(self, name: str) -> FloatArray:
        space = self._shared.get(name)
        return logistic_mixer.dump(self._shared.mixer if space is None else space.mixer)

    def _texts(self, name: str) -> Texts:
        space = self._shared.get(name)
        return NO_TEXTS if space is None else space.texts()


def checked(tokens: Tokens) -> IntArray:
    """Return tokens as a vector for compiled code; raise ValueError for another shape, or ids outside [0, 2**31)."""
    array = np.ascontiguousarray(tokens, dtype=np.int64)
    if not array.flags.carray:  # numba compiles read-only memory as another type
        array = array.copy()
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}; allowed: a vector")
    if not arrays.valid(array):
        wrong = array[(array < 0) | (array >= 1 << 31)][0]
        raise ValueError(f"token id is {wrong}; allowed: 0 to 2**31 - 1")
    return array
