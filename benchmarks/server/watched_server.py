"""``forerun serve`` with the bundled model, that states the times of its steps.

As a program, it is ``forerun serve`` with the given options, and answers each line on stdin by a line of JSON:
``steps`` by the times of its steps since the last call, ``processor`` by its processor seconds so far.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.server.servers import running
from forerun.reference import bundled

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template for the bundled model, which has none."""
PARTS = ("computing", "waiting for a processor", "waiting otherwise", "between steps", "delivery")
"""Of a gap between chunks: the decoding thread's processor time in steps; its wait for a processor (Linux alone tells);
the rest of these steps, waiting for a lock or a thread; the time without a step; and the change in the delivery's
time."""
SLOWEST = 0.01  # the share of gaps whose parts are reported
Step = tuple[float, float, float, float, int, int]
"""Beginning, end, processor seconds, seconds in a processor's queue, waits for locks, preemptions."""


class WatchedServer:
    """A running server; see ``watched``."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process, self.url = process, url

    def steps(self) -> list[Step]:
        """Return the engine's steps since the last call; the first call starts recording."""
        return [tuple(step) for step in self._ask("steps")]

    def processor_seconds(self) -> float:
        return float(self._ask("processor"))

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def watched(options: Sequence[str], log: Path) -> Iterator[WatchedServer]:
    """Yield a server of the bundled model with a chat template; ``options`` are of ``forerun serve``."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bundled"
        shutil.copytree(bundled("target"), model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        program = [sys.executable, "-m", "benchmarks.server.watched_server", "serve"]
        command = [*program, "--model", str(model), "--name", "bundled", *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with running("forerun serve", command, log, **pipes) as (process, url):
            yield WatchedServer(process, url)


class StepTimes:
    """Records the steps of this process's engines from the first call of ``take``."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._watching = False

    def take(self) -> list[Step]:
        if not self._watching:
            self._watching = True
            self._watch()
        taken, self._steps = self._steps, []
        return taken

    def _watch(self) -> None:
        from forerun.engine.batch import Batch

        step, clocks = Batch.step, threading.local()

        def timed(batch: Batch, *args: Any) -> Any:
            if (in_queue := getattr(clocks, "queue", None)) is None:
                in_queue = clocks.queue = QueueClock()
            began, cpu, before, queued = (
                time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD), in_queue()
            )  # fmt: skip
            try:
                return step(batch, *args)
            finally:
                used, queued, after = (
                    time.thread_time() - cpu, in_queue() - queued, resource.getrusage(resource.RUSAGE_THREAD)
                )  # fmt: skip
                waits, preemptions = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
                # the clock last: a busy computer preempts at a system call such as those above
                self._steps.append((began, time.perf_counter(), used, queued, waits, preemptions))

        Batch.step = timed  # type: ignore[method-assign, assignment]


class QueueClock:
    """Seconds that the calling thread has waited for a processor so far; 0 where the system does not count them.

    The file stays open, and is read without releasing Python's lock: a step that waits for it after each reading would
    be longer for being measured.
    """

    def __init__(self) -> None:
        self._read = ctypes.PyDLL(None).pread
        self._buffer = ctypes.create_string_buffer(128)
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def __call__(self) -> float:
        size = self._read(self._file, self._buffer, len(self._buffer), ctypes.c_long(0))
        return int(self._buffer.raw[:size].split()[1]) / 1e9 if size > 0 else 0.0


def gap_parts(chunks: Sequence[float], steps: Sequence[Step]) -> list[dict[str, float]]:
    """Return the parts of each gap between chunks (``PARTS``), which add up to it, and counts of its steps."""
    ends, found = [step[1] for step in steps], []
    for before, after in pairwise(chunks):
        first, last = bisect_right(ends, before), bisect_right(ends, after)
        if not first:
            continue
        inside = steps[first:last]
        computing, queued, waits, preemptions = (sum(step[place] for step in inside) for place in range(2, 6))
        stepping, span = sum(step[1] - step[0] for step in inside), ends[last - 1] - ends[first - 1]
        parts = computing, queued, stepping - computing - queued, span - stepping, after - before - span
        counts = {"steps": len(inside), "waits": waits, "preemptions": preemptions}
        found.append({"seconds": after - before, **dict(zip(PARTS, parts, strict=True)), **counts})
    return found


def slowest(streams: Sequence[Sequence[float]], steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean parts of the slowest gaps of streams, given by the times of their chunks."""
    gaps = sorted((gap for chunks in streams for gap in gap_parts(chunks, steps)), key=lambda gap: gap["seconds"])
    last = gaps[-max(1, round(SLOWEST * len(gaps))) :]
    return {name: sum(gap[name] for gap in last) / len(last) for name in (last[0] if last else ())}


def _answer() -> None:
    answers = {"steps": StepTimes().take, "processor": time.process_time}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


if __name__ == "__main__":
    threading.Thread(target=_answer, daemon=True).start()
    from forerun.cli import main

    main()
