"""Processes that compile what this one does not need yet."""

from __future__ import annotations

import os
import subprocess
import sys

NICENESS = 5
"""Of the processes: the model's passes come first."""


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a module of this package in a process that goes on when this one ends, so that the next one finds more."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


def step_back() -> None:
    """Let other processes of this machine come first."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
