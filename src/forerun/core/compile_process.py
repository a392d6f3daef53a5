"""Background processes that compile code for later runs."""

from __future__ import annotations

import os
import subprocess
import sys

NICENESS = 5
"""Priority of these processes: the model's passes come first."""


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Run a module of this package in a process that outlives this one, so that later processes find more code."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


def step_back() -> None:
    """Lower this process's priority."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
