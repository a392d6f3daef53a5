"""Which source drafted a token."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """The source of a token, stored in trees as int8. It informs, and never decides."""

    TARGET = 0
    """Chosen by the target, not drafted."""
    TEXT = 1
    """Found in the request's prompt or output."""
    EARLIER = 2
    MODEL = 3
    SELF = 4
    """Drafted by the target over a sparse cache."""
    DRAFTER = 5
    """Drafted by a source of unknown kind."""
    FORCED = 6
    """The only token that a grammar allows."""
    RECYCLED = 7
    """Among the target's top logits when the same tokens came before."""
    HEAD = 8

    @property
    def word(self) -> str:
        return self.name.lower()
