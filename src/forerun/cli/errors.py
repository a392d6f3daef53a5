"""Errors that users cause become one line on stderr and exit status 2; bugs show a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


@contextmanager
def user_errors(debug: bool = False) -> Iterator[None]:
    """A context that turns errors caused by users into an exit; with ``debug`` they are raised unchanged."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        close_quietly()
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, NotImplementedError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(USER_ERROR) from None


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; for file errors it begins with the file."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    return " ".join(message.split()) or type(error).__name__


def close_quietly() -> None:
    """Discard buffered output when stdout's reader is gone, instead of failing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
