"""A real server in a process of its own, that can be looked into: what the trials of the server share.

Run as a program, it is ``forerun serve`` with the same options, and answers each line on stdin by a line of JSON:
``look`` by how many tasks, threads and open files it has, and how much memory; ``steps`` by the times of its steps;
``processor`` by the processor time that it has used.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import httpx

import forerun
from benchmarks.server.servers import free_port
from benchmarks.server.step_times import Step, StepTimes

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template for the bundled model, which has none."""
CHECKOUT = str(Path(__file__).parents[2])
"""Where ``benchmarks`` is found, whatever folder a command was called in."""
PATIENCE = 300.0
"""Seconds that a server may take to start (the first start compiles kernels), and to end."""


def connect(port: int, key: str = "none") -> httpx.AsyncClient:
    """A client of the server at a port of this computer, with as many connections as it wants."""
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        timeout=600,
        limits=httpx.Limits(max_connections=None),
        headers={"Authorization": f"Bearer {key}"},
    )


class ServerProcess:
    """``forerun serve`` with the bundled model, that has a chat template, as long as the ``with`` block lasts.

    Args:
        options: of the command, beside model, name and port.
        log: where its stderr goes; nowhere by default.
        admin_key: that its metrics need, if they do.
    """

    def __init__(self, options: Sequence[str] = (), log: Path | None = None, admin_key: str = "none") -> None:
        self._admin_key = admin_key
        self._folder = tempfile.TemporaryDirectory()
        self.port = free_port()
        model = _with_template(Path(self._folder.name))
        told = ["serve", "--model", str(model), "--name", "bundled", "--port", str(self.port), *options]
        self._log = (log or Path(os.devnull)).open("w")
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server.server_process", *told],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([CHECKOUT, os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._wait_until_ready(started + PATIENCE)
        self.seconds_to_ready = time.monotonic() - started

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            for file in (self.process.stdin, self.process.stdout, self._log):
                if file is not None:
                    file.close()
            self._folder.cleanup()

    def look(self) -> dict[str, Any]:
        """What the process has: see ``_seen``, with the metrics under their names."""
        return dict(self._ask("look")) | self.metrics()

    def steps(self) -> list[Step]:
        """The times of the engine's steps since the last call; the first call starts recording."""
        return [tuple(step) for step in self._ask("steps")]

    def processor_seconds(self) -> float:
        """Processor time that the process has used so far."""
        return float(self._ask("processor"))

    def _ask(self, what: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def metrics(self) -> dict[str, float]:
        """Requests that run and wait, part of the memory for keys and values that is taken, bytes of indexes."""
        wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "index_bytes")
        found = {}
        for line in self.get("/metrics", self._admin_key).splitlines():
            name, _, value = line.removeprefix("forerun:").partition(" ")
            if name in wanted:
                found[name] = float(value)
        return found

    def get(self, address: str, key: str) -> str:
        """What an address answers to who has a key."""
        asked = Request(f"http://127.0.0.1:{self.port}{address}", headers={"Authorization": f"Bearer {key}"})
        with urlopen(asked, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def rest(self) -> dict[str, Any]:
        """What it has once all requests have ended, and idle connections and threads are gone."""
        until = time.monotonic() + PATIENCE
        while any(self.metrics()[f"num_requests_{name}"] for name in ("running", "waiting")):
            assert time.monotonic() < until, f"requests never end: {self.metrics()}"
            time.sleep(0.1)
        time.sleep(12)  # connections idle for 5 seconds, threads that call plain functions for 10
        return self.look()

    def _wait_until_ready(self, until: float) -> None:
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/ready") as answer:
                    if answer.status == 200:
                        return
            except (URLError, ConnectionError):
                time.sleep(0.02)
        self.process.kill()
        raise TimeoutError(f"the server does not start; it ended with {self.process.wait()}")


def _with_template(folder: Path) -> Path:
    source = Path(forerun.__file__).parent / "reference" / "weights" / "target"
    target = folder / "bundled"
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


def _seen() -> dict[str, Any]:
    """Tasks of asyncio, threads, open files, those of kept beginnings of prompts, bytes in memory, and those that the
    C library's allocator has handed out; and, if they are counted, those of Python."""
    import tracemalloc

    tasks = [each for each in _every(asyncio.Task) if not each.done()]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    seen = {"tasks": len(tasks), "threads": threads, "rss": resident, "allocated": _allocated()}
    if tracemalloc.is_tracing():
        top = tracemalloc.take_snapshot().statistics("lineno")[:25]
        seen |= {"python": tracemalloc.get_traced_memory()[0], "top": [str(each) for each in top]}
    files = _open_files()
    beginnings = sum("memfd:forerun" in each for each in files)
    return seen | {"files": len(files) - beginnings, "beginnings": beginnings}


class _Mallinfo(ctypes.Structure):
    """Of the GNU library (mallinfo(3)), over all arenas; the fields' order is all that there is to tell them by."""

    NAMES = (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )  # fmt: skip
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def _allocated() -> int:
    """Bytes in use, in arenas and in mappings of their own; what was freed and is kept is not among them."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


def _open_files() -> list[str]:
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing itself
            found.append(str(one.readlink()))
    return sorted(found)


def _every(kind: type) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _answer() -> None:
    times = StepTimes()
    answers = {"look": _seen, "steps": times.take, "processor": time.process_time}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def main() -> None:
    """Serve, and answer who looks."""
    threading.Thread(target=_answer, daemon=True).start()
    from forerun.cli import main as command

    command()


if __name__ == "__main__":
    main()
