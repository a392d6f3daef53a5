"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from forerun.cli.options import Raw, option

N = TypeVar("N", int, float)
BENCHMARKS = Path(__file__).parents[1]
"""All benchmarks' sources, which a journal of one is about, too."""


def list_option(flag: str, panel: str, help: str) -> object:  # noqa: A002
    """Return an option that is a comma-separated list."""
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


@dataclass(frozen=True)
class SourceOptions:
    """What tasks are drawn from. Without books, passages come from Python's documentation."""

    raw: Raw = False
    books: Annotated[Path | None, option(panel="Text", help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt} with functions to complete.")] = None


def numbers(name: str, text: str, kind: Callable[[str], N], least: N) -> list[N]:
    """Return the numbers of a comma-separated list; raise a ValueError for another value, or one below ``least``."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be numbers with commas between them") from None
    if min(found) < least:
        raise ValueError(f"{name} is {text!r}; no number may be below {least}")
    return found


def names(name: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return the names of a comma-separated list; raise a ValueError for an unknown one."""
    found = [part.strip() for part in text.split(",")]
    if unknown := [part for part in found if part not in known]:
        raise ValueError(f"{name} has {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return found
