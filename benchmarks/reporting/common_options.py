"""Options that several commands share, among them comma-separated lists; and files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from forerun.cli.options import Raw, flag_of, option

T = TypeVar("T")

PeerPython = Annotated[
    Path | None, option(panel="Compared with", help="The interpreter of the peers' environment; default: this one.")
]


def list_option(panel: str, help: str, *flags: str) -> Any:  # noqa: A002
    return option(*flags, panel=panel, help=f"{help} Commas between.", metavar="LIST")


class Listed(Generic[T]):
    """The values of an option that is a comma-separated list; raises ValueError for a wrong one."""

    def __init__(self, name: str, parse: Callable[[str, str], list[T]]) -> None:
        self.name, self._parse = name, parse

    def __get__(self, options: Any, owner: type) -> list[T]:
        text = None if options is None else getattr(options, self.name)
        return [] if text is None else self._parse(flag_of(self.name), text)


def numbers_of(name: str, kind: Callable[[str], T], least: float) -> Listed[T]:
    """Return the numbers of the option ``name``, none of them below ``least``."""
    return Listed(name, lambda flag, text: numbers(flag, text, kind, least))


def names_of(name: str, known: Collection[str] = ()) -> Listed[str]:
    """Return the names of the option ``name``; any names, if none are ``known``."""

    def names(flag: str, text: str) -> list[str]:
        found = [part.strip() for part in text.split(",")]
        if unknown := [part for part in found if known and part not in known]:
            raise ValueError(f"{flag} has {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
        return found

    return Listed(name, names)


@dataclass(frozen=True)
class ListOptions:
    """Options whose lists are checked at once."""

    def __post_init__(self) -> None:
        for owner in type(self).__mro__:
            for each in vars(owner).values():
                if isinstance(each, Listed):
                    each.__get__(self, owner)


@dataclass(frozen=True)
class SourceOptions:
    """What tasks are drawn from. Without books, passages come from Python's documentation."""

    raw: Raw = False
    books: Annotated[Path | None, option(panel="Text", help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt} with functions to complete.")] = None


def numbers(flag: str, text: str, kind: Callable[[str], T], least: float) -> list[T]:
    """Return the numbers of a comma-separated list; raise ValueError for another value, or one below ``least``."""
    try:
        found: list[Any] = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}; it must be numbers with commas between them") from None
    if min(found) < least:
        raise ValueError(f"{flag} is {text!r}; no number may be below {least}")
    return found


def json_lines(file: Path, option: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line that is not blank; ``option`` named the file. Raise ValueError if
    there is none, or with the first line that is not JSON."""
    if not file.is_file():
        raise ValueError(f"{option or 'a file'} is {file}; there is no such file")
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            place = f"{option} {file}, line {number}".lstrip()
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place} is no JSON: {error}") from None
