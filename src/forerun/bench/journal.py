"""A journal of measured turns, so that a bench of several hours can be stopped and resumed.

A turn is one round of all contestants over the same rows, saved completely or not at all, so that runs are comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import forerun
from forerun.bench.machine import machine
from forerun.core.compiling import sources
from forerun.models.loading.load import find

Turn = dict[str, dict[str, Any]]
"""Each contestant's run as plain values, by name."""


class TurnKey(NamedTuple):
    """Identifies a turn."""

    task: str
    round: int
    rows: str

    @classmethod
    def of(
        cls,
        task: str,
        round_: int,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        seen: Sequence[Sequence[int]] = (),
    ) -> TurnKey:
        """Make the key of a round from all that changes its result, including prompts answered before (``seen``)."""
        words = json.dumps([max_new_tokens, list(map(list, rows)), list(map(list, seen))]).encode()
        return cls(task, round_, hashlib.sha256(words).hexdigest()[:16])


def about(model: str, dtype: str, device: str, *code: Path) -> dict[str, Any]:
    """Return what all turns of a bench share: machine, model, and software with its sources and those in ``code``."""
    root, place = Path(forerun.__file__).parent, find(model)
    data = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(root.rglob("*.npy"))]
    digests = [*(sources(folder) for folder in (root, *code)), *data]
    files = [place] if place.is_file() else [file for file in sorted(place.rglob("*")) if file.is_file()]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return machine() | {
        "model": model, "dtype": dtype, "model_device": device,
        "sources": _short("".join(digests)), "model_files": _short(json.dumps(stats)),
    }  # fmt: skip


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The turns in a file of JSON lines. ``about``: values that must be equal for turns to be comparable. ``resume``
    keeps the turns of an existing file, and raises ValueError if it is no journal, or about other values."""

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool = False) -> None:
        self._path = path
        self._turns: dict[TurnKey, Turn] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read(json.loads(json.dumps(about)))
        else:
            path.write_text(json.dumps({"about": dict(about)}) + "\n")

    def find(self, key: TurnKey, contestants: Sequence[str]) -> Turn | None:
        """Return a saved turn, if it has all of these contestants."""
        turn = self._turns.get(key, {})
        return {name: turn[name] for name in contestants} if set(contestants) <= set(turn) else None

    def add(self, key: TurnKey, turn: Turn) -> None:
        """Save a turn, replacing one with this key and other contestants."""
        self._turns[key] = turn
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "turn": turn}) + "\n")

    def _read(self, about: Mapping[str, Any]) -> None:
        text = self._path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        if not text.endswith("\n"):  # the process ended while writing a line
            self._path.write_text("".join(f"{line}\n" for line in lines))
        try:
            before = json.loads(lines[0])["about"]
            for line in lines[1:]:
                entry = json.loads(line)
                self._turns[TurnKey(*entry["key"])] = dict(entry["turn"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{self._path} is not a bench's journal ({error}); give another --out") from error
        for name in {*before, *about}:
            if before.get(name) != about.get(name):
                raise ValueError(
                    f"{self._path} was measured with {name} {before.get(name)!r} and this is {about.get(name)!r}; "
                    "give another --out, or leave out --resume to start again"
                )
