"""Where a token comes from: who drafted it, or that nobody did."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """The source of a token, stored in trees as int8. It explains a text, and decides nothing."""

    TARGET = 0
    """Nobody drafted it: the target chose it."""
    TEXT = 1
    """Found in the request's own text: its prompt, or what was generated so far."""
    EARLIER = 2
    """Found in earlier texts of the request's namespace."""
    MODEL = 3
    """Drafted by a small model."""
    SELF = 4
    """Drafted by the target over a sparse cache."""
    DRAFTER = 5
    """Drafted by one that does not say how."""
    FORCED = 6
    """The only token that a grammar allows."""
    RECYCLED = 7
    """Among the best of the target's logits where the same tokens came before."""
    HEAD = 8
    """Drafted by a trained head."""

    @property
    def word(self) -> str:
        """Its name, for people and programs."""
        return self.name.lower()
