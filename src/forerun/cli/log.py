"""What the library logs, as lines on stderr."""

from __future__ import annotations

import logging

import typer


class _Stderr(logging.Handler):
    """Writes to the stderr of the moment, which tests exchange."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


def show_log() -> None:
    """Show what Forerun logs, from information upwards."""
    logger = logging.getLogger("forerun")
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
        logger.setLevel(logging.INFO)
