"""What several threads may do at once: use a model and its engines, and one engine together; and what forks share."""

import copy
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.processes import status_of_a_child
from support.tiny import PROMPTS, tiny
from transformers import PreTrainedModel

import forerun
from forerun.core.block import Block
from forerun.core.fairness import FairLock
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import trie_of
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.trie import entry_points
from forerun.trie.trie import Trie

PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


class Stage:
    """Holds threads up in a model's forward pass, after its first layer, until they are let go."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own, self._pool = threading.local(), ThreadPoolExecutor(4)
        model.model.layers[0].register_forward_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        if (events := getattr(self._own, "events", None)) is not None:
            inside, gate = events
            inside.set()
            assert gate.wait(PATIENCE)

    def enter(self, work: Callable[[], Any]) -> tuple[Future[Any], threading.Event]:
        """Start ``work`` in a thread of its own, up to the middle of its first pass; and what lets it go on."""
        inside, gate = threading.Event(), threading.Event()

        def run() -> Any:
            self._own.events = inside, gate
            return work()

        future = self._pool.submit(run)
        assert inside.wait(PATIENCE)
        return future, gate


def score(scorer: Scorer, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return scorer.score([Block(np.array(prompt), DraftTree.empty(), 0)], [FullCache()])[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("first", ["ours", "own"])
def test_a_pass_and_the_model_s_own_forward_pass_do_not_meet(attention, first):
    model = copy.deepcopy(tiny("mistral"))  # its windows make masks, and "eager" takes one
    model.set_attn_implementation(attention)
    ours, own = Scorer(model), torch.tensor([PROMPTS[1]])

    def ask() -> torch.Tensor:
        with torch.inference_mode():
            return model(own, use_cache=False).logits[0]

    works = {"ours": lambda: score(ours, PROMPTS[0]), "own": ask}
    alone = {name: work() for name, work in works.items()}
    stage = Stage(model)
    second = "own" if first == "ours" else "ours"
    begun, gate = stage.enter(works[first])
    assert torch.equal(works[second](), alone[second])
    gate.set()
    assert torch.equal(begun.result(PATIENCE), alone[first])
    assert model.config._attn_implementation == attention


def test_the_first_of_two_passes_to_end_leaves_the_other_its_attention():
    model = copy.deepcopy(tiny("llama"))
    before, scorers = model.config._attn_implementation, (Scorer(model), Scorer(model))
    alone = [score(scorer, prompt) for scorer, prompt in zip(scorers, PROMPTS, strict=False)]
    stage = Stage(model)
    begun = [stage.enter(lambda i=i: score(scorers[i], PROMPTS[i])) for i in range(2)]
    for (future, gate), expected in zip(begun, alone, strict=True):
        gate.set()
        assert torch.equal(future.result(PATIENCE), expected)
    assert model.config._attn_implementation == before


def test_turns_are_taken_in_the_order_in_which_threads_come():
    lock, order = FairLock(), []

    def take(name: str) -> None:
        with lock:
            order.append(name)

    threads = []
    for name in ("second", "third"):
        lock.__enter__()
        threads.append(threading.Thread(target=take, args=(name,)))
        threads[-1].start()
        wait_until(lambda: len(lock._queue) == 2)
        lock.__exit__(None, None, None)
        take("again")
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["second", "again", "third", "again"]


def test_a_turn_that_is_waited_for_in_vain_is_given_up(monkeypatch):
    lock = FairLock()
    lock._queue.append(0)  # another thread has the turn
    monkeypatch.setattr(lock._changed, "wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lock.__enter__()
    assert list(lock._queue) == [0]


def test_a_text_that_the_garbage_collector_closes_in_a_step_is_let_go_after_it(monkeypatch):
    engine = forerun.Engine(tiny("llama"), "trie")
    alone = forerun.Engine(tiny("llama"), "none").generate([1, 2, 3, 1, 2], max_new_tokens=8).generated
    abandoned: dict[str, Any] = {"text": engine.stream([1, 2, 3], max_new_tokens=30)}
    next(abandoned["text"])
    abandoned["itself"] = abandoned  # so that only the collector finds it
    del abandoned
    [source], live = engine.level.planner.own, []
    propose = source.propose

    def collecting(rows: Any, limits: Any) -> Any:
        gc.collect()
        live.append(len(trie_of(engine.level)._live))
        return propose(rows, limits)

    monkeypatch.setattr(source, "propose", collecting)
    gc.disable()
    try:
        assert engine.generate([1, 2, 3, 1, 2], max_new_tokens=8).generated == alone
    finally:
        gc.enable()
    assert live[0] == 2 and live[-1] == 1 and not engine._lock._queue


def test_what_comes_while_a_thread_waits_for_the_lock_waits_too(monkeypatch):
    lock, order = FairLock(), []

    def job() -> None:
        with lock:
            order.append("job")

    def wait() -> None:
        lock.when_free(job)  # as the garbage collector may
        lock._queue.popleft()  # the other thread leaves

    lock._queue.append(0)  # another thread has the turn
    monkeypatch.setattr(lock._changed, "wait", wait)
    with lock:
        order.append("mine")
    assert order == ["mine", "job"] and not lock._queue


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


CHANGES: dict[str, Callable[[Trie, Path], Any]] = {
    "begin": lambda trie, _: trie.begin(2, "", range(50)), "warm": lambda trie, _: trie.warm("", [range(500)]),
    "extend and outgrow its room": lambda trie, _: trie.extend(1, range(500)),
    "retrieve and outgrow its desk": lambda trie, _: trie.retrieve(1, 512, 8),
    "load": lambda trie, file: trie.load(file), "finish": lambda trie, _: trie.finish(1),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_no_thread_exchanges_arrays_that_another_is_reading(change, monkeypatch, tmp_path):
    trie = Trie()
    for request in range(2):
        trie.begin(request, "", [1, 2, 3, 1, 2], expected=4)
    trie.save(tmp_path / "trie")
    step, other = entry_points.step, threading.Thread(target=lambda: CHANGES[change](trie, tmp_path / "trie"))

    def slow(*args: Any) -> tuple[int, int]:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.1)
            assert other.is_alive()
        return step(*args)

    monkeypatch.setattr(entry_points, "step", slow)
    assert trie.retrieve(0, 8, 4).tokens[0] == 3
    other.join(PATIENCE)
    assert not other.is_alive()


@pytest.mark.parametrize("drafter", [
    "auto",
    *(pytest.param(name, marks=pytest.mark.matrix) for name in ("trie", "lookup", "triforce", "triforce-trie")),
])  # fmt: skip
def test_threads_that_share_an_engine_get_the_texts_that_they_would_get_alone(drafter):
    settings = LongContextConfig(tiny("llama"), gamma1=2, gamma2=5, cache_budget=10, chunk=2, sinks=1, window=4)
    engine = forerun.Engine(tiny("llama"), drafter, settings=settings, prefill_block=4)
    prompts = [[1 + i, 5, 7 + i, 1 + i, 5] * 3 for i in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": True, "seed": 3}
    alone = [forerun.Engine(tiny("llama"), "none").generate(prompt, **options).generated for prompt in prompts]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            together = [*pool.map(lambda prompt: engine.generate(prompt, **options).generated, prompts * 2)]
    finally:
        sys.setswitchinterval(before)
    assert together == alone * 2


def test_a_turn_that_ctrl_c_left_behind_stops_nobody():
    lock, left, ended = FairLock(), threading.Event(), []

    def interrupted() -> None:
        lock.__enter__()  # and no end of it
        left.set()
        time.sleep(0.1)  # the other one waits
        with lock:
            ended.append("interrupted")

    def other() -> None:
        left.wait(PATIENCE)
        with lock:
            ended.append("other")

    threads = [threading.Thread(target=each, daemon=True) for each in (interrupted, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(ended) == ["interrupted", "other"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_forked_process_learns_stays_with_it():
    trie = Trie()  # so large that its arrays are mapped
    trie.warm("", [[1, 2, 3, 4]] * 3)
    trie.begin(0, "", [1, 2])

    def drafted() -> list[Any]:
        return [part.tolist() for part in trie.retrieve(0, 8, 8)]

    def learn() -> bool:
        trie.warm("", [[1, 2, 9, 9, 9]] * 50)
        return trie.tokens("") == 12 + 250

    before = drafted()
    assert status_of_a_child(learn) == 0
    assert drafted() == before and trie.tokens("") == 12


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files without names on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_write_into_a_text():
    cache = FullCache(100, shareable=True)
    store = cache.reserve(range(2), torch.zeros(1, 2, 1, 8), 1)
    assert cache._shared is not None
    store.fill_(1.0)

    def write() -> bool:
        store.fill_(2.0)
        return True

    assert os.WIFSIGNALED(status_of_a_child(write))  # it was not let in
    assert bool((store == 1.0).all())
