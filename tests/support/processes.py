"""For tests that start processes."""

import faulthandler
import mmap
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path


def resident() -> int:
    """Bytes of this process's memory that are not swapped out or given back."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def heed_interrupts() -> None:
    """A process started by one that runs in the background would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fork(work: Callable[[], bool]) -> int:
    """Start a forked process, which has all imports already, and return its id; its status is 0 if ``work`` is true."""
    if (child := os.fork()) == 0:
        done = False
        try:
            faulthandler.disable()  # a process that is to crash need not tell of it
            done = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(not done)
    return child


def status_of_a_child(work: Callable[[], bool]) -> int:
    """Return the status of a forked process that did ``work``."""
    return os.waitpid(fork(work), 0)[1]
