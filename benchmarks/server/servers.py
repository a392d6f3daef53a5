"""Servers to compare, each in a process of its own, on a free port of this computer, one at a time."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.server.client import ServerEndpoint
from forerun.models.forward.architecture import STORED, STORED_BY_FLOATS

PORTS = range(20_001, 32_768)
"""Where servers listen. Lower ones are likely somebody else's. Higher ones Linux gives to connections, so one that is
free now may be taken until the server listens."""
STARTING = 900.0
"""Seconds that a server may take until it answers: a large model is read, and kernels are compiled the first time."""
ENDING = 20.0
"""Seconds that a server may take to end before it is killed."""
TAIL = 400
"""The most characters of a server's last output that an error quotes."""
MANY = 1 << 20
"""Namespaces that Forerun's server may keep apart: each load has one of its own."""
TRANSFORMERS = "transformers serve"
LLAMA = "llama-server"
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
"""What ``transformers serve`` imports beyond transformers."""


class ServerError(ChildProcessError):
    """A server does not start, or does not answer; the message quotes it."""


@dataclass(frozen=True)
class ServedModel:
    """What is served.

    Attributes:
        model: as ``forerun serve`` is told.
        folder: where its files are.
        dtype: of its weights, see ``dtype_name``.
        device: as torch names it.
        chats: asked through its chat template.
        trust_remote_code: run code that comes with it.
    """

    model: str
    folder: Path
    dtype: str
    device: str
    chats: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ServerContestant:
    """A server that can be started.

    Attributes:
        name: in tables.
        command: starts it, but for the port.
        model: what it calls the model.
        ours: it is Forerun's.
        lacking: why it cannot be started here, or None.
        encode: see ``ServerEndpoint``.
    """

    name: str
    command: Sequence[str]
    model: str
    ours: bool
    lacking: str | None = None
    encode: Callable[[str], list[int]] | None = None


def forerun(subject: ServedModel, drafter: str | None, replicas: int | None = None) -> ServerContestant:
    """``forerun serve`` with a drafter, None for its default; by so many replicas on Ray, None for no Ray."""
    command = [sys.executable, "-m", "forerun.cli", "serve", "--model", subject.model, "--name", "measured"]
    floats = subject.dtype == STORED_BY_FLOATS
    command += ["--dtype", STORED, "--activations", "float32"] if floats else ["--dtype", subject.dtype]
    command += ["--device", subject.device, "--host", "127.0.0.1", "--no-page"]
    command += ["--namespaces", str(MANY)]
    command += ["--trust-remote-code"] * subject.trust_remote_code
    command += [] if drafter is None else ["--drafter", drafter]
    command += [] if replicas is None else ["--ray", "--replicas", str(replicas)]
    names = ["forerun", *([] if drafter is None else [drafter]), *([] if replicas is None else [f"x {replicas}"])]
    return ServerContestant(" ".join(names), command, "measured", True)


def transformers(subject: ServedModel) -> ServerContestant:
    """``transformers serve`` with continuous batching, on the same files in the same type."""
    model = str(subject.folder)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--continuous-batching"]
    command += ["--dtype", subject.dtype, "--device", subject.device, "--host", "127.0.0.1"]
    command += ["--trust-remote-code"] * subject.trust_remote_code
    return ServerContestant(TRANSFORMERS, command, model, False, why_not(subject))


def llama(
    subject: ServedModel, file: Path, slots: int, positions: int, threads: int, encode: Callable[[str], list[int]]
) -> ServerContestant:
    """llama.cpp's server over a GGUF file of the same weights, keys and values in their type. The file has no template
    and no rules of how to split a text, so prompts come as token ids.

    Args:
        subject: the model.
        file: the GGUF file.
        slots: texts at once.
        positions: tokens of a text at its longest, its prompt included.
        threads: as many as Forerun has.
        encode: makes a prompt's ids.
    """
    command = [sys.executable, "-m", "benchmarks.server.llama_server", str(file), "--dtype", subject.dtype]
    command += ["--slots", str(slots), "--context", str(slots * positions), "--threads", str(threads)]
    return ServerContestant(LLAMA, command, "measured", False, encode=encode)


def why_not(subject: ServedModel) -> str | None:
    """Why ``transformers serve`` cannot serve this here; None if it may."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if (
        importlib.util.find_spec("transformers.cli") is None
        or importlib.util.find_spec("transformers.cli.serve") is None
    ):
        return "this version of transformers has no such command"
    if missing:
        return f"{', '.join(missing)} not installed (pip install 'transformers[serving]')"
    if subject.folder.is_file():
        return "it does not read a GGUF file from this computer"
    return None


@contextmanager
def started(contestant: ServerContestant, chats: bool, log: Path) -> Iterator[ServerEndpoint]:
    """A context with a server that answers.

    Args:
        contestant: which.
        chats: ask it through the model's template.
        log: takes what it prints; its folder is made.

    Raises:
        ServerError: if it ends, or does not answer in ``STARTING`` seconds.
    """
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*contestant.command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(os.environ),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(contestant.name, process, url, log)
            exact = contestant.ours and _exact(url)
            yield ServerEndpoint(url, contestant.model, chats, contestant.ours, exact, contestant.encode)
        finally:
            _end(process)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """A server's environment: as here, without what would change its settings, and with the same packages."""
    kept = {name: value for name, value in given.items() if not name.startswith("FORERUN_")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def free_port() -> int:
    """A port that nobody uses now.

    Raises:
        OSError: if there is none.
    """
    first = os.getpid() % len(PORTS)
    ports: list[int] = [*PORTS[first:], *PORTS[:first]]
    for port in ports:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise OSError(f"there is no free port from {PORTS[0]} to {PORTS[-1]}")


def _wait(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerError(f"{name} ended with status {process.returncode}: {_last_words(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise ServerError(f"{name} does not answer after {STARTING:.0f} seconds: {_last_words(log)}")


def _exact(url: str) -> bool:
    """Whether Forerun's server promises texts bit for bit."""
    (model,) = httpx.get(f"{url}/v1/models", timeout=5.0).json()["data"]
    return bool(model["forerun"]["exactness"] == "bitwise")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-TAIL:]
