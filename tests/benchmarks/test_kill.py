"""The trial that kills servers finds the warnings of a log as the server writes it, and no log without levels
passes."""

from __future__ import annotations

import logging

import pytest

from benchmarks.server.kill import warnings_in
from forerun.cli.log import _ServerFormatter


def line(level: int, message: str) -> str:
    return _ServerFormatter(as_json=False).format(logging.LogRecord("forerun", level, "x", 1, message, (), None))


def test_warnings_errors_and_tracebacks_are_found() -> None:
    log = [
        line(logging.INFO, "ready"),
        line(logging.WARNING, "a file is broken"),
        line(logging.ERROR, "no"),
        "Traceback",
    ]
    assert warnings_in("\n".join(log)) == log[1:]
    assert warnings_in("loading\n" + log[0]) == []


def test_a_log_without_levels_is_an_error() -> None:
    with pytest.raises(ValueError, match="no line of the server's log has a time and a level"):
        warnings_in("a file is broken\n")
