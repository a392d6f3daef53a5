"""Peak memory of a call, beyond what was in use before it.

On CUDA it is torch's allocated memory. Elsewhere it is the process's resident memory, whose peak Linux records and
resets on request. Linux counts it in pages and with some delay per thread, so some hundred KB are noise.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from forerun.bench.rounds import Contestant, Tokens
from forerun.core.memory import give_back

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to ``clear_refs``, makes the kernel reset the peak (proc(5))."""


def why_not(device: torch.device) -> str:
    """Why peaks cannot be measured here; empty if they can."""
    if device.type == "cuda":
        return ""
    try:
        RESET.write_text(RESET_PEAK)
        _status("VmHWM")
    except (OSError, StopIteration):
        return "the system does not reset the peak of resident memory (Linux does)"
    return ""


def peaks(
    contestants: Mapping[int, Contestant], prompt: Tokens, max_new_tokens: int, rounds: int, device: torch.device
) -> dict[int, list[int]]:
    """Peaks of continuing a prompt, in turns, after a warm-up; what contestants know beforehand is not counted."""
    found: dict[int, list[int]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, one in contestants.items():
            one.prepare()
            peak = peak_bytes(functools.partial(one.run, [prompt], max_new_tokens), device)
            if turn:
                found[name].append(peak)
    return found


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``run`` takes beyond what is in use before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return int(torch.cuda.max_memory_allocated(device)) - before
    gc.collect()
    give_back()  # so that it counts again when it is used again
    before = _status("VmRSS")
    RESET.write_text(RESET_PEAK)
    run()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """Bytes, from the kernel's lines of ``name: 123 kB``."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
