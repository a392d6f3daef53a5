"""Texts are generated without drafts until the trie's machine code is there; nothing of them is lost."""

from dataclasses import replace

import pytest
import torch
from support.mocks import draft, opened
from support.tiny import PROMPTS, tiny

from forerun.core.request import Request
from forerun.core.verify import Outcome, verify
from forerun.decoding.row import Row
from forerun.decoding.sources import trie_source
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import Engine
from forerun.models.forward.runtime import default_runtime

ANSWER = [7, 8, 9, 10, 11]
VOCABULARY = 32


class SlowCompilation:
    """Processes that run until the test says otherwise."""

    running = True

    def wait(self) -> None:
        raise AssertionError("nobody should wait for it")


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> SlowCompilation:
    started = SlowCompilation()
    monkeypatch.setattr(trie_source, "compiled_before", lambda: False)
    monkeypatch.setattr(trie_source, "Compilation", lambda: started)
    return started


def step(drafter: TrieSource, row: Row) -> int:
    """One step with a target that always continues ``ANSWER``; the nodes that were drafted."""
    request = row.request
    tree, at = draft(drafter, row, 8), len(request.generated)
    logits = torch.zeros(len(tree) + 1, VOCABULARY)
    for node, position in enumerate([at, *(at + tree.depths)]):
        logits[node, ANSWER[position % len(ANSWER)]] = 1.0
    drafter.learn([row], [Outcome(tree, verify(tree, logits, request), logits)])
    return len(tree)


def waiting_drafter() -> TrieSource:
    drafter = TrieSource(waits=False)
    drafter.warm_up()
    return drafter


def test_a_text_has_drafts_from_when_the_code_is_there(compilation):
    drafter, request = waiting_drafter(), Request([1, 2, 3], 60)
    row = opened(drafter, request)
    assert drafter.read(row, 100) and drafter.promise([row]) == [0]
    assert [step(drafter, row) for _ in range(20)] == [0] * 20
    compilation.running = False
    assert step(drafter, row) > 0
    before = len(request.generated)
    assert step(drafter, row) > 0 and len(request.generated) > before + 2
    row.close()


def test_a_text_that_ended_before_is_drafted_from_afterwards(compilation):
    drafter, early = waiting_drafter(), Request([1, 2, 3], 10)
    row = opened(drafter, early)
    while not early.finish_reason:
        step(drafter, row)
    row.close()
    compilation.running = False
    later = Request([4, *ANSWER[:2]], 8)
    row = opened(drafter, later)
    assert ANSWER[2] in draft(drafter, row, 8).tokens
    row.close()


def test_an_engine_gives_the_same_text_before_and_after(compilation):
    model = tiny("llama")
    expected = Engine(model, "none").generate(PROMPTS[1], max_new_tokens=24).generated
    engine = Engine(model, "trie", _runtime=replace(default_runtime(), waits_for_code=False))
    before = engine.generate(PROMPTS[1], max_new_tokens=24)
    assert not sum(before.stats[0].drafted)
    compilation.running = False
    after = engine.generate(PROMPTS[1], max_new_tokens=24)
    assert sum(after.stats[0].drafted)
    assert before.generated == after.generated == expected
