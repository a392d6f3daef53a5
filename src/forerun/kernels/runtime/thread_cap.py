"""Cap torch's threads at the cores that this process may use."""

from __future__ import annotations

import logging

import torch

from forerun.core.cpu_limit import usable_cores

log = logging.getLogger(__name__)


def cap_threads() -> None:
    """Lower torch's number of threads to ``usable_cores``: torch respects the affinity mask, but no quota."""
    threads, cores = torch.get_num_threads(), usable_cores()
    if threads > cores:
        log.info("%d threads instead of %d: this process has a CPU quota of %d cores", cores, threads, cores)
        torch.set_num_threads(cores)
