"""Compile grammars on trial in processes that can be killed: a short schema may need minutes and gigabytes."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.models.text.grammar import JSON_STYLE, Grammars, GrammarSource, grammar_source
from forerun.models.text.schemas import SchemaError
from forerun.server.api_errors import ApiError

log = logging.getLogger(__name__)

COMPILING_PROCESSES = 2
TENANT_SCHEMAS = 8
"""Maximum schemas per tenant that wait or are being compiled."""
COMPILE_SECONDS = 3
COMPILE_WALL_SECONDS = 20.0
COMPILE_BYTES = 1 << 30
"""Maximum processor time, wall time and memory per schema; the largest useful ones needed 1.3 s of processor time."""
WORKER = Path(__file__).with_name("grammar_worker.py")


class GrammarPool:
    """Compiles an engine's grammars for an event loop, so that ``Grammars.of`` returns at once."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._executor = ThreadPoolExecutor(COMPILING_PROCESSES, "forerun-grammars")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(COMPILING_PROCESSES):
            self._idle.put(None)  # started when needed
        self._jobs: dict[tuple[str, GrammarSource], asyncio.Future[None]] = {}
        self._places: Counter[str] = Counter()
        self._workers: set[_Worker] = set()
        self._closed = False

    async def prepare(self, response_format: Any, tenant: str, namespace: str) -> None:
        """Compile a response format's grammar; raise SchemaError if it is wrong or costly, ApiError for too many."""
        if response_format is None or response_format["type"] in ("text", "json_object"):
            return
        source = await asyncio.to_thread(grammar_source, response_format)
        assert source is not None
        key = (namespace, source)
        if self._grammars.has(source, namespace):
            return
        if key not in self._jobs:
            if self._places[tenant] >= TENANT_SCHEMAS:
                message = f"{TENANT_SCHEMAS} schemas of this key are being compiled; try again"
                raise ApiError(429, message, "too_many_schemas", "response_format", {"Retry-After": "1"})
            self._places[tenant] += 1
            loop = asyncio.get_running_loop()
            self._jobs[key] = loop.run_in_executor(self._executor, self._compile, response_format, source, namespace)
            self._jobs[key].add_done_callback(lambda job: self._end(key, tenant, job))
        try:
            await asyncio.shield(self._jobs[key])
        except (asyncio.CancelledError, SchemaError):
            if self._closed:
                raise ApiError(503, "the server is closing", "closing") from None
            raise

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        while not self._idle.empty():
            if (idle := self._idle.get_nowait()) is not None:
                idle.close()

    def _end(self, key: tuple[str, GrammarSource], tenant: str, job: asyncio.Future[None]) -> None:
        del self._jobs[key]
        self._places -= Counter([tenant])
        if not job.cancelled():
            job.exception()  # or asyncio warns, if the client has gone

    def _compile(self, response_format: Any, source: GrammarSource, namespace: str) -> None:
        self._grammars.prepare()  # fails with the reason if there can be no grammars
        worker, survived = self._idle.get(), False
        try:
            if worker is None:
                worker = _Worker(self._grammars)
                self._workers.add(worker)
            if self._closed:
                worker.kill()
            survived = worker.survives(source)
        finally:  # also if no process could be started: the next one may
            if worker is not None and not survived:
                worker.close()
                self._workers.discard(worker)
            self._idle.put(worker if survived else None)
        if not survived:
            limits = f"{COMPILE_SECONDS} seconds or {COMPILE_BYTES >> 20} MiB"
            raise SchemaError(f"the schema cannot be used: compiling it needs more than {limits}")
        self._grammars.of(response_format, namespace)  # costs about as much as the trial


class _Worker:
    def __init__(self, grammars: Grammars) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-P", str(WORKER)], text=True, encoding="utf-8", **pipes)
        limits = {"memory": COMPILE_BYTES, "seconds": COMPILE_SECONDS, "style": JSON_STYLE}
        self.survives({"tokenizer": grammars.tokenizer_arguments(), **limits})

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        with suppress(OSError):  # it has not read everything
            self._process.communicate()

    def survives(self, line: Any) -> bool:
        """Return whether the process survives a grammar; then compiling it again is cheap, valid or not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(COMPILE_WALL_SECONDS, self.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            return bool(self._process.stdout.readline())
        except OSError:  # it has ended
            return False
        finally:
            timer.cancel()
