"""What the options of several commands share: lists, choices, texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from forerun.cli.options import Raw, option

N = TypeVar("N", int, float)
BENCHMARKS = Path(__file__).parents[1]
"""All benchmarks' sources, which a journal of one is about, too."""


def list_option(flag: str, panel: str, help: str) -> object:  # noqa: A002
    """An option that is a comma-separated list."""
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


Text = Annotated[
    list[Path] | None,
    option(
        "--text", panel="Text", help="A text file or a folder of .txt and .md files; may be repeated. Else invented."
    ),
]


Contexts = Annotated[str, list_option("--contexts", "Text", "Prompt tokens.")]
Temperatures = Annotated[str, list_option("--temperatures", "Text", "0 is greedy.")]
Yarn = Annotated[
    float | None, option("--yarn", panel="Model", metavar="FACTOR", help="Factor on the model's positions, by YaRN.")
]
ContextPrompts = Annotated[int, option("--prompts", panel="Text", help="For each context.", min=1)]
Needles = Annotated[int, option("--needles", panel="Text", help="Facts asked from one text.", min=1)]
GeneratedTokens = Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per text.", min=2)]


@dataclass(frozen=True)
class SourceOptions:
    """What tasks are drawn from. Without books, passages come from Python's documentation."""

    raw: Raw = False
    books: Annotated[Path | None, option(panel="Text", help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[Path | None, option(panel="Text", help="JSON lines of {prompt} with functions to complete.")] = None


def numbers(name: str, text: str, kind: Callable[[str], N], least: N) -> list[N]:
    """The numbers of a comma-separated list.

    Raises:
        ValueError: with the option's name, for anything else or a number below ``least``.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be numbers with commas between them") from None
    if min(found) < least:
        raise ValueError(f"{name} is {text!r}; no number may be below {least}")
    return found


def names(name: str, text: str, known: tuple[str, ...]) -> list[str]:
    """The names of a comma-separated list.

    Raises:
        ValueError: with the option's name, for an unknown name.
    """
    found = [part.strip() for part in text.split(",")]
    if unknown := [part for part in found if part not in known]:
        raise ValueError(f"{name} has {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return found


def check_yarn(factor: float | None) -> None:
    """Refuse a factor that does not stretch.

    Raises:
        ValueError: if it is not above 1.
    """
    if factor is not None and not factor > 1:
        raise ValueError(f"--yarn is {factor:g}; it must be above 1")


def check_positions(length: int, more: int, limit: int | None) -> None:
    """Check that a model can take the longest text and what follows it, before anything is read.

    Raises:
        ValueError: if it cannot; says what to do.
    """
    if limit is not None and length + more > limit:
        raise ValueError(
            f"a context of {length:,} tokens and {more:,} that follow need {length + more:,} positions, and the model "
            f"has {limit:,}; give a shorter context, or --yarn {math.ceil((length + more) / limit)} if the model was "
            "not stretched yet"
        )
