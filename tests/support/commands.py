"""Commands of Forerun in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.processes import heed_interrupts


@contextmanager
def start(*arguments: object, **more: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command that does not outlive its test."""
    command = [sys.executable, "-m", "forerun.cli", *map(str, arguments)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heed_interrupts}
    with subprocess.Popen(command, **{**how, "env": os.environ | {"OMP_NUM_THREADS": "1"}, **more}) as process:
        try:
            yield process
        finally:
            process.kill()
