"""The library's log on stderr: bare lines for commands; time, level and request for a server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import typer

SERVER_LOGGERS = ("uvicorn", "asyncio")
"""Other libraries' loggers whose warnings a server shows."""


class _StderrHandler(logging.Handler):
    """A handler that writes to the current ``sys.stderr``, which tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


class _ServerFormatter(logging.Formatter):
    """A formatter of time, level, request id and message, as a line or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        from forerun.server.middleware import request_id

        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        if not self._as_json:
            return f"{time} {record.levelname} {request_id.get()} {super().format(record)}"
        line = {"time": time, "level": record.levelname, "request": request_id.get(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def shown_log() -> Iterator[None]:
    """Show Forerun's log from level INFO within this context."""
    logger, handler = logging.getLogger("forerun"), _StderrHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def server_log(as_json: bool) -> Iterator[None]:
    """Format the lines of ``shown_log`` for a server within this context, optionally as JSON."""
    shown = [each for each in logging.getLogger("forerun").handlers if isinstance(each, _StderrHandler)]
    others = [logging.getLogger(name) for name in SERVER_LOGGERS]
    for handler in shown:
        handler.setFormatter(_ServerFormatter(as_json))
        for logger in others:
            logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in shown:
            handler.setFormatter(None)
            for logger in others:
                logger.removeHandler(handler)
