"""The namespaces of a trie, in the order of their last use, and the memory that they share.

A namespace requests bytes before it grows. So the limit holds at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from forerun.core.fairness import eviction, owner_of
from forerun.trie.logistic_mixer import Mixer
from forerun.trie.namespace import MIN_GROWTH_BYTES, Namespace


class NamespaceLRU(Mapping[str, Namespace]):
    """Namespaces by name, those used longest ago first.

    Args:
        capacity: maximum bytes of a namespace.
        most: maximum number of namespaces.
        mixer: what a new namespace takes evidence to be worth; an attribute, too.

    Attributes:
        on_change: called after each change, if it is set; it must return at once.
    """

    def __init__(self, capacity: int, most: int, mixer: Mixer) -> None:
        self._capacity, self.mixer = capacity, mixer
        self._spaces: dict[str, Namespace] = {}
        self._most = self._most_of_owner = most
        self._limit = most * capacity
        self._bounded = False
        self._changes = 0
        self.on_change: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> Namespace:
        return self._spaces[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spaces)

    def __len__(self) -> int:
        return len(self._spaces)

    @property
    def nbytes(self) -> int:
        """Bytes in use, or once used, by all namespaces."""
        return sum(space.index.nbytes for space in self._spaces.values())

    @property
    def granted(self) -> int:
        """Bytes that the namespaces may take."""
        return sum(space.granted for space in self._spaces.values())

    def bound(self, limit: int, namespaces: int, per_owner: int | None = None) -> None:
        """Bound the bytes of all namespaces together, their number, and that of one owner's.

        Raises:
            ValueError: for a limit that leaves no room for one namespace, or no namespace.
        """
        if limit < MIN_GROWTH_BYTES or namespaces < 1:
            raise ValueError(
                f"the limit is {limit} bytes for {namespaces} namespaces; allowed: {MIN_GROWTH_BYTES} and 1 at least"
            )
        self._limit, self._most, self._bounded = limit, namespaces, True
        self._most_of_owner = namespaces if per_owner is None else per_owner
        self._make_room(0, 0)

    def open(self, name: str) -> Namespace:
        """A namespace by name, made if it is missing; it is now the one that was used last."""
        space = self._spaces.pop(name, None)
        if space is None:
            space = self._create(name)
        self._spaces[name] = space
        return space

    def clear(self) -> None:
        """Forget all texts. Requests are live as before; the rest of their outputs is not written."""
        writers = {name: space.writers for name, space in self._spaces.items() if space.writers}
        self._spaces = {}
        for name, cursors in writers.items():
            self.open(name).writers = cursors
            for cursor in cursors.values():
                cursor.leave_shared()

    def note_change(self, space: Namespace) -> None:
        """A namespace has other texts now."""
        self._changes += 1
        space.changed = self._changes
        if self.on_change is not None:
            self.on_change()

    def _create(self, name: str) -> Namespace:
        owner = owner_of(name)
        own = [each for each in self._spaces if owner_of(each) == owner]
        idle = [each for each in own if not self._spaces[each].writers]
        for oldest in idle[: max(0, len(own) + 1 - self._most_of_owner)]:
            del self._spaces[oldest]
        self._make_room(0 if self._bounded else self._capacity, 1)
        return Namespace(self._capacity, self.mixer.copy(), self._allow if self._bounded else None)

    def _allow(self, space: Namespace, requested: int) -> int:
        """How many of the requested bytes a namespace may take."""
        self._make_room(requested, 0, space)
        return max(0, min(requested, self._limit - self.granted))

    def _make_room(self, requested: int, more: int, keep: Namespace | None = None) -> None:
        """Drop namespaces, but none with a live request, until the requested bytes are free and ``more`` namespaces may
        be added: of the owner who has the most, the one used longest ago."""
        while (room := self._limit - self.granted - requested) < 0 or len(self._spaces) + more > self._most:
            entries = [
                (None if each.writers or each is keep else name, owner_of(name), each.granted if room < 0 else 1)
                for name, each in self._spaces.items()
            ]
            if (oldest := eviction(entries)) is None:
                return
            del self._spaces[oldest]
