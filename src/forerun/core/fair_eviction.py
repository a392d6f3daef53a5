"""Which of the kept things go first: the oldest of the owner who has the most, so that nobody pushes out others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

KeyT = TypeVar("KeyT")


def owner_of(namespace: str) -> str:
    """Whose a namespace is: a server names it ``tenant/name``. All other names have one owner together."""
    return namespace.partition("/")[0] if "/" in namespace else ""


def eviction(entries: Sequence[tuple[KeyT | None, str, int]]) -> KeyT | None:
    """The key that goes first; None if none may go.

    Args:
        entries: keys (None for an entry that has to stay), their owners and sizes, those used longest ago first.
    """
    sizes: Counter[str] = Counter()
    for _, owner, size in entries:
        sizes[owner] += size
    going = [(key, owner) for key, owner, _ in entries if key is not None]
    largest = max((owner for _, owner in going), key=sizes.__getitem__, default=None)
    return next((key for key, owner in going if owner == largest), None)
