"""What a server takes on at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a scheduler takes on.

    Attributes:
        memory: bytes of keys and values of all running requests, at most; an engine's ``tiers`` have their own limits.
        rows: requests that run at once, at most.
        waiting: requests that wait, at most.
        step: tokens of texts that a step reads, at most; see ``Batch``.

    Raises:
        ValueError: for a limit under 1 (``waiting``: under 0).
    """

    memory: int
    rows: int = 16
    waiting: int = 128
    step: int = 256

    def __post_init__(self) -> None:
        for name, least in (("memory", 1), ("rows", 1), ("waiting", 0), ("step", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
