"""What the library logs, as lines on stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class _Stderr(logging.Handler):
    """Writes to the stderr of the moment, which tests exchange."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """Show what Forerun logs inside, from information upwards."""
    logger, handler = logging.getLogger("forerun"), _Stderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
