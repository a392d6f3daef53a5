"""The library's log, as lines on stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class _Stderr(logging.Handler):
    """Writes to the current ``sys.stderr``, which tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """A context that shows Forerun's log from level INFO upwards."""
    logger, handler = logging.getLogger("forerun"), _Stderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
