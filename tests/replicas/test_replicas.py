"""Replicas: who is asked, what they learn from each other, and that one may die."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import httpx
import numpy as np
import pytest
from starlette.types import Message
from support.commands import start
from support.live_server import PATIENCE, free_socket, ready

from forerun.core.request import Request
from forerun.replicas import cluster
from forerun.replicas.cluster import Resources, shared_resources
from forerun.replicas.exchange import (
    LEARNED_TOKENS,
    SILENT_SECONDS,
    Exchange,
    ExchangeClient,
    ExchangeUpdate,
    LearnedText,
)
from forerun.replicas.front import MAX_REPLICAS_TRIED, ForwardedRequest, Front, ResponseHead, Suspects, merged_metrics
from forerun.replicas.prefix_index import BLOCK_CHARACTERS, PrefixReaders, digests, preferred
from forerun.replicas.replica import responses
from forerun.server.middleware import GuardMiddleware
from forerun.server.settings import ServerSettings
from forerun.server.tenants import ApiKeys

BOOK = "It was a bright cold day, and the clocks were striking. " * 200
TURNS = [{"role": role, "content": said} for role, said in (("user", BOOK), ("assistant", "Yes."), ("user", "Why?"))]


def body(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **more}).encode()


def test_requests_share_as_many_digests_as_they_share_blocks():
    first = digests("a", body(BOOK + "Who?"))
    second = digests("a", body(BOOK[: 3 * BLOCK_CHARACTERS] + "x" * 2 * BLOCK_CHARACTERS))
    assert len(first) == 1 + len(BOOK + "Who?") // BLOCK_CHARACTERS and len(second) == 6
    assert first[:4] == second[:4] and first[4] != second[4]
    assert digests("a", body("short")) == first[:1]


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"namespace": "other"}])
def test_nobody_shares_a_digest_with_another_tenant_or_namespace(other):
    asked = body(BOOK, forerun={"namespace": other.get("namespace", "default")})
    assert not set(digests("a", body(BOOK))) & set(digests(other.get("tenant", "a"), asked))


@pytest.mark.parametrize("wrong", [b"", b"{", b"[1]", b'"x"', b'{"forerun": 3}', b"[" * 100_000])
def test_what_is_refused_later_has_no_digests(wrong):
    assert digests("a", wrong) == []


def test_half_a_character_is_no_obstacle():
    asked = b'{"prompt": "' + b"\\ud800" * BLOCK_CHARACTERS + b'", "forerun": {"namespace": "\\ud800"}}'
    assert len(digests("a", asked)) == 2


@pytest.mark.parametrize(("name", "first", "later"), [
    ("messages", TURNS[:1], TURNS), ("prompt", list(range(2000)), [*range(2000), 5]),
    *((name, BOOK, BOOK + "!") for name in ("input", "instructions", "system")),
], ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "")  # fmt: skip
def test_what_begins_equally_shares_digests_in_every_field(name, first, later):
    short, long = (digests("a", json.dumps({name: value}).encode()) for value in (first, later))
    assert len(short) > 8 and short[:-1] == long[: len(short) - 1]


def test_the_longest_prefix_is_preferred_and_a_busy_replica_is_not():
    places: PrefixReaders[str] = PrefixReaders()
    long, short = digests("a", body(BOOK)), digests("a", body(BOOK[:BLOCK_CHARACTERS]))
    places.remember(long, "one")
    places.remember(short, "two")
    everyone = ["three", "two", "one"]
    assert preferred(long, everyone, places, lambda each: 3, 4) == ["one", "two"]
    assert preferred(long, everyone, places, lambda each: 4 * (each == "one"), 4) == ["two"]
    assert preferred(digests("b", body(BOOK)), everyone, places, lambda each: 0, 4) == []
    places.keep(["two"])
    assert preferred(long, everyone, places, lambda each: 0, 4) == ["two"]
    namespace = digests("a", body("Why?"))  # alone it is a reason for an idle replica only
    assert preferred(namespace, everyone, places, lambda each: 0, 4) == ["two"]
    assert preferred(namespace, everyone, places, lambda each: 1, 4) == []


def test_the_least_recently_used_digests_are_forgotten():
    places: PrefixReaders[str] = PrefixReaders(limit=3)
    places.remember([b"1", b"2"], "one")
    places.remember([b"1", b"3"], "two")
    places.remember([b"4"], "two")
    assert places.depth([b"1"], "one") == 1 and places.depth([b"2"], "one") == 0


def text(*tokens: int, namespace: str = "a/default") -> LearnedText:
    return LearnedText.of(namespace, np.array(tokens))


def news(exchange: Exchange, replica: str, since: int = 0, metrics: str = "") -> list[list[int]]:
    return [each.ids for each in exchange.trade(replica, [], since, metrics).texts]


def client_of(exchange: Exchange, learn: Any = lambda *new: None, seconds: float = 60) -> ExchangeClient:
    return ExchangeClient(lambda texts, since: exchange.trade("one", texts, since, ""), learn, seconds)


def test_each_gets_what_others_handed_in_once():
    exchange = Exchange()
    assert exchange.trade("one", [text(1, 2)], 0, "m 1") == ExchangeUpdate([], 1)
    assert exchange.trade("two", [text(3)], 0, "m 2") == ExchangeUpdate([text(1, 2)], 2)
    assert news(exchange, "two", 2, "m 3") == []
    assert news(exchange, "one", 1, "m 4") == [[3]]
    assert exchange.metrics() == {"one": "m 4", "two": "m 3"}


def test_a_replica_that_is_silent_for_long_is_no_longer_shown():
    now = 0.0
    exchange = Exchange(clock=lambda: now)
    exchange.trade("one", [], 0, "m 1")
    now = SILENT_SECONDS
    exchange.trade("two", [], 0, "m 2")
    assert set(exchange.metrics()) == {"one", "two"}
    now += 1
    assert set(exchange.metrics()) == {"two"}


def test_the_exchange_keeps_so_many_bytes_and_a_new_one_begins_anew():
    exchange = Exchange(limit=2 * text(1).nbytes)
    exchange.trade("one", [text(1), text(2), text(3)], 0, "")
    assert news(exchange, "new") == [[2], [3]]
    restarted = Exchange()
    restarted.trade("one", [text(9)], 3, "")
    assert news(restarted, "two", 3) == [[9]]


def test_texts_are_learned_in_slices_for_which_streams_wait_only_shortly():
    exchange, learned, half = Exchange(), list[list[list[int]]](), [7] * (LEARNED_TOKENS // 2)
    exchange.trade("two", [text(*half), text(*half), text(3), text(*half * 3), text(4)], 0, "")
    client_of(exchange, lambda _, rows: learned.append(rows)).trade_once()
    one = 1 / len(half)
    assert [[len(row) / len(half) for row in rows] for rows in learned] == [[1, 1], [one], [3], [one]]


def ended(*tokens: int, **more: Any) -> Request:
    request = Request([5], len(tokens), **more)
    for token in tokens:
        request.append(token)
    return request


def test_a_trader_hands_in_what_ended_and_learns_what_is_new():
    exchange, learned = Exchange(), []
    one = client_of(exchange, lambda *new: learned.append(new))
    one.add(ended(1, 2, namespace="a/x"))
    one.add(ended(7, namespace="a/x", budget=0))  # a text without drafts teaches nothing
    one.trade_once()
    exchange.trade("two", [text(3), text(4), text(5, namespace="b/y")], 0, "")
    one.trade_once()
    one.trade_once()
    assert news(exchange, "new") == [[1, 2], [3], [4], [5]]
    assert learned == [("a/default", [[3], [4]]), ("b/y", [[5]])]


def test_texts_that_cannot_be_learned_do_not_end_the_trade(caplog):
    exchange, learn = Exchange(), Mock(side_effect=LookupError("broken"))
    trader = client_of(exchange, learn, 0.01)
    trader.start()
    for token in (1, 2):
        exchange.trade("two", [text(token)], 0, "")
        until(lambda token=token: learn.call_args == call("a/default", [[token]]))
    trader.close()
    assert "not indexed" in caplog.text


def test_texts_wait_until_the_exchange_is_there_again_and_take_so_much_memory(monkeypatch, caplog):
    monkeypatch.setattr("forerun.replicas.exchange.OUTBOX_BYTES", 2 * text(1).nbytes)
    exchange, there = Exchange(), False

    def trade(texts: Any, since: int) -> ExchangeUpdate:
        if not there:
            raise ConnectionError("gone")
        return exchange.trade("one", texts, since, "")

    trader = ExchangeClient(trade, lambda *new: None, 60)
    for token in (1, 2, 3):
        trader.add(ended(token))
    trader.trade_once()
    assert "cannot be reached" in caplog.text
    there = True
    trader.trade_once()
    assert news(exchange, "two") == [[2], [3]]


class GoneError(Exception):
    pass


class Replicas:
    """Answers in turn; an exception stands for a replica that dies there."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[ForwardedRequest] = []
        self.closed = 0

    async def __call__(self, asked: ForwardedRequest) -> AsyncIterator[ResponseHead | bytes]:
        self.asked.append(asked)
        try:
            for part in self.answers.pop(0):
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    await asyncio.sleep(PATIENCE)
                yield part
        finally:
            self.closed += 1


HEAD = ResponseHead(200, [(b"content-type", b"text/event-stream")], "one")


def ask(
    replicas: Replicas, path: str = "/v1/completions", gone: bool = False, headers: Sequence[Any] = ()
) -> list[Message]:
    async def figures() -> dict[str, str]:
        return {"one": "# TYPE a counter\na_total 1.0\n", "two": "# TYPE a counter\na_total 2.0\n"}

    async def run() -> list[Message]:
        sent: list[Message] = []
        came: list[Message] = [{"type": "http.request", "body": body(BOOK)}]

        async def receive() -> Message:
            if not came and not gone:
                await asyncio.sleep(PATIENCE)
            return came.pop() if came else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        scope["state"] = {"tenant": "key-a"}
        async with asyncio.timeout(PATIENCE / 4):  # a request that is not ended takes all of it
            await Front(replicas, figures, (GoneError,))(scope, receive, send)
            while gone and not replicas.closed:
                await asyncio.sleep(0)
        return sent

    return asyncio.run(run())


def told(sent: list[Message]) -> bytes:
    assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body")
    return b"".join(message.get("body", b"") for message in sent[1:])


def code_of(said: bytes) -> str:
    return str(json.loads(said.removeprefix(b"data: "))["error"]["code"])


def test_an_answer_is_handed_on_and_the_key_is_not():
    replicas = Replicas([HEAD, b"a", b"b"])
    sent = ask(replicas, headers=[(b"authorization", b"Bearer secret"), (b"x-other", b"1")])
    assert told(sent) == b"ab" and (b"x-forerun-replica", b"one") in sent[0]["headers"]
    (asked,) = replicas.asked
    assert asked.beginnings == digests("key-a", body(BOOK))
    assert list(asked.headers) == [(b"x-other", b"1")] and asked.tenant == "key-a"


def test_who_asks_does_not_notice_a_replica_that_dies_before_the_first_word():
    replicas = Replicas([GoneError()], [HEAD, GoneError()], [HEAD, b"a"])
    assert told(ask(replicas)) == b"a" and len(replicas.asked) == 3


def test_an_answer_that_began_ends_with_an_error_in_its_clients_shape():
    first, last = told(ask(Replicas([HEAD, b"data: 1\n\n", GoneError()], [HEAD, b"never"]))).split(b"\n\n")[:2]
    assert first == b"data: 1" and code_of(last) == "replica_lost"
    sent = ask(Replicas([HEAD, b"data: 1\n\n", GoneError()]), path="/v1/messages")
    name, data = told(sent).split(b"\n\n")[1].split(b"\n")
    assert name == b"event: error" and json.loads(data.removeprefix(b"data: "))["error"]["type"] == "overloaded_error"


def test_after_so_many_deaths_a_request_is_given_up():
    replicas = Replicas(*[[GoneError()] for _ in range(MAX_REPLICAS_TRIED + 1)])
    sent = ask(replicas)
    assert sent[0]["status"] == 503 and code_of(told(sent)) == "replica_lost"
    assert len(replicas.asked) == MAX_REPLICAS_TRIED
    kept = weakref.ref(replicas.asked[0])
    replicas.asked.clear()
    gc.collect()
    assert kept() is None  # no error that is raised again holds its frames


def test_a_request_that_took_a_replica_down_is_not_tried_again():
    replicas = Replicas(["one", GoneError()], ["two", HEAD, b"never"])
    assert code_of(told(ask(replicas))) == "replica_killed" and len(replicas.asked) == 1


def test_a_request_is_blamed_if_it_was_alone_when_its_replica_died():
    suspects = Suspects()

    def die(replica: str, *requests: bytes) -> list[bool]:
        for request in requests:
            suspects.begin(request, replica)
        for request in requests:
            suspects.die(request, replica)
            suspects.end(request, replica)
        return [suspects.blamed(request) for request in requests]

    assert die("one", b"first") == [True]
    assert die("one", b"good", b"bad", b"more") == [False] * 3  # the replica came back; each is tried once more
    suspects.begin(b"good", "two")
    assert die("three", b"bad") == [True] and not suspects.blamed(b"good")
    assert die("four", b"twice", b"twice", b"other")[0] is False  # two clients ask for one thing


def served(app: Any, method: str = "POST", tenant: str = "") -> None:
    """Let a replica's application answer a request to its end."""

    async def run() -> None:
        async for _ in responses(app, ForwardedRequest(method, "/", b"", [], b"body", tenant)):
            pass

    asyncio.run(run())


def test_a_replica_takes_the_tenant_from_the_front():
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["tenant"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    served(GuardMiddleware(app, ApiKeys(["a", "b"]), 1000), tenant="key-of-a")
    assert seen == ["key-of-a"]


@pytest.mark.alone
def test_all_that_ray_calls_a_loss_is_one():
    ray_exceptions = pytest.importorskip("ray.exceptions")
    for name in ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError", "OwnerDiedError"):
        assert issubclass(getattr(ray_exceptions, name), cluster.lost_errors())
    assert not issubclass(ray_exceptions.RayTaskError, cluster.lost_errors())  # the application's own


def test_a_client_that_goes_ends_its_request():
    replicas = Replicas([HEAD, b"a", None])
    ask(replicas, gone=True)
    assert replicas.closed == 1


def test_metrics_of_all_replicas_have_their_names():
    assert b'a_total{replica="two"} 2.0' in told(ask(Replicas(), "/metrics"))
    assert merged_metrics({}) == b""


def test_an_application_hears_that_nobody_listens_any_more():
    heard: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append(await receive())

    async def run() -> None:
        messages = responses(app, ForwardedRequest("POST", "/", b"", [], b"body"))
        assert (await anext(messages))["status"] == 200
        await messages.aclose()
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]


def test_an_applications_failure_is_raised():
    with pytest.raises(LookupError, match="broken"):
        served(AsyncMock(side_effect=LookupError("broken")))


@pytest.mark.parametrize(
    ("nodes", "replicas", "processors"),
    [([8], 2, 4), ([7], 2, 3), ([2], 4, 0.5), ([4, 4], 1, 4), ([4, 4, 4], 2, 4), ([8, 2], 3, 2), ([1], 3, 0.3333)],
)
def test_each_replica_gets_as_many_processors_as_all_find_room_for(nodes, replicas, processors):
    assert shared_resources([Resources(each, 0) for each in nodes], replicas, "auto") == Resources(processors, 0)


def test_each_replica_gets_a_gpu_where_there_are_any():
    nodes = [Resources(8, 2), Resources(32, 0)]
    assert shared_resources(nodes, 2, "auto") == shared_resources(nodes, 2, "cuda") == Resources(4, 1)
    assert shared_resources(nodes, 2, "cpu") == Resources(16, 0)
    for device in ("auto", "cuda"):
        with pytest.raises(ValueError, match="replicas is 3 and the cluster has 2 GPUs"):
            shared_resources(nodes, 3, device)
    with pytest.raises(ValueError, match="too few processors"):
        shared_resources([Resources(0, 0)], 1, "cpu")


@pytest.mark.parametrize(
    ("wrong", "says"), [({"device": "cuda:1"}, "use cuda"), ({"port": 0}, "port is 0"), ({"index": "x"}, "index is")]
)
def test_settings_that_replicas_do_not_have_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        cluster.check(ServerSettings(ray=True, **wrong))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of the bundled model; the address."""
    pytest.importorskip("ray", reason="Ray is not installed")
    with free_socket() as one:
        port = one.getsockname()[1]
    folder = tmp_path_factory.mktemp("kept")
    command = ("serve", "--ray", "--replicas", 2, "--port", port, "--kv-memory", "256MiB", "--kv-store", folder)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    log = folder.with_suffix(".log")
    how = {"env": environment, "stdout": log.open("w"), "stderr": subprocess.STDOUT}
    with how["stdout"], start(*command, "--rows", 4, **how) as served:
        until(lambda: served.poll() is not None or ready(port), log)
        assert served.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
        served.send_signal(signal.SIGINT)
        assert served.wait(PATIENCE) == 0, log.read_text()


def until(true: Any, log: Path | None = None) -> None:
    end = time.monotonic() + 2 * PATIENCE  # Ray starts a dozen processes
    while not true():
        assert time.monotonic() < end, log.read_text() if log else "too late"
        time.sleep(0.1)


def complete(address: str, prompt: str, tokens: int = 24, **more: Any) -> httpx.Response:
    asked = {"model": "bundled", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    return httpx.post(f"{address}/v1/completions", json=asked, timeout=PATIENCE)


def replicas(address: str) -> dict[str, float]:
    """Bytes of each replica's index."""
    found = {}
    for line in httpx.get(f"{address}/metrics", timeout=PATIENCE).text.splitlines():
        if line.startswith("forerun:index_bytes{"):
            found[line.split('replica="')[1].split('"')[0]] = float(line.split()[-1])
    return found


def some_process() -> int:
    """Of one of the replicas."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:forerun:Replica"):
                return int(folder.name)
    raise AssertionError("no replica runs")


def ending(stream: httpx.Response) -> str:
    text = stream.read().decode()
    return "replica_lost" if "replica_lost" in text else text.split()[-1]


@pytest.mark.alone
def test_replicas_answer_alike_and_one_may_die(address):
    prompts = [f"def number_{i}(a, b):\n    return" for i in range(6)]
    alone = {prompt: complete(address, prompt).json()["choices"][0]["text"] for prompt in prompts}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: complete(address, prompt), prompts))
    assert {prompt: each.json()["choices"][0]["text"] for prompt, each in zip(prompts, found, strict=True)} == alone
    until(lambda: len(replicas(address)) == 2)
    first, second = (complete(address, BOOK + end) for end in ("Who?", "Why?"))  # a beginning stays with its replica
    assert first.headers["x-forerun-replica"] == second.headers["x-forerun-replica"]

    before = set(replicas(address))
    with httpx.Client(timeout=PATIENCE) as client, ExitStack() as opened, ThreadPoolExecutor(12) as pool:
        # a request that is alone when its replica dies is to blame for it: two long answers have begun at each
        more = {"model": "bundled", "max_tokens": 2048, "temperature": 1, "stream": True}
        more["logit_bias"] = {"0": -100}  # no end; and samples take longer than quotes
        asked = ({**more, "prompt": f"{number} {BOOK[:800]}"} for number in range(8))
        streams: dict[str, list[httpx.Response]] = {}
        while len(streams) < 2 or min(map(len, streams.values())) < 2:
            stream = client.stream("POST", f"{address}/v1/completions", json=next(asked))
            response = opened.enter_context(stream)  # its head comes with the first token
            streams.setdefault(response.headers["x-forerun-replica"], []).append(response)
        running = [pool.submit(complete, address, prompt, 300) for prompt in prompts * 2]
        time.sleep(0.3)
        os.kill(some_process(), signal.SIGKILL)
        for each in running:  # nothing of them was sent, so another replica answers
            assert each.result().status_code == 200, each.result().text
        ends = [{ending(each) for each in begun} for begun in streams.values()]
        assert sorted(ends, key=str) == [{"[DONE]"}, {"replica_lost"}]
    until(lambda: len(found := set(replicas(address))) == 2 and found != before)
    (new,) = set(replicas(address)) - before
    until(lambda: replicas(address)[new] > 0)  # it begins with what the others have learned
