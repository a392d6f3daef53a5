"""Settings of the drafts for other engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DraftSettings:
    """What drafts are drawn from, who shares them, and how likely a token must be; wrong values raise ValueError.

    Attributes:
        namespace: the outputs to draft from and add to, by their name in the trie file.
        share: whether requests draft from each other's outputs. Without it, each drafts from its own tokens only.
        trie: a file to load, if it exists, and to save to; None saves nothing.
        save_seconds: delay from a change to its save; 0 only reads the file.
        vocabulary: a name for what the token ids mean; files with another name are refused, and an empty name fits any.
        capacity: bytes for shared outputs; when full, the oldest are dropped.
        least_probability: minimum estimated probability that the last drafted token is accepted.
    """

    namespace: str = ""
    share: bool = True
    trie: Path | None = None
    save_seconds: float = 60.0
    vocabulary: str = ""
    capacity: int = 1 << 26
    least_probability: float = 0.05

    def __post_init__(self) -> None:
        for name in ("namespace", "vocabulary"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), str), "a string")
        _require("share", self.share, isinstance(self.share, bool), "true or false")
        _require("save_seconds", self.save_seconds, _between(self.save_seconds, 0, 1e6), "0 to 1e6 seconds")
        integral = isinstance(self.capacity, int)
        _require(
            "capacity", self.capacity, integral and _between(self.capacity, 1 << 16, 1 << 36), "2**16 to 2**36 bytes"
        )
        _require("least_probability", self.least_probability, _between(self.least_probability, 0, 1), "0 to 1")
        if self.trie is not None:
            _require("trie", self.trie, isinstance(self.trie, str | os.PathLike) and bool(str(self.trie)), "a path")
            object.__setattr__(self, "trie", Path(self.trie))
            self._check_file(Path(self.trie))

    def _check_file(self, file: Path) -> None:
        _require("share", self.share, self.share, "true, where a trie file keeps what is shared")
        _require("trie", str(file), not file.is_dir(), "a file, and this is a folder")
        if self.save_seconds:
            writable = os.access(file.absolute().parent, os.W_OK | os.X_OK)
            _require("trie", str(file), writable, "a file in a folder that exists and can be written")
        else:
            _require("trie", str(file), file.exists(), "a file that exists, as save_seconds is 0")

    @classmethod
    def from_values(cls, values: object, **defaults: Any) -> DraftSettings:
        """Make settings from a user's values, as from JSON; raise ValueError for an unknown name or wrong value."""
        if not isinstance(values, Mapping):
            raise ValueError(f"Forerun's settings are {values!r}; allowed: an object of names and values")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"Forerun has no setting {name!r}; allowed: {', '.join(known)}")
        return cls(**(defaults | dict(values)))


def checked_length(name: str, length: object) -> int:
    """Return the draft length in tokens; raise ValueError unless it is 1 to 1024."""
    if not isinstance(length, int) or not 1 <= length <= 1024:
        raise ValueError(f"{name} is {length!r}; allowed: 1 to 1024")
    return length


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
