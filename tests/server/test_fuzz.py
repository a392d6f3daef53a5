"""What a server withstands: nonsense, costly requests, slow clients, too many of them. Each test shows one bound."""

import asyncio
import gc
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPResponse
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.chat_models import json_schema
from support.live_server import (
    ASKED,
    PATIENCE,
    TEMPLATE,
    Json,
    LiveServer,
    PausableEngine,
    error_of,
    serving,
    tasks,
    text_of,
    until,
)
from support.malformed_requests import RawRequest, RequestFuzzer
from support.response_checks import RawAnswer, ask_all, wrong

from forerun.core.fairness import FairExecutor
from forerun.core.json_counts import count_json
from forerun.core.request import Request
from forerun.engine.engine import BUDGET, Engine
from forerun.kv.full_cache import FullCache
from forerun.server import app, bodies, http_server, middleware
from forerun.server.api_errors import ApiError
from forerun.server.bodies import SMALL_BYTES
from forerun.server.chat_schema import ChatRequest
from forerun.server.http_server import RESERVED_CONNECTIONS, BoundedConnection
from forerun.server.prompt_encoder import PromptEncoder
from forerun.server.schema import CompletionRequest

engine, server = serving(engine={"prefix_cache": 1 << 24})


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def heard(one: socket.socket, said: bytes = b"") -> bytes:
    """Send this; all that comes until the server closes."""
    found = b""
    with suppress(ConnectionError):
        one.sendall(said)
        while part := one.recv(1 << 16):
            found += part
    return found


def connected(server: LiveServer, address: str = "127.0.0.1") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), source_address=(address, 0))
    one.settimeout(PATIENCE)
    return one


def told(server: LiveServer, said: bytes, address: str = "127.0.0.1") -> bytes:
    """All that a new connection hears."""
    with connected(server, address) as one:
        return heard(one, said)


def get(address: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {address} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


CLOSING = "Connection: close"


def connections(server: LiveServer) -> int:
    return len(server.uvicorn.server_state.connections)


def narrow(patch: pytest.MonkeyPatch, buffer: int | None = None) -> None:
    """Little fits between a client and the server, and so much into the server's own buffer."""
    made = BoundedConnection.connection_made

    def connect(connection: BoundedConnection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(buffer)
        made(connection, transport)

    patch.setattr(BoundedConnection, "connection_made", connect)


def reader(server: LiveServer, buffer: int, **asked: Any) -> socket.socket:
    """A client that has asked for much and reads little at a time."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    one.connect(("127.0.0.1", server.port))
    body = json.dumps({**ASKED, "logprobs": 5, "temperature": 1, **asked})
    one.sendall(head(len(body)) + body.encode())
    return one


@contextmanager
def clients(server: LiveServer, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connected(server)) for _ in range(count)]


def error_in(said: bytes) -> Json:
    error: Json = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.matrix)])
def test_nonsense_is_refused_and_leaves_nothing_behind(engine, serve, count):
    one = serve(engine, max_tokens=8, request_bytes=100_000, namespaces=8)
    wanted = text_of(one.post(ASKED))
    before, threads = tasks(), threading.active_count()
    fuzz, again = (RequestFuzzer(one.http.get("/openapi.json").json(), seed=0, large=100_000) for _ in range(2))
    shots = [fuzz.draw() for _ in range(count)]
    assert shots == [again.draw() for _ in shots]  # a failure can be repeated
    answers = asyncio.run(ask_all(one.port, shots, clients=8))
    for shot, answer in zip(shots, answers, strict=True):
        assert not (fault := wrong(shot, answer)), (fault, shot)
    assert sum(answer.status == 200 for answer in answers) > 0.12 * count
    one.wait_idle()
    until(lambda: tasks() <= before)
    assert threading.active_count() <= threads + 6 + 40  # asyncio's pool and that of plain functions are bounded
    assert text_of(one.post(ASKED)) == wanted


GOOD = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'
JSON, STREAM = b"application/json", b"text/event-stream"


@pytest.mark.parametrize(("status", "body", "kind", "fault"), [
    (200, b"{}", JSON, None), (400, GOOD, JSON, None), (500, GOOD, JSON, "status 500"), (503, GOOD, JSON, "status 503"),
    (400, b"Bad Request", JSON, "OpenAI's shape"), (400, b'{"error": {"message": ""}}', JSON, "OpenAI's shape"),
    (200, b"data: {}\n\ndata: [DONE]\n\n", STREAM, None), (200, b"data: {}\n\n", STREAM, "a stream ends with"),
    (200, b'data: {"error": {"type": "server_error"}}\n\n', STREAM, "a stream ends with"),
    (200, b'data: {"type": "response.completed", "code": "failed"}\n\n', STREAM, "a stream ends"),
])  # fmt: skip
def test_a_wrong_answer_to_nonsense_is_found(status, body, kind, fault):
    line, shot = b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n", RawRequest("posted", (b"",))
    said = line % (status, kind, len(body)) + body
    found = wrong(shot, RawAnswer(said, 1.0, True))
    assert found is None if fault is None else fault in str(found)
    assert "it hangs" in str(wrong(shot, RawAnswer(said, 1.0, False)))
    assert wrong(shot, RawAnswer(b"", 1.0, True)) == "no answer"


@pytest.mark.parametrize(("kind", "body"), [
    (CompletionRequest, {"prompt": ["a"] * 20_000}), (CompletionRequest, {"prompt": [None] * 20_000}),
    (CompletionRequest, {"prompt": "Hi", "stop": [1] * 20_000}),
    (CompletionRequest, {"prompt": "Hi", **{f"x{i}": 1 for i in range(20_000)}}),
    (ChatRequest, {"messages": [1] * 20_000}), (ChatRequest, {"messages": [{}] * 20_000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 20_000}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "tools": [1] * 20_000}),
])  # fmt: skip
def test_a_body_with_a_thousand_mistakes_has_one_error(kind, body):
    """Four million errors took 37 seconds and 6 GiB, and nobody else was answered meanwhile."""
    with pytest.raises((ValidationError, ApiError)) as refused:
        kind(model="bundled", **body)
    assert isinstance(refused.value, ApiError) or refused.value.error_count() == 1


def test_a_text_far_too_long_is_refused_by_its_beginning(engine, monkeypatch):
    seen, counted = list[int](), list[int]()

    class Counting:
        chat_template = TEMPLATE

        def __call__(self, text: str, **more: Any) -> Any:
            seen.append(len(text))
            return engine.tokenizer(text, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine.tokenizer, name)

        def apply_chat_template(self, *given: Any, tokenize: bool, **more: Any) -> Any:
            assert not tokenize
            return engine.tokenizer.apply_chat_template(*given, chat_template=TEMPLATE, tokenize=False, **more)

    encoder = PromptEncoder(Counting(), 100)
    count = encoder._count
    monkeypatch.setattr(encoder, "_count", lambda text: counted.append(len(text)) or count(text))
    for text in ("a" * 100_000, "hello world " * 10_000):
        with pytest.raises(ApiError, match=r"more than .* tokens; the model takes 100"):
            encoder(CompletionRequest(model="bundled", prompt=text))
        with pytest.raises(ApiError, match="the model takes 100"):
            encoder(ChatRequest(model="bundled", messages=[{"role": "user", "content": text}]))
    short = {"role": "user", "content": "one two three"}
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 10_000}}
    for asked in ({"messages": [short] * 1000}, {"messages": [short], "tools": [tool]}):
        with pytest.raises(ApiError, match="the model takes 100"):
            encoder(ChatRequest(model="bundled", **asked))
    assert not seen and max(counted) <= 1600  # other prompts do not wait for it
    text = "one two three " * 20  # longer than the first look, and not too long
    assert encoder(CompletionRequest(model="bundled", prompt=text))[0].ids == engine.tokenizer(text)["input_ids"]


@contextmanager
def beside(server: LiveServer) -> Iterator[None]:
    """Another request runs meanwhile, and its stream is its text alone."""
    asked = {**ASKED, "max_tokens": 40}
    wanted = text_of(server.post(asked))
    stream = server.client().completions.create(**asked, stream=True)
    text = next(stream).choices[0].text
    yield
    assert text + "".join(chunk.choices[0].text for chunk in stream) == wanted == text_of(server.post(asked))


def test_a_schema_too_hard_to_follow_is_the_clients_error(server):
    """It compiles, and the matcher gives up at its first tokens."""
    schema = json_schema({"type": "string", "pattern": "^" + "a?" * 2000 + "a" * 2000 + "$"})
    with beside(server):
        error = error_of(server.post({**ASKED, "response_format": schema}))
        assert error["param"] == "response_format" and "grammar cannot go on" in error["message"]


def fails(request: Request, patch: pytest.MonkeyPatch) -> None:
    """What looks for the end of its text raises."""

    def stopping(ids: Any) -> bool:
        if len(request.generated) > 3:
            raise LookupError("broken in the test")
        return False

    request.stopping = stopping


def has_no_memory(request: Request, patch: pytest.MonkeyPatch) -> None:
    """Its cache, which alone has its size, takes no tokens."""
    reserve, places = FullCache.reserve, len(request) + request.remaining + BUDGET

    def full(cache: FullCache, *given: Any) -> Any:
        if cache._capacity == places:
            raise MemoryError("none is left in the test")
        return reserve(cache, *given)

    patch.setattr(FullCache, "reserve", full)


@pytest.mark.parametrize("spoil", [fails, has_no_memory])
def test_a_request_that_fails_harms_nobody_beside_it(engine, serve, spoil, monkeypatch):
    """Whole, or as a stream, which ends with the error."""
    one = serve(engine)
    submit = one.scheduler.submit

    def spoilt(request: Request, *given: Any) -> Any:
        if request.remaining == 7:
            spoil(request, monkeypatch)
        return submit(request, *given)

    one.scheduler.submit = spoilt
    bad = {**ASKED, "max_tokens": 7}
    with beside(one):
        error = error_of(one.post(bad), 500)
        assert error["type"] == "server_error" and "in the test" not in str(error)
        with pytest.raises(openai.APIError, match="failed in the server"):
            list(one.client().completions.create(**bad, stream=True))
        *_, last, empty = one.post({**bad, "stream": True, "forerun": {"trace": True}}).text.split("\n\n")
        assert not empty and json.loads(last.removeprefix("data: "))["error"]["code"] == "failed"
    one.wait_idle()
    assert one.metric('forerun:request_ended_total{reason="error"}') == 3


def test_connections_beyond_the_limit_are_told_so(engine, serve):
    one = serve(engine, connections=2)
    with clients(one, 2):
        until(lambda: connections(one) == 2)
        said = told(one, get("/v1/models"))
        assert said.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in said.lower()
        assert error_in(said)["code"] == "too_many_connections"
        with clients(one, RESERVED_CONNECTIONS) as others:
            until(lambda: connections(one) == 2 + RESERVED_CONNECTIONS)
            said = told(one, get("/ready"))  # the oldest one is dropped for it
            assert said.startswith(b"HTTP/1.1 200") and b"connection: close" in said.lower()
            assert heard(others[0]) == b""
    until(lambda: connections(one) == 0)
    assert one.post(ASKED).status_code == 200


def test_one_address_leaves_connections_to_others_and_to_questions_of_health(engine, serve):
    one = serve(engine, connections=16)
    with clients(one, 14):
        until(lambda: connections(one) == 14)
        assert told(one, get("/v1/models", CLOSING)).startswith(b"HTTP/1.1 503")
        assert told(one, get("/v1/models", CLOSING), "127.0.0.2").startswith(b"HTTP/1.1 200")
        with clients(one, 2 + 2 * RESERVED_CONNECTIONS) as flood:
            for each in flood:
                each.sendall(head(100) + b"{")
            for address in ("/health", "/ready") * 3:
                assert told(one, get(address)).startswith(b"HTTP/1.1 200")


def test_tokens_decoded_without_python_s_lock_are_the_tokenizer_s_text(engine: Engine) -> None:
    tokens = list(range(engine.target.vocabulary))
    decoded = PromptEncoder(engine.tokenizer, None).decode(tokens)
    assert decoded == engine.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_a_request_that_ended_needs_no_garbage_collection(server: LiveServer) -> None:
    def requests() -> int:
        return sum(type(each) is Request for each in gc.get_objects())

    server.wait_idle()
    gc.collect()
    gc.disable()
    try:
        before = requests()
        for more in ({}, {"n": 3}, {"stream": True}):
            assert server.post({**ASKED, **more}).status_code == 200
        until(lambda: requests() <= before)
    finally:
        gc.enable()


def test_the_largest_body_is_parsed_without_collecting_all_objects(server: LiveServer) -> None:
    """Such a collection blocked all threads for 0.06 seconds."""
    generations: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    body = b'{"model":"m","prompt":"Hi","metadata":[' + b",".join([b"[[[[[[[[]]]]]]]]"] * 12_000) + b"]}"
    gc.freeze()  # as a server does before it starts
    gc.collect()
    gc.callbacks.append(collected)
    try:
        bodies.parsed(body, CompletionRequest, "m")
    finally:
        gc.callbacks.remove(collected)
        gc.unfreeze()
    assert generations and max(generations) < 2
    assert sys.getswitchinterval() == app.SWITCH_SECONDS


@pytest.mark.parametrize(("body", "counts"), [
    (b'{"a": [1, -2.5e3, true, "x,[{:\\"\\\\"], "b": {}}', (3, 3, 3)), (b"", (0, 0, 0)), (b'"\\u0022[1,2]"', (1, 0, 0)),
])  # fmt: skip
def test_the_parts_of_json_are_counted_without_making_them(body, counts):
    assert count_json(body) == counts


@given(
    value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20),
    spaced=st.booleans(),
)  # fmt: skip
def test_the_counts_are_those_of_what_is_made(value, spaced):
    strings = containers = others = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        strings += isinstance(each, str)
        containers += isinstance(each, list | dict)
        others += each is None or isinstance(each, bool | int)
        waiting += [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []
    text = json.dumps(value, indent=2 if spaced else None, ensure_ascii=spaced)
    assert count_json(text.encode(errors="surrogatepass")) == (strings, containers, others)


@pytest.mark.parametrize(("address", "field", "entry"), [
    *((f"/v1/{address}", "messages", '{"role":"user","content":""}') for address in ("chat/completions", "messages")),
    ("/v1/chat/completions", "tools", "{}"), ("/v1/completions", "prompt", "[1]"), ("/v1/completions", "prompt", '"a"'),
    ("/detokenize", "tokens", "5"),
])  # fmt: skip
def test_a_body_of_too_many_parts_is_refused_before_they_are_made(server, monkeypatch, address, field, entry):
    monkeypatch.setattr(bodies, "parsed", Mock(side_effect=AssertionError("they were made")))
    body = f'{{"{field}": [{",".join([entry] * (6_000_000 // (len(entry) + 1)))}]}}'
    answer = server.http.post(address, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "this server takes" in answer.json()["error"]["message"]


def test_a_large_body_is_read_beside_the_event_loop(server, monkeypatch):
    """While one is read, the server answers others."""
    reading, go_on, read = threading.Event(), threading.Event(), bodies.parsed

    def slow(body: bytes, *given: Any) -> Any:
        if len(body) > SMALL_BYTES:
            reading.set()
            assert go_on.wait(PATIENCE)
        return read(body, *given)

    monkeypatch.setattr(bodies, "parsed", slow)
    with ThreadPoolExecutor(1) as thread:
        large = thread.submit(server.post, {**ASKED, "user": "x" * 2 * SMALL_BYTES})
        try:
            assert reading.wait(PATIENCE)
            assert server.post(ASKED).status_code == 200
            assert not large.done()
        finally:
            go_on.set()
        assert large.result().status_code == 200


def test_a_head_that_does_not_come_ends_the_connection(engine, serve, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    one = serve(engine)
    with connected(one) as silent, connected(one) as second:
        silent.sendall(b"POST /v1/comp")
        assert heard(second, get("/health") + b"GET /hea").endswith(b'{"status":"ok"}')
        assert heard(silent) == b""
    answer = one.post({**ASKED, "max_tokens": 200})  # it takes longer than a head may
    assert answer.json()["usage"]["completion_tokens"] == 200


def test_a_body_that_does_not_come_is_told_so(server, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    said = told(server, head(100) + b"{")
    assert said.startswith(b"HTTP/1.1 408") and error_in(said)["code"] == "request_timeout"


def test_who_still_sends_a_body_that_is_refused_hears_why(engine, serve):
    with connected(serve(engine, request_bytes=1000)) as one:
        one.sendall(head(3_000_000) + b" " * 100)
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 413")
        assert heard(one, b" " * 2_999_900 + get("/health", CLOSING)).endswith(b'{"status":"ok"}')


def test_a_refused_body_without_end_is_cut_off(engine, serve, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    with connected(serve(engine, request_bytes=1000)) as endless, pytest.raises(ConnectionError):
        endless.sendall(head(1 << 50))
        while True:
            endless.sendall(b" " * 65_536)


def test_all_bodies_together_are_bounded(engine, serve, monkeypatch):
    monkeypatch.setattr(middleware, "BODIES_IN_MEMORY", 2)
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    one = serve(engine, request_bytes=1000)
    with clients(one, 3) as waiting:
        for each in waiting:
            each.sendall(head(1000) + b" " * 900)
        said = heard(waiting[2])
    assert said.startswith(b"HTTP/1.1 503") and error_in(said)["code"] == "too_many_bytes"
    until(lambda: not one.uvicorn.server_state.tasks)
    assert one.post({**ASKED, "user": "x" * 800}).status_code == 200


def test_who_does_not_read_is_dropped(engine, serve, monkeypatch):
    narrow(monkeypatch, 4096)
    monkeypatch.setattr(http_server, "READING_SECONDS", 0.05)
    one = serve(engine)
    with reader(one, 2048, max_tokens=2000, n=4, stream=True):
        until(lambda: one.scheduler.running > 0)
        until(lambda: not connections(one))
        one.wait_idle()
    assert one.metric("forerun:generation_tokens_total") < 4 * 2000


@pytest.mark.parametrize("said", [
    b"\0\1\2\r\n\r\n", b"GET /\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
])  # fmt: skip
def test_what_is_no_http_is_told_so_in_openais_shape(server, said):
    """Also in the midst of a body."""
    answer = told(server, said)
    assert answer.startswith(b"HTTP/1.1 400") and error_in(answer)["code"] == "invalid_http"
    until(lambda: not server.uvicorn.server_state.tasks)


def test_texts_of_many_are_encoded_in_turn(engine):
    order: list[str] = []

    def slow(text: str) -> Any:
        order.append(text)
        time.sleep(0.005)
        return engine.tokenizer(text)

    encoder = PromptEncoder(slow, None)
    many = threading.Thread(target=encoder, args=[CompletionRequest(model="bundled", prompt=["many"] * 100)])
    many.start()
    until(lambda: len(order) > 3)
    encoder(CompletionRequest(model="bundled", prompt="one"))
    many.join()
    assert order.index("one") < 20


def test_who_sends_many_texts_holds_up_nobody_else():
    """They wait in a queue of their own, also where all threads are busy."""
    order, executor = list[str](), FairExecutor(1, "test")

    def encode(text: str) -> str:
        order.append(text)
        time.sleep(0.002)
        return text

    many = [executor.submit("many", partial(encode, "many")) for _ in range(100)]
    assert many[-1].cancel()
    assert executor.submit("one", partial(encode, "one")).result() == "one"
    assert order.index("one") < 20
    assert many[-2].result() == "many" and order.count("many") == 99
    with pytest.raises(ZeroDivisionError):
        executor.submit("one", lambda: 1 / 0).result()
    assert executor.submit("one", lambda: 2).result() == 2


def test_long_texts_of_one_tenant_leave_others_their_turn(engine, serve):
    server, gate = serve(engine, api_keys=("a", "b")), threading.Event()
    service = server.app.state.service
    encode = service.encode

    def slow(body: Any) -> Any:
        assert not isinstance(body, CompletionRequest) or body.prompt != "slow" or gate.wait(20)
        return encode(body)

    def ask(key: str, prompt: str) -> int:
        asked = {**ASKED, "prompt": prompt}
        return server.post(asked, headers={"Authorization": f"Bearer {key}"}).status_code

    service.encode = slow
    with ThreadPoolExecutor(40) as threads:
        held = [threads.submit(ask, "a", "slow") for _ in range(40)]
        try:
            assert ask("b", "quick") == 200
            assert not any(each.done() for each in held)
        finally:
            gate.set()


def test_who_reads_slowly_gets_the_whole_answer(engine, serve, monkeypatch):
    narrow(monkeypatch)
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(http_server, "READING_SECONDS", 0.05)
    one = serve(engine)
    with reader(one, 4096, max_tokens=150, seed=2) as slow:
        answer = b""
        while not answer.endswith(b"}]}") and (part := slow.recv(2048)):
            answer += part
            time.sleep(0.004)
    length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    assert length > 25_000 and len(answer.partition(b"\r\n\r\n")[2]) == length


@pytest.mark.parametrize("address", ["/health", "/v1/completions"])
def test_who_has_no_key_takes_none_of_the_room_for_bodies(engine, serve, monkeypatch, address):
    monkeypatch.setattr(middleware, "BODIES_IN_MEMORY", 2)
    one = serve(engine, request_bytes=1000, api_keys=("key-of-a",))
    line, key = f"POST {address} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n", "Bearer key-of-a"
    with clients(one, 4) as strangers:
        for each in strangers:
            each.sendall(line.encode() + b" " * 999)
            if address != "/health":
                assert each.recv(12) == b"HTTP/1.1 401"
        if address == "/health":
            until(lambda: connections(one) >= 4)
            time.sleep(0.1)
        assert one.post({**ASKED, "max_tokens": 2}, headers={"Authorization": key}).status_code == 200


def test_a_body_that_is_parsed_is_dropped(engine, serve, monkeypatch):
    monkeypatch.setattr(middleware, "BODIES_IN_MEMORY", 2)
    held = PausableEngine(engine)
    one, length = serve(held, request_bytes=3000), 2500  # apart, or the product would be a constant of this function
    body = json.dumps({**ASKED, "user": "q" * length}).encode()
    held.gate.clear()
    clients = [connected(one) for _ in range(5)]
    for number, client in enumerate(clients, 1):  # five bodies where there is room for two
        client.sendall(head(len(body)))
        client.sendall(body)
        until(lambda number=number: one.scheduler.running + one.scheduler.waiting == number)
    gc.unfreeze()  # what was imported may keep one, too
    found = gc.get_referents(*gc.get_objects())
    gc.freeze()
    texts = [each for each in found if type(each) in (bytes, bytearray, str) and len(each) > 2400]
    kept = [each for each in texts if each.count("q" if type(each) is str else b"q") > 2400]
    held.gate.set()
    for client in clients:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.close()
    assert not kept


def test_one_tenant_takes_no_more_than_half_of_the_room_for_bodies(engine, serve, monkeypatch):
    monkeypatch.setattr(middleware, "BODIES_IN_MEMORY", 4)
    monkeypatch.setattr(middleware, "RESERVED_BODIES", 2)
    one = serve(engine, request_bytes=1000, api_keys=("key-of-a", "key-of-b"))
    with clients(one, 4) as flood:
        for each in flood:
            each.sendall(head(1000, "Authorization: Bearer key-of-a") + b" " * 950)
        refused = HTTPResponse(select.select(flood, [], [], PATIENCE)[0][0])  # to any of the four
        refused.begin()
        assert json.loads(refused.read())["error"]["code"] == "too_many_bytes"
        key = {"Authorization": "Bearer key-of-b"}
        assert one.post({**ASKED, "user": "x" * 800}, headers=key).status_code == 200


def test_log_probabilities_are_bounded_before_any_work(engine, serve):
    one = serve(engine, request_bytes=1 << 16)  # 2 MiB for all
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
    error = error_of(one.post({**asked, "n": 64, "max_tokens": 64}, "chat/completions"))
    assert "bytes of log-probabilities" in error["message"]
    body = one.post({**asked, "n": 2, "max_tokens": 8, "seed": 1}, "chat/completions").json()
    for choice in body["choices"]:
        assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"] // 2
        assert all(len(each["top_logprobs"]) == 20 for each in choice["logprobs"]["content"])
