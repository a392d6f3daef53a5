"""The scheduler: many clients, one thread, places by bytes, fair shares, and ends of every kind."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from support.batches import engine, prompt
from support.live_server import PATIENCE, until
from support.mocks import Silent

from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.engine.prefix_sharing import PrefixSharing
from forerun.engine.result import Commit
from forerun.server import scheduler
from forerun.server.admission import Admission, Ending, FairShare, QueueFullError, ScheduledRequest, SchedulerLimits
from forerun.server.calls import LoopDispatcher
from forerun.server.scheduler import Scheduler
from forerun.server.step_shares import MIN_SHARED_DRAFT, StepShares
from forerun.tensor_parallel.channel import ParallelError


class Client:
    """Collects what it is told; can hold the scheduler's thread up at its first tokens."""

    def __init__(self, held: bool = False) -> None:
        self.tokens: list[int] = []
        self.endings: list[Ending] = []
        self.began, self.gate, self.ended = threading.Event(), threading.Event(), threading.Event()
        if not held:
            self.gate.set()

    def on_commit(self, commit: Commit) -> None:
        self.tokens += commit.tokens
        self.began.set()
        assert self.gate.wait(PATIENCE)

    def on_end(self, how: Ending) -> None:
        self.endings.append(how)
        self.ended.set()

    def wait(self) -> Ending:
        assert self.ended.wait(PATIENCE)
        assert len(self.endings) == 1
        return self.endings[0]


class SchedulerSetup:
    """An engine with a scheduler."""

    def __init__(self, one: Engine | None = None, **limits: Any) -> None:
        self.engine = one or engine("trie")
        self.place = self.engine.batch().needs(self.request(prompt(20)))
        memory = limits.pop("places", 100) * self.place
        self.scheduler = Scheduler(self.engine, SchedulerLimits(memory, **limits))

    def request(self, tokens: list[int], new: int = 12, **options: Any) -> Request:
        return self.engine.requests([tokens], max_new_tokens=new, **options)[0]

    def submit(self, client: Client, request: Request | None = None, **options: Any) -> ScheduledRequest:
        request = request or self.request(prompt(20))
        return self.scheduler.submit(request, client.on_commit, client.on_end, **options)

    def hold(self, **options: Any) -> tuple[Client, ScheduledRequest]:
        """A client that has its first tokens, at which the scheduler's thread waits."""
        client = Client(held=True)
        ticket = self.submit(client, **options)
        assert client.began.wait(PATIENCE)
        return client, ticket


@pytest.fixture
def server() -> Iterator[Callable[..., SchedulerSetup]]:
    """Builds a ``SchedulerSetup`` that ends with the test."""
    with ExitStack() as stack:

        def build(**given: Any) -> SchedulerSetup:
            built = SchedulerSetup(**given)
            stack.callback(built.scheduler.close)
            return built

        yield build


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["trie", "none", "triforce-trie"])
def test_each_client_gets_the_text_it_would_get_alone(drafter, server):
    one, alone = server(one=engine(drafter), rows=3, places=3), engine("none")
    prompts = [prompt(5 + 3 * n, n) for n in range(10)]
    wanted = [alone.generate([p], max_new_tokens=12).generated[0] for p in prompts]

    def ask(tokens: list[int]) -> list[int]:
        client = Client()
        one.submit(client, one.request(tokens), tenant=f"tenant {len(tokens) % 3}")
        assert client.wait() == "finished"
        return client.tokens

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == wanted
    assert (one.scheduler.running, one.scheduler.waiting, one.scheduler.usage) == (0, 0, 0)


def test_no_more_runs_than_there_is_room_for(server):
    one = server(places=2, rows=5)
    (first, _), second, third = one.hold(), Client(), Client()
    one.submit(second)
    last = one.submit(third)
    assert one.scheduler.running <= 2 and one.scheduler.usage <= 1 and last.admitted is None
    first.gate.set()
    assert [client.wait() for client in (first, second, third)] == ["finished"] * 3
    assert last.admitted is not None and last.ending == "finished"


def test_what_can_never_run_is_refused(server):
    one = server(places=1)
    with pytest.raises(ValueError, match=r"needs .* bytes for keys and values"):
        one.submit(Client(), one.request(prompt(60), 40))
    for name in ("memory", "rows", "step"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            SchedulerLimits(**{"memory": 1, name: 0})


def test_a_deadline_ends_a_request_with_what_it_has(server):
    one = server(places=1)
    (first, ticket), late = one.hold(), Client()
    one.submit(late, deadline=0.0)
    ticket.deadline = 0.0
    first.gate.set()
    assert (first.wait(), late.wait()) == ("deadline", "deadline")
    assert first.tokens and not late.tokens


def test_who_goes_frees_the_place_at_once(server):
    one = server(places=1)
    (first, running), second, third = one.hold(), Client(), Client()
    waiting = one.submit(second)
    one.submit(third)
    one.scheduler.cancel(waiting)
    one.scheduler.cancel(running)
    first.gate.set()
    assert (first.wait(), second.wait(), third.wait()) == ("cancelled", "cancelled", "finished")
    one.scheduler.cancel(running)  # gone already
    assert 0 < len(first.tokens) < 12 and not second.tokens
    assert first.tokens == third.tokens[: len(first.tokens)]


def test_a_client_is_told_although_its_row_cannot_be_let_go_of(server, monkeypatch):
    one = server()
    (first, running), second, leave = one.hold(), Client(), PrefixSharing.leave

    def fail(self: PrefixSharing, row: Any) -> None:
        leave(self, row)
        if row.request is running.request:
            raise RuntimeError("no memory")

    monkeypatch.setattr(PrefixSharing, "leave", fail)
    one.scheduler.cancel(running)
    one.submit(second)
    first.gate.set()
    assert first.wait() == "cancelled" and second.wait() == "finished" and one.scheduler.ready


def ticket(tenant: str, needs: int = 1, new: int = 1) -> ScheduledRequest:
    return ScheduledRequest(Request([1], new), tenant, lambda commit: None, lambda how: None, needs=needs)


def test_tenants_get_equal_shares():
    waiting, order = Admission(SchedulerLimits(1, rows=1)), []
    assert [waiting.add(ticket(tenant)) for tenant in "aaaaabbc"] == [None] * 8
    while (ahead := waiting.next()) is not None:
        waiting.started()
        assert waiting.remove(ahead) and not waiting.remove(ahead)
        waiting.serve(ahead.tenant, 10)
        order.append(ahead.tenant)
        if len(order) == 4:
            waiting.add(ticket("d"))  # it was away, and does not overtake for what it did not use
            waiting.add(ticket("d"))
    assert "".join(order) == "abcabdadaa"
    assert not waiting.waiting


def test_a_share_is_equal_lent_and_partly_kept():
    one = FairShare(8, tenants=3, reserve=1)
    while one.allows("a", 1):
        one.acquire("a", 1)
    assert one.used_by("a") == 7  # one is reserved for those who have none
    assert one.allows("b", 1) and one.lender("b") == "a"
    one.acquire("b", 1)
    assert not one.allows("b", 1) and not one.allows("c", 1)
    one.release("a", 1)
    assert one.allows("b", 1) and not one.allows("a", 1)  # what comes back is for those with less than their share
    alone = FairShare(8, reserve=1)
    alone.acquire("a", 7)
    assert alone.allows("a", 1) and alone.lender("a") is None


def started(one: Admission) -> list[ScheduledRequest]:
    """Start all that can."""
    found = list[ScheduledRequest]()
    while (ahead := one.next()) is not None:
        one.started()
        found.append(ahead)
    return found


def test_who_floods_the_queue_leaves_others_their_share():
    one = Admission(SchedulerLimits(100, rows=4, waiting=8, tenants=2))
    for _ in range(11):
        one.add(ticket("flood"))
        started(one)
    assert (len(one.running), one.waiting) == (3, 8)  # a row is kept for who has none
    with pytest.raises(QueueFullError):
        one.check_places("flood", 1)
    one.check_places("other", 4)
    assert one.add(ticket("other")) is not None  # the newest of the flood makes room
    first = one.next()
    assert first.tenant == "other"
    displaced = [one.add(ticket("other")) for _ in range(4)]
    assert [each.tenant for each in displaced if each is not None] == ["flood"] * 3 and one.waiting == 8
    with pytest.raises(QueueFullError):
        one.add(ticket("other"))  # beyond its own share


@pytest.mark.parametrize("waiting", [0, 2])
def test_rows_that_are_free_take_no_place_to_wait(waiting):
    """Also if several texts come before the next one starts."""
    one, texts = Admission(SchedulerLimits(100, rows=3, waiting=waiting)), 3 + waiting
    one.check_places("a", texts)
    for _ in range(texts):
        assert one.add(ticket("a")) is None
    with pytest.raises(QueueFullError):
        one.check_places("a", 1)
    running = [one.next() for _ in range(3)]
    assert all(running) and one.waiting == waiting
    with pytest.raises(QueueFullError):
        one.add(ticket("a"))
    for each in running:
        assert each is not None and one.remove(each)
    one.started()
    started(one)
    assert one.waiting == 0
    one.check_places("a", 3)


def test_who_fills_the_memory_leaves_others_a_row_of_it():
    one = Admission(SchedulerLimits(160, rows=16, tenants=2))
    for _ in range(6):
        one.add(ticket("large", needs=30))
    assert len(started(one)) == len(one.running) == 5
    one.add(ticket("other", needs=10))
    one.add(ticket("other", needs=10))
    assert [getattr(one.next(), "tenant", None) for _ in range(2)] == ["other", None]


def test_the_time_to_come_again_is_that_of_what_runs():
    one = Admission(SchedulerLimits(100, rows=2, waiting=8))
    assert one.retry_after("a") == 1
    for left in (10, 100):
        one.add(request := ticket("a", new=10 + left))
        assert one.next() is request
        request.request.take([5] * 10, None)
        request.admitted = time.monotonic() - 10  # a second for each token
    assert 9 <= one.retry_after("a") <= 11
    one.add(ticket("a"))
    assert 99 <= one.retry_after("a") <= 101
    one.add(ticket("a"))
    assert 108 <= one.retry_after("a") <= 112


def fifteen_and_one() -> list[Any]:
    return [ticket("flood") for _ in range(15)] + [ticket("other")]


def learn_line(shares: StepShares, running: list[Any], fixed: float, proposed: list[int]) -> None:
    """Record steps whose tokens all cost 1, beside a fixed cost; every tenth is interrupted, and 20 times as long."""
    for step in range(200):
        commit = Commit(running[0].request, [1], 0, proposed[step % len(proposed)])
        shares.record([("flood", commit)], (fixed + 1 + commit.proposed) * (20 if step % 10 == 7 else 1))


@pytest.mark.parametrize(
    ("fixed", "rows", "draft"), [(0, 1, MIN_SHARED_DRAFT), (24, 5, MIN_SHARED_DRAFT), (149, 15, 9), (10**6, 15, 64)]
)
def test_a_tenants_step_waits_no_longer_for_others_than_it_takes(fixed, rows, draft):
    """Where a token costs as much as the first, one row of the others steps along; where it costs nothing, all do."""
    shares, running = StepShares(), fifteen_and_one()
    learn_line(shares, running, fixed, [2**place - 1 for place in range(11)])
    plans = [shares.plan(running) for _ in range(15)]
    assert all(running[-1].request.id not in plan.skipping for plan in plans)
    assert {len(running) - 1 - len(plan.skipping) for plan in plans} == {rows}
    assert min(min(plan.budgets.values()) for plan in plans) >= draft
    assert all(running[-1].request.id not in plan.budgets for plan in plans)
    turns = [sum(each.request.id not in plan.skipping for plan in plans) for each in running[:-1]]
    assert max(turns) - min(turns) <= 1  # the others take turns
    assert shares.plan(running[:15]) == (set(), {})


def test_steps_of_one_length_do_not_say_that_tokens_are_free():
    """Their times differ by noise alone, whose slope may be negative."""
    shares, running, chance = StepShares(), fifteen_and_one(), random.Random(0)
    for _ in range(500):
        count = chance.choice((0, 1, 2))
        shares.record([("flood", Commit(running[0].request, [1], 0, count))], chance.uniform(5, 20))
    plan = shares.plan(running)
    assert sum(1 + plan.budgets[each] for each in plan.budgets) <= 2 * 2 * 3


def test_a_tenant_that_is_alone_leaves_room_for_others_to_come():
    shares, running = StepShares(tenants=2), fifteen_and_one()[:15]
    learn_line(shares, running, 35, [2**place - 1 for place in range(11)])
    resting, budgets = shares.plan(running)
    assert not resting and set(budgets.values()) == {10}  # 150 tokens cost three times as much as 35 + 15


def test_no_text_changes_where_rows_sit_steps_out(server):
    one = server(tenants=2)
    alone = engine("none").generate([prompt(9, n) for n in range(4)], max_new_tokens=40).generated
    clients = [Client() for _ in range(4)]
    for number, client in enumerate(clients):
        one.submit(client, one.request(prompt(9, number), 40), tenant="other" if number == 3 else "flood")
    assert [client.wait() for client in clients] == ["finished"] * 4
    assert [client.tokens for client in clients] == alone


def test_who_loses_a_place_hears_of_it(server):
    one = server(places=1, waiting=1, tenants=2)
    (first, _), second, other = one.hold(tenant="flood"), Client(), Client()
    one.submit(second, tenant="flood")
    one.submit(other, tenant="other")
    assert second.wait() == "displaced"
    first.gate.set()
    assert (first.wait(), other.wait()) == ("finished", "finished")


def test_the_lock_is_free_while_a_prompt_is_admitted(server):
    one, client, free = server(), Client(), list[bool]()
    admit = one.scheduler._batch.admit

    def look() -> None:
        free.append(one.scheduler._changed.acquire(timeout=1))
        one.scheduler._changed.release()

    with ThreadPoolExecutor(1) as other:
        one.scheduler._batch.admit = lambda *given, **more: other.submit(look).result() or admit(*given, **more)
        one.submit(client)
        assert client.wait() == "finished" and free == [True]


def test_a_client_or_a_listener_that_fails_stops_nobody(server):
    fail = Mock(side_effect=ConnectionResetError("broken in the test"))
    one, deaf, good, other = server(rows=1), Client(), Client(), Client()
    one.scheduler._on_finished = fail
    one.scheduler.submit(one.request(prompt(9)), fail, deaf.on_end)
    ticket = one.scheduler.submit(one.request(prompt(9)), good.on_commit, fail)
    one.submit(other)
    assert (deaf.wait(), other.wait()) == ("cancelled", "finished")
    assert ticket.ending == "finished" and good.tokens and one.scheduler.ready


def test_the_end_does_not_wait_for_a_step_without_end(server, monkeypatch):
    monkeypatch.setattr(scheduler, "LAST_STEP_SECONDS", 0.05)
    one = server()
    client, _ = one.hold()
    one.scheduler.close()
    assert not client.ended.is_set() and one.scheduler._thread.is_alive()
    client.gate.set()
    client.wait()


def test_free_memory_goes_back_once_when_nobody_has_come_for_a_while(server, monkeypatch):
    times, gone = list[bool](), threading.Event()
    monkeypatch.setattr(scheduler, "give_back", lambda: times.append(one.scheduler.busy) or gone.set())
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.01)
    one = server()
    for round_ in range(1, 3):
        client = Client()
        one.submit(client)
        assert client.wait() == "finished"
        assert gone.wait(PATIENCE)
        gone.clear()
        assert not gone.wait(5 * scheduler.IDLE_SECONDS)  # an idle server sleeps
        assert times == [False] * round_


def test_nothing_is_kept_of_requests_that_have_ended(server):
    one = server(rows=3, places=3)

    def ask(number: int) -> list[weakref.ref[Any]]:
        request, client = one.request(prompt(10 + number, number)), Client(held=True)
        ticket = one.submit(client, request)
        if number % 3 == 0:
            one.scheduler.cancel(ticket)
        client.gate.set()
        client.wait()
        return [weakref.ref(each) for each in (request, ticket, client)]

    with ThreadPoolExecutor(4) as pool:
        told = [each for found in pool.map(ask, range(12)) for each in found]
    one.scheduler.close()  # its thread may still hold the last one
    gc.collect()
    assert [each() for each in told if each() is not None] == []


def test_a_step_that_fails_ends_what_ran_and_nothing_else(server):
    one = server(one=Engine(engine().target.model, Silent()))
    planner = one.engine.level.planner
    learn, planner.learn = planner.learn, Mock(side_effect=LookupError("the planner failed"))
    bad, good = Client(), Client()
    ticket = one.submit(bad)
    assert bad.wait() == "error" and isinstance(ticket.request.error, LookupError)
    planner.learn = learn
    one.submit(good)
    assert good.wait() == "finished"


def test_closing_waits_for_those_that_run_and_takes_no_more(server):
    one = server(places=1)
    first, second = Client(), Client()
    one.submit(first)
    one.submit(second)
    one.scheduler.close(patience=PATIENCE)
    assert (first.wait(), second.wait()) == ("finished", "finished")
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(Client())


def test_closing_at_once_ends_all(server):
    one = server(places=1)
    (first, _), second = one.hold(), Client()
    one.submit(second)
    closing = threading.Thread(target=one.scheduler.close)
    closing.start()
    first.gate.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert second.wait() == "cancelled" and first.wait() in ("cancelled", "finished")


def test_a_loop_is_woken_once_for_all_that_gathers_and_takes_it_in_order():
    fails = Mock(side_effect=LookupError("broken in the test"))
    loop, found, failures = asyncio.SelectorEventLoop(), list[int](), list[Any]()
    loop.call_soon_threadsafe = woken = Mock(wraps=loop.call_soon_threadsafe)
    loop.set_exception_handler(lambda _, told: failures.append(told["exception"]))
    post = LoopDispatcher(loop)
    for number in range(4):
        post.put(fails if number == 1 else partial(found.append, number))
    assert found == [] and woken.call_count == 1
    loop.run_until_complete(asyncio.sleep(0.01))
    assert found == [0, 2, 3]  # one that fails takes no other with it
    assert [type(one) for one in failures] == [LookupError]
    post.put(partial(found.append, 4))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert found[-1] == 4 and woken.call_count == 2
    loop.close()
    post.put(partial(found.append, 5))  # nobody listens any more, and that is no error


def test_a_thread_that_cannot_go_on_ends_everybody_and_says_so(server):
    one = server(places=1)
    (first, _), second = one.hold(), Client()
    one.submit(second)
    one.scheduler._admit = Mock(side_effect=KeyError("a mistake of ours"))
    first.gate.set()
    assert (first.wait(), second.wait()) == ("error", "error")
    until(lambda: one.scheduler.failed)
    assert not one.scheduler.ready and not one.scheduler.busy
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(Client())


def test_processes_that_are_out_of_step_end_the_server(server):
    source = Silent()
    source.propose = Mock(side_effect=ParallelError("rank 1 is gone"))
    one, client = server(one=Engine(engine().target.model, source, prune_drafts=False)), Client()
    one.submit(client)
    assert client.wait() == "error"
    one.scheduler._thread.join(PATIENCE)
    assert not one.scheduler.ready
