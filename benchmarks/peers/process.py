"""A peer's process, seen from this side: orders go through pipes, and times are measured over there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from forerun.bench.rounds import Contestant, Rows, Run

TAIL = 400  # the most characters of a peer's last output that an error quotes


ROOT = Path(__file__).parents[2]


class PeerError(ChildProcessError):
    """A peer cannot be loaded, or failed; the message quotes it."""


class Peer:
    """An engine in a process: the ``Engine`` of ``module`` with these options, by another environment's ``python``.

    Raises:
        PeerError: if the engine cannot be loaded.
    """

    def __init__(self, module: str, options: dict[str, Any], python: str = sys.executable) -> None:
        self._module = module
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.child", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_path(python))},
        )  # fmt: skip
        try:
            self.said = str(self._ask(options)["said"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def contestant(self) -> Contestant:
        return Contestant(self.run, self.forget)

    def run(self, rows: Rows, max_new_tokens: int) -> Run:
        if len(rows) != 1:
            raise ValueError(f"peers are measured with one row at a time, not with {len(rows)}")
        try:
            found = self.call("generate", ids=list(rows[0]), new=max_new_tokens)
        except PeerError as error:
            raise PeerError(f"{self._module}: {error}") from None
        text = found["tokens"] if "tokens" in found else found["text"]
        return Run([text], float(found["seconds"]), None, int(found["count"]), first=found["first"])

    def forget(self) -> None:
        self.call("forget")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the engine; return its result, and its ``seconds``."""
        return self._ask({"call": method, "given": given})

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(" ".join(str(found["error"]).split()))
        return found

    def _last_words(self) -> str:
        self._log.seek(0)
        words = " ".join(self._log.read().split())[-TAIL:]
        return f"its process ended with status {self._process.wait()}: {words}"


def _path(python: str) -> list[str]:
    """Return where a peer finds modules: as here, or in another environment only these benchmarks."""
    return [path for path in sys.path if path] if python == sys.executable else [str(ROOT)]


def check_python(python: Path | None) -> None:
    """Raise ValueError for an interpreter that is not there."""
    if python is not None and not python.is_file():
        raise ValueError(f"--peer-python is {python}; it must be an environment's interpreter, such as env/bin/python")
