"""Turns that were measured, kept in a file as they are done, so that a bench of hours can be ended and gone on with.

A turn is one round of all contestants over the same rows. It is kept whole or not at all: its contestants are compared
with each other, so they must have run side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Turn = dict[str, dict[str, Any]]
"""A run of each contestant, by name, as plain values."""


class Key(NamedTuple):
    """What a turn is found by."""

    task: str
    round: int
    rows: str

    @classmethod
    def of(cls, task: str, round_: int, rows: Sequence[Sequence[int]], max_new_tokens: int) -> Key:
        """The key of a round over these rows; other rows or another number of new tokens are another turn."""
        words = json.dumps([max_new_tokens, list(map(list, rows))]).encode()
        return cls(task, round_, hashlib.sha256(words).hexdigest()[:16])


class Journal:
    """The turns in a file of JSON lines.

    Args:
        path: of the file; its folder is made.
        about: what must be equal for turns to be comparable, as plain values: the model, the machine.
        resume: keep the turns that are in the file, if there is one; otherwise it begins anew.

    Raises:
        ValueError: if the file that is to be gone on with is of something else, or is no journal.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool = False) -> None:
        self._path = path
        self._turns: dict[Key, Turn] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read(json.loads(json.dumps(about)))
        else:
            path.write_text(json.dumps({"about": dict(about)}) + "\n")

    def find(self, key: Key, contestants: Sequence[str]) -> Turn | None:
        """A turn, if it is there with all of these contestants."""
        turn = self._turns.get(key, {})
        return {name: turn[name] for name in contestants} if set(contestants) <= set(turn) else None

    def add(self, key: Key, turn: Turn) -> None:
        """Keep a turn that was measured; it takes the place of one with other contestants."""
        self._turns[key] = turn
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "turn": turn}) + "\n")

    def _read(self, about: Mapping[str, Any]) -> None:
        text = self._path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        if not text.endswith("\n"):  # it was ended while it wrote
            self._path.write_text("".join(f"{line}\n" for line in lines))
        try:
            before = json.loads(lines[0])["about"]
            for line in lines[1:]:
                found = json.loads(line)
                self._turns[Key(*found["key"])] = dict(found["turn"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{self._path} is not a bench's journal ({error}); give another --out") from error
        for name in {*before, *about}:
            if before.get(name) != about.get(name):
                raise ValueError(
                    f"{self._path} was measured with {name} {before.get(name)!r} and this is {about.get(name)!r}; "
                    "give another --out, or leave out --resume to begin anew"
                )
