"""What users can cause ends in one line on stderr and exit status 2; a bug ends in its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


@contextmanager
def user_errors(debug: bool = False) -> Iterator[None]:
    """Turn errors of users into an exit; with ``debug`` they are raised as they are."""
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
    """An error's message without line breaks; that of a file names the file first."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    return " ".join(message.split()) or type(error).__name__


def close_quietly() -> None:
    """Nobody reads stdout any more: let what is still buffered go nowhere instead of failing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
