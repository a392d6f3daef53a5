"""Servers, each a separate process on a free port of this computer."""

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
from typing import Any

import httpx

from benchmarks.server.client import ServerEndpoint
from forerun.models.forward.architecture import STORED, STORED_BY_FLOATS

PORTS = range(20_001, 32_768)  # lower ports are likely taken; higher ones Linux gives to connections
STARTING = 900.0  # maximum seconds to start: a large model is loaded, and kernels are compiled the first time
ENDING = 20.0  # seconds to end before a server is killed
QUOTED = 400  # maximum characters of a server's last output that an error quotes
MANY = 1 << 20  # namespaces of Forerun's server: each load has a separate one
TRANSFORMERS, LLAMA = "transformers serve", "llama-server"
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")  # what transformers serve imports beyond transformers
CHECKOUT = str(Path(__file__).parents[2])


class ServerError(ChildProcessError):
    """A server does not start, or does not answer; the message quotes it."""


@dataclass(frozen=True)
class ServedModel:
    """What is served: ``model`` as ``forerun serve`` is told, in ``folder``; ``dtype`` see ``dtype_name``."""

    model: str
    folder: Path
    dtype: str
    device: str
    chats: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ServerContestant:
    """A server: the command that starts it, except for the port; the model's name in requests; why it is ``lacking``
    here, if so; and ``encode``, see ``ServerEndpoint``."""

    name: str
    command: Sequence[str]
    model: str
    ours: bool
    lacking: str | None = None
    encode: Callable[[str], list[int]] | None = None


def forerun(subject: ServedModel, drafter: str | None, replicas: int | None = None) -> ServerContestant:
    """Return ``forerun serve`` with a drafter, None for its default; with ``replicas``, on Ray."""
    floats = subject.dtype == STORED_BY_FLOATS
    command = [
        sys.executable, "-m", "forerun.cli", "serve", "--model", subject.model, "--name", "measured",
        *(("--dtype", STORED, "--activations", "float32") if floats else ("--dtype", subject.dtype)),
        "--device", subject.device, "--host", "127.0.0.1", "--no-page", "--namespaces", str(MANY),
        *["--trust-remote-code"] * subject.trust_remote_code,
        *([] if drafter is None else ["--drafter", drafter]),
        *([] if replicas is None else ["--ray", "--replicas", str(replicas)]),
    ]  # fmt: skip
    names = ["forerun", *([] if drafter is None else [drafter]), *([] if replicas is None else [f"x {replicas}"])]
    return ServerContestant(" ".join(names), command, "measured", True)


def transformers(subject: ServedModel) -> ServerContestant:
    """Return ``transformers serve`` with continuous batching, on the same files in the same type."""
    model = str(subject.folder)
    command = [
        sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--continuous-batching",
        "--dtype", subject.dtype, "--device", subject.device, "--host", "127.0.0.1",
        *["--trust-remote-code"] * subject.trust_remote_code,
    ]  # fmt: skip
    return ServerContestant(TRANSFORMERS, command, model, False, why_not(subject))


def llama(
    subject: ServedModel, file: Path, slots: int, positions: int, threads: int, encode: Callable[[str], list[int]]
) -> ServerContestant:
    """Return llama.cpp's server over a GGUF file of equal weights, with ``slots`` sequences of ``positions`` tokens at
    once. The file has neither a template nor the tokenizer's rules, so prompts come as token ids."""
    command = [
        sys.executable, "-m", "benchmarks.server.llama_server", str(file), "--dtype", subject.dtype,
        "--slots", str(slots), "--context", str(slots * positions), "--threads", str(threads),
    ]  # fmt: skip
    return ServerContestant(LLAMA, command, "measured", False, encode=encode)


def why_not(subject: ServedModel) -> str | None:
    """Return why ``transformers serve`` cannot serve this here; None if it may."""
    if not (importlib.util.find_spec("transformers.cli") and importlib.util.find_spec("transformers.cli.serve")):
        return "this version of transformers has no such command"
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"{', '.join(missing)} not installed (pip install 'transformers[serving]')"
    return "it does not read a GGUF file from this computer" if subject.folder.is_file() else None


@contextmanager
def started(contestant: ServerContestant, chats: bool, logs: Path) -> Iterator[ServerEndpoint]:
    """Yield a contestant's endpoint; log to a file in ``logs``. See ``running``."""
    log = logs / f"{contestant.name.replace(' ', '-')}.log"
    with running(contestant.name, contestant.command, log) as (_, url):
        exact = False
        if contestant.ours:
            [model] = httpx.get(f"{url}/v1/models", timeout=5.0).json()["data"]
            exact = model["forerun"]["exactness"] == "bitwise"
        yield ServerEndpoint(url, contestant.model, chats, contestant.ours, exact, contestant.encode)


@contextmanager
def running(
    name: str, command: Sequence[str], log: Path, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and URL of a server once it answers, and end it. ``command`` gets a free port added, ``log`` is
    the file of its output, and ``options`` are of ``Popen``. Raise ServerError if it ends, or does not answer in
    time."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    given = {"stdin": subprocess.DEVNULL, "text": True, "env": environment(os.environ)} | options
    with log.open("w") as file:
        given = {"stdout": file, "stderr": file} | given
        with subprocess.Popen([*command, "--port", str(port)], **given) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(name, process, url, log)
                yield process, url
            finally:
                process.terminate()
                try:
                    process.wait(ENDING)
                except subprocess.TimeoutExpired:
                    process.kill()


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: no settings of Forerun, and this process's packages."""
    kept = {name: value for name, value in given.items() if not name.startswith("FORERUN_")}
    return kept | {"PYTHONPATH": os.pathsep.join([CHECKOUT, *(path for path in sys.path if path)])}


def free_port() -> int:
    first = os.getpid() % len(PORTS)
    for port in (*PORTS[first:], *PORTS[:first]):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise OSError(f"there is no free port from {PORTS[0]} to {PORTS[-1]}")


def _wait(name: str, process: subprocess.Popen[str], url: str, log: Path) -> None:
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


def _last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-QUOTED:]
