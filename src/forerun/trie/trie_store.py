"""What a trie keeps beyond a request: the outputs of each namespace, and what evidence was worth. It can be saved.

Threads take turns. To save, memory is copied in a turn of its own; the rest of the work is done outside.
"""

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
    """How texts are kept, and how fast the worth of evidence is learned.

    Attributes:
        capacity: maximum bytes of a namespace; when it is reached, the oldest outputs are dropped.
        namespaces: maximum number of namespaces. When there are more, the one used longest ago is dropped, unless a
            request is live in it. Together they take up to ``namespaces * capacity`` bytes: 4 GiB, by default.
        prompt_capacity: maximum tokens of a prompt that are indexed; of a longer prompt it is the end.
        learning_rate: of the mixer's weights; with 0 nothing is learned about evidence.

    Raises:
        ValueError: for a value out of range.
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
    """Outputs by namespace; ``Trie`` adds the live requests, and says what the arguments are."""

    def __init__(self, config: TrieConfig, mixer: Mixer | None) -> None:
        self.config = config
        self.lock = FairLock()
        self._shared = NamespaceLRU(config.capacity, config.namespaces, mixer or logistic_mixer.prior())

    def warm(self, namespace: str, sequences: Iterable[Tokens]) -> None:
        """Count sequences as if they had been generated in ``namespace``; nothing is learned about evidence.

        Raises:
            ValueError: if a token is not in [0, 2**31), or a sequence is too long for any namespace; the
                sequences before it are counted.
        """
        longest = self.config.capacity // BYTES_PER_TOKEN
        for sequence in sequences:
            if len(sequence) > longest:
                raise ValueError(
                    f"a text has {len(sequence):,} tokens; a namespace of {self.config.capacity:,} bytes takes texts "
                    f"of up to {longest:,}: cut it, or raise TrieConfig.capacity"
                )
            with self.lock:
                self._publish(namespace, sequence)

    @locked
    def withdraw(self, namespace: str) -> None:
        """Take the namespace's oldest finished output back, in time proportional to its length."""
        space = self._shared.open(namespace)
        space.withdraw()
        self._shared.note_change(space)

    @locked
    def tokens(self, namespace: str) -> int:
        """Tokens that the index of ``namespace`` holds."""
        return sum(map(len, self._texts(namespace).read()))

    @property
    @locked
    def kept(self) -> int:
        """Bytes in use for the texts of all namespaces."""
        return self._shared.nbytes

    @locked
    def bound(self, limit: int, namespaces: int, per_owner: int | None = None) -> None:
        """Bound the bytes of all namespaces together, their number, and that of one owner's (``owner/name``).

        Namespaces used longest ago are dropped, those of the owner who has the most first; or the oldest outputs of the
        one that is written to. The indexes of live requests come on top.

        Raises:
            ValueError: for a limit under 2**16, or fewer than one namespace.
        """
        self._shared.bound(limit, namespaces, per_owner)

    @locked
    def notify(self, on_change: Callable[[], None] | None) -> None:
        """Call ``on_change`` whenever a namespace has changed. It must return at once, and not use the trie."""
        self._shared.on_change = on_change

    @locked
    def changes(self) -> dict[str, int]:
        """The number of the last change of every namespace that was written to, those used longest ago first."""
        return {name: space.changed for name, space in self._shared.items() if space.changed}

    def snapshot(self, namespace: str) -> tuple[list[IntArray], FloatArray]:
        """The outputs of a namespace, oldest first, and what was learned about evidence.

        Steps wait while memory is copied: some four bytes for each token of the namespace.
        """
        with self.lock:
            texts, learned = self._texts(namespace), self._learned(namespace)
        return texts.read(), learned

    @locked
    def adopt(self, namespace: str, mixer: Mixer) -> None:
        """Take over what was learned about evidence elsewhere."""
        self._shared.open(namespace).mixer = mixer

    def save(self, path: str | os.PathLike[str], vocabulary: str = "") -> None:
        """Write the namespaces and what was learned to ``path``, in one atomic step; prompts are never written.

        Args:
            path: of the file.
            vocabulary: a name for what the token ids mean.

        Raises:
            OSError: if it cannot be written, as on a full disk; what ``path`` held before is still there.
        """
        with self.lock:
            texts = {name: self._texts(name) for name in self._shared}
            learned = {name: self._learned(name) for name in self._shared}
        trie_file.write(path, {name: each.read() for name, each in texts.items()}, learned, vocabulary)

    def load(self, path: str | os.PathLike[str], vocabulary: str = "") -> None:
        """Replace the namespaces, and what was learned, by those of a file; beyond the capacity the latest are kept.

        Args:
            path: of the file.
            vocabulary: as for ``save``; a file without one fits any.

        Raises:
            TrieFileError: if the file is truncated, damaged, of another version or vocabulary, or no trie; nothing
                changes then.
            OSError: if it cannot be read.
        """
        content = trie_file.read(path)
        if vocabulary and content.vocabulary not in ("", vocabulary):
            raise TrieFileError(f"{path} is of another vocabulary than the model's")
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
            log.warning("a text of %s tokens finds no room in namespace %r and is not kept", f"{len(tokens):,}", name)
        self._shared.note_change(space)

    def _learned(self, name: str) -> FloatArray:
        """What was learned about evidence in a namespace, as one vector."""
        space = self._shared.get(name)
        return logistic_mixer.dump(self._shared.mixer if space is None else space.mixer)

    def _texts(self, name: str) -> Texts:
        """The outputs of a namespace, oldest first, those that still grow last."""
        space = self._shared.get(name)
        return NO_TEXTS if space is None else space.texts()


def checked(tokens: Tokens) -> IntArray:
    """Tokens as a vector that compiled code may read.

    Raises:
        ValueError: if they are no vector, or one is not in [0, 2**31).
    """
    array = np.ascontiguousarray(tokens, dtype=np.int64)
    if not array.flags.carray:  # read-only memory is another type to the compiler
        array = array.copy()
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}; allowed: a vector")
    if not arrays.valid(array):
        wrong = array[(array < 0) | (array >= 1 << 31)][0]
        raise ValueError(f"token id is {wrong}; allowed: 0 to 2**31 - 1")
    return array
