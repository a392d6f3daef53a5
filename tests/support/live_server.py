"""A real server in a thread, on a free port of this computer: what tests of the server share."""

import asyncio
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from forerun.engine.engine import Engine
from forerun.server.admission import SchedulerLimits
from forerun.server.app import create_app
from forerun.server.http_server import BoundedConnection
from forerun.server.scheduler import Scheduler
from forerun.server.settings import ServerSettings
from support.bundled import bundled

Json = dict[str, Any]
PATIENCE = 120.0
"""Seconds after which a test that hangs fails."""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template for the bundled model, which has none."""


def bundled_engine(template: str | None = TEMPLATE, **options: Any) -> Engine:
    model, tokenizer = bundled()
    tokenizer.chat_template = template
    return Engine(model, "trie", tokenizer=tokenizer, **options)


class PausableEngine:
    """An engine whose steps wait at a gate, open at first, and can fail."""

    broken = False

    def __init__(self, engine: Engine) -> None:
        self.engine, self.gate = engine, threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def batch(self, limit: int | None = None, **options: Any) -> Any:
        batch = self.engine.batch(limit, **options)
        step = batch.step

        def held(*given: Any) -> Any:
            assert self.gate.wait(PATIENCE)
            if self.broken:
                raise LookupError("broken in the test")
            return step(*given)

        batch.step = held
        return batch


class QuickServer(uvicorn.Server):
    """uvicorn looks ten times a second whether it is to end, and waits for a tenth when it does; this one does not."""

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            await asyncio.sleep(0.01)
            tick += 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        end = time.monotonic() + 1
        while (state.connections or state.tasks) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


class LiveServer:
    """A server in a thread, on a free port."""

    def __init__(self, engine: Any, limits: SchedulerLimits | None = None, **told: Any) -> None:
        self.app = create_app(engine, ServerSettings(**told), limits or SchedulerLimits(1 << 30))
        self.scheduler: Scheduler = self.app.state.service.scheduler
        self.socket = free_socket()
        self.port = self.socket.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            http=BoundedConnection,
            ws="none",
            log_level="error",
            limit_concurrency=ServerSettings(**told).connections,
        )
        self.uvicorn = QuickServer(config)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        until(lambda: self.uvicorn.started)
        # reading the certificates of the web, of which there is no need here, takes longer than most requests
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE, verify=False)

    def client(self, key: str = "none") -> openai.OpenAI:
        options: Any = {"max_retries": 0, "timeout": PATIENCE, "http_client": self.http}
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, **options)

    def post(self, body: Any, address: str = "completions", **more: Any) -> httpx.Response:
        return self.http.post(f"/v1/{address}", json=body, **more)

    def metric(self, name: str) -> float:
        return self.metrics([name])[name]

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Of one moment."""
        lines = self.http.get("/metrics").text.splitlines()
        return {
            name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
            for name in names
        }

    def wait_idle(self) -> None:
        """Wait until no request runs or waits; then none has memory."""
        until(lambda: not self.scheduler.busy)
        assert self.scheduler.usage == 0

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def serving(template: str | None = TEMPLATE, engine: Json | None = None, **told: Any) -> Any:
    """A module's fixtures ``engine``, of the bundled model, and ``server``, for tests that change nothing of both."""

    @pytest.fixture(scope="module", name="engine")
    def built() -> Engine:
        return bundled_engine(template, **(engine or {}))

    @pytest.fixture(scope="module", name="server")
    def served(engine: Any) -> Iterator[LiveServer]:
        with LiveServer(engine, **told) as server:
            yield server

    return built, served


def free_socket() -> socket.socket:
    """On a port that no other worker of these tests takes, also once a command opens it in place of this socket."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    begin = 20_000 + 3000 * worker
    for port in range(begin + os.getpid() % 2000, begin + 3000):
        one = socket.socket()
        try:
            one.bind(("127.0.0.1", port))
            return one
        except OSError:
            one.close()
    raise OSError("no free port")


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def tasks() -> int:
    return sum(issubclass(type(each), asyncio.Task) and not each.done() for each in gc.get_objects())


PROMPTS = [
    "def add(a, b):", "Once upon a time", '{"name": "', "2 + 2 =", "The sun", "import os\n", "She said", "A, B, C,",
]  # fmt: skip
ASKED: Json = {"model": "bundled", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
"""A short request."""


def sampled(seed: int, temperature: float = 1.0, top_p: float = 1.0) -> Json:
    """Options of an engine, as a server has them for a request with this seed."""
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "seed": seed}


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def events_of(text: str) -> list[Json]:
    """What the events of a stream say."""
    return [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]


def streamed(server: LiveServer, body: Json, address: str = "completions") -> list[Json]:
    """What the events of a stream say, which ends as it should."""
    events, end, empty = server.post({**body, "stream": True}, address).text.rpartition("data: [DONE]\n\n")
    assert end and not empty
    return events_of(events)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error_of(answer: httpx.Response, status: int = 400) -> Json:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)
