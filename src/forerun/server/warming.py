"""Files that a server learns from before it serves: texts, or JSON lines of answers.

They are checked as a whole first, which takes no model, so that a wrong line is told of at once. Then they are encoded
piece by piece until all is done, or the time for it is over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.server.keys import NAME, Namespaces

LINES = (".jsonl", ".ndjson")
"""What files of JSON lines are called; all others are texts."""

PIECE = 1 << 14
"""Characters that are learned as one output. Old outputs leave a full index whole, and encoding a piece takes some
milliseconds, so the time can be kept."""

FIELDS = ("text", "answer")
"""Where a JSON line has what is learned: ``forerun generate --json`` writes the first; recordings for ``forerun bench
replay`` have the second, beside a ``prompt`` that is not learned."""


@dataclass(frozen=True)
class Passage:
    """A piece of text, the name of the namespace that learns it, and where it stands."""

    text: str
    namespace: str
    file: Path
    line: int


def check_files(files: Iterable[Path], namespaces: int) -> None:
    """Read all files through.

    Args:
        files: to learn from.
        namespaces: of a tenant, at most.

    Raises:
        ValueError: for a line that is not UTF-8 or no row, or one namespace too many: with file and line; or for a file
            with nothing to learn.
        OSError: if a file cannot be read.
    """
    names = Namespaces(namespaces)
    for file in files:
        found = False
        for passage in passages(file):
            found = True
            try:
                names.take("", passage.namespace)
            except ValueError as error:
                raise ValueError(f"{file}:{passage.line} has namespace {passage.namespace!r}: {error}") from None
        if not found:
            raise ValueError(f"{file} has no text to learn from")


def passages(file: Path) -> Iterator[Passage]:
    """What a file has to learn, in pieces; see ``check_files`` for errors."""
    rows = _rows(file) if file.suffix in LINES else _paragraphs(file)
    for text, namespace, line in rows:
        for start in range(0, len(text), PIECE):
            yield Passage(text[start : start + PIECE], namespace, file, line)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}:{number} is not UTF-8 text (byte {error.start} of the line)") from None


def _paragraphs(file: Path) -> Iterator[tuple[str, str, int]]:
    """As many whole lines as make a piece."""
    held: list[str] = []
    size, first = 0, 1
    for number, line in _lines(file):
        if held and size + len(line) > PIECE:
            yield "".join(held), "default", first
            held, size, first = [], 0, number
        held.append(line)
        size += len(line)
    if size:
        yield "".join(held), "default", first


def _rows(file: Path) -> Iterator[tuple[str, str, int]]:
    for number, line in _lines(file):
        if line.strip():
            try:
                yield *_row(json.loads(line)), number
            except (ValueError, TypeError) as error:
                told = f"{file}:{number} is no JSON object with 'text' or 'answer', and perhaps 'namespace': {error}"
                raise ValueError(told) from None


def _row(row: Any) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise TypeError(f"it is a {type(row).__name__}")
    text = next((row[name] for name in FIELDS if name in row), None)
    namespace = row.get("namespace", "default")
    if not isinstance(text, str) or not text:
        raise TypeError("the text is missing, empty, or no string")
    text.encode()  # a lone surrogate is no text
    if not isinstance(namespace, str) or not re.fullmatch(NAME, namespace):
        raise TypeError(f"the namespace does not match {NAME}")
    return text, namespace
