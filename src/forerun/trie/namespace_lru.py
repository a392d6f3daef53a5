"""The namespaces of a trie, least recently used first; they request bytes to grow, so their common limit holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from forerun.core.fairness import eviction, owner_of
from forerun.trie.logistic_mixer import Mixer
from forerun.trie.namespace import MIN_GROWTH_BYTES, Namespace


class NamespaceLRU(Mapping[str, Namespace]):
    """At most ``most`` namespaces of ``capacity`` bytes by name, least recently used first.

    Attributes:
        mixer: copied for each new namespace.
        on_change: called after each change, if set; must return at once.
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
        return sum(space.index.nbytes for space in self._spaces.values())

    @property
    def granted(self) -> int:
        return sum(space.granted for space in self._spaces.values())

    def bound(self, limit: int, namespaces: int, per_owner: int | None = None) -> None:
        """Bound the bytes of all namespaces, their number, and one owner's number."""
        if limit < MIN_GROWTH_BYTES or namespaces < 1:
            raise ValueError(
                f"the limit is {limit} bytes for {namespaces} namespaces; the minima are {MIN_GROWTH_BYTES} and 1"
            )
        self._limit, self._most, self._bounded = limit, namespaces, True
        self._most_of_owner = namespaces if per_owner is None else per_owner
        self._make_room(0, 0)

    def open(self, name: str) -> Namespace:
        """Return a namespace, created if missing, and mark it as the most recently used."""
        space = self._spaces.pop(name, None)
        if space is None:
            space = self._create(name)
        self._spaces[name] = space
        return space

    def clear(self) -> None:
        """Drop all outputs. Requests stay live; the rest of their outputs is not written."""
        writers = {name: space.writers for name, space in self._spaces.items() if space.writers}
        self._spaces = {}
        for name, cursors in writers.items():
            self.open(name).writers = cursors
            for cursor in cursors.values():
                cursor.leave_shared()

    def note_change(self, space: Namespace) -> None:
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
        self._make_room(requested, 0, space)
        return max(0, min(requested, self._limit - self.granted))

    def _make_room(self, requested: int, more: int, keep: Namespace | None = None) -> None:
        """Free bytes and room for ``more`` namespaces: drop the largest owner's least recently used ones, never one
        with a live request."""
        while (room := self._limit - self.granted - requested) < 0 or len(self._spaces) + more > self._most:
            entries = [
                (None if each.writers or each is keep else name, owner_of(name), each.granted if room < 0 else 1)
                for name, each in self._spaces.items()
            ]
            if (oldest := eviction(entries)) is None:
                return
            del self._spaces[oldest]
