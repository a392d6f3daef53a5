"""The trie drafter through the engine's eyes: begin, propose and observe in turn, finish."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mocks import draft, opened
from support.tiny import PROMPTS, tiny

from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, verify
from forerun.decoding.row import Row
from forerun.decoding.sources import trie_source
from forerun.decoding.sources.trie_source import LEARN_TOKENS, TrieSource, best_of_rows
from forerun.engine.engine import Engine
from forerun.models.forward.runtime import default_runtime
from forerun.trie import arrays, entry_points, recycled, text_cursor
from forerun.trie.trie import TextUpdate, Trie, TrieConfig

VOCABULARY = 32


def step(drafter: TrieSource, row: Row, answer: list[int], budget: int) -> DraftTree:
    request = row.request
    tree = draft(drafter, row, budget)
    at = len(request.generated)
    following = [at, *(at + tree.depths)]
    logits = torch.zeros(len(following), VOCABULARY)
    for number, position in enumerate(following):
        logits[number, answer[position % len(answer)]] = 1.0
    drafter.learn([row], [Outcome(tree, verify(tree, logits, request), logits)])
    return tree


def generate(drafter: TrieSource, prompt: list[int], answer: list[int], new: int, budget: int = 8) -> int:
    """Generate ``new`` tokens of a repeated ``answer``; the steps it took."""
    request = Request(prompt, new)
    row = opened(drafter, request)
    steps = 0
    while not request.finish_reason:
        step(drafter, row, answer, budget)
        steps += 1
    assert request.generated.tolist() == [answer[i % len(answer)] for i in range(new)]
    row.close()
    return steps


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 20), st.integers(0, 12),
)  # fmt: skip
def test_drafts_stay_within_budget_and_within_what_may_still_be_generated(prompt, answer, new, budget):
    drafter = TrieSource(TrieConfig(capacity=1 << 16))
    request = Request(prompt, new)
    row = opened(drafter, request)
    while not request.finish_reason:
        deepest = request.max_draft_depth
        tree = step(drafter, row, answer, budget)
        assert len(tree) <= budget
        assert tree.depths.max(initial=0) <= deepest
        assert tree.probability is not None
        assert ((tree.probability > 0) & (tree.probability <= 1)).all()
    assert request.generated.tolist() == [answer[i % len(answer)] for i in range(new)]


def test_a_prompt_that_the_model_still_reads_is_not_indexed_for_others():
    drafter, live, waiting = TrieSource(), Request([1, 2, 3], 99), Request(list(range(20_000)), 9)
    row, other = opened(drafter, live), opened(drafter, waiting)
    unread = len(drafter.trie._live[waiting.id].unindexed[0][1])
    for token in range(LEARN_TOKENS):
        live.append(token)
    drafter.promise([row])
    assert drafter.trie.length(live.id) == len(live)
    assert len(drafter.trie._live[waiting.id].unindexed[0][1]) == unread
    drafter.trie.catch_up = lambda *given: pytest.fail("it was indexed")
    other.close()


@pytest.mark.parametrize(("temperature", "known"), [(1.0, True), (float("inf"), False)])
def test_noise_that_would_hide_everything_is_not_told(temperature, known):
    sampler = Sampler("coupled", 3, temperature=temperature)
    drafter, request = TrieSource(), Request([1, 2, 3, 1, 2], 9, sampler=sampler)
    row = opened(drafter, request)
    assert (drafter.trie._live[request.id].noise is not None) == known
    while not request.finish_reason:
        step(drafter, row, [1, 2, 3], 8)
    row.close()
    assert np.isfinite(drafter.trie.snapshot("default")[1]).all()


def test_repetitive_and_copied_answers_take_few_steps():
    answer = list(range(1, 31))
    assert generate(TrieSource(), [9, 9], [1, 2, 3, 4, 5], 100) < 25
    assert generate(TrieSource(), [0, *answer, 0], answer, 30) < 7


@pytest.mark.parametrize("warmed", [True, False])
def test_an_answer_given_before_takes_few_steps_again_and_other_namespaces_learn_nothing(warmed):
    answer, drafter = list(range(1, 31)), TrieSource()
    if warmed:
        drafter.warm("default", [answer])
        drafter.warm("other", [[40, 41]])
        assert drafter.trie.nbytes > 0 and drafter.trie.tokens("other") == 2
    else:
        assert generate(drafter, [0], answer, 30) > 20
    assert generate(drafter, [0], answer, 30) < 8
    other = Request([1], 9, namespace="other")
    row = opened(drafter, other)
    assert not set(answer) - {1} & set(draft(drafter, row, 8).tokens.tolist())


def test_finish_forgets_the_prompt_and_may_come_unannounced():
    drafter = TrieSource()
    row = opened(drafter, Request([1, 2, 1], 5))
    assert len(draft(drafter, row, 4))
    row.close()
    row.close()
    assert drafter.trie.tokens("default") == 0
    assert drafter.trie.kept < 4096


def test_a_text_is_written_whole_and_learned_from_only_where_drafts_were_asked_for(monkeypatch):
    """Where nobody asks it is written in pieces, and the rest at its end; later texts find it all the same."""
    answer = [5, 9, 2, 7, 11, 3, 8]
    asked, unasked, kept = TrieSource(), TrieSource(), []
    for drafter, asks in ((asked, True), (unasked, False)):
        updates, learn = list[TextUpdate](), drafter.trie.step
        monkeypatch.setattr(drafter.trie, "step", lambda new, u=updates, f=learn: u.extend(new) or f(new))
        request = Request([1, 2, 3], 40)
        row = opened(drafter, request)
        while not request.finish_reason:
            if asks:
                step(drafter, row, answer, 0)
            else:
                request.append(answer[len(request.generated) % len(answer)])
                drafter.promise([row])
                assert len(request) - drafter.trie.length(request.id) < LEARN_TOKENS
        row.close()
        kept.append(updates)
    for updates, taught in zip(kept, (40, 0), strict=True):
        assert sum(len(update.new) for update in updates) == 40
        assert sum(len(update.new) - update.untaught for update in updates) == taught
        assert sum(len(update.lists.at) for update in updates) == taught
    for drafter in (asked, unasked):
        request = Request([4, 6], 20)
        row = opened(drafter, request)
        tree = draft(drafter, row, 12)
        node, path = -1, []
        while (node, token := answer[len(path) % 7]) in tree.children:  # outputs begin alike
            node = tree.children[node, token]
            path.append(token)
        assert len(path) > 4


def test_texts_of_all_rows_are_written_together():
    drafter, requests = TrieSource(), [Request([1, 2, n], 40) for n in range(4)]
    rows = [opened(drafter, request) for request in requests]
    for n, request in enumerate(requests):
        for token in range(LEARN_TOKENS - n):
            request.append(token)
    drafter.promise(rows[1:])
    assert {drafter.trie.length(request.id) for request in requests} == {3}
    drafter.promise(rows[:1])
    assert [drafter.trie.length(request.id) for request in requests] == [3 + LEARN_TOKENS - n for n in range(4)]


def test_drafts_on_trial_are_not_learned():
    drafter, request = TrieSource(), Request([1, 2, 3], 20)
    row = opened(drafter, request)
    draft(drafter, row.followed_by([7, 7, 7]), 4)
    assert drafter.trie.length(request.id) == 3
    row.close()


def test_a_nodes_runners_up_are_kept_under_the_two_tokens_before_them(monkeypatch):
    drafter, request, kept = TrieSource(), Request([4, 5], 20), []
    row = opened(drafter, request)
    draft(drafter, row, 4)
    tree = DraftTree(np.array([7, 8, 9, 3]), np.array([-1, 0, 1, 0]))  # 7 -> (8 -> 9, 3)
    logits = torch.zeros(5, VOCABULARY)
    logits[0, 7] = logits[1, 2] = 1.0
    drafter.learn([row], [Outcome(tree, verify(tree, logits, request), logits)])
    learn = drafter.trie.step
    monkeypatch.setattr(drafter.trie, "step", lambda updates: kept.extend(updates) or learn(updates))
    draft(drafter, row, 4)
    rows = kept[0].lists.rows
    assert list(zip(rows.before, rows.last, strict=True)) == [(4, 5), (5, 7), (7, 8), (8, 9), (7, 3)]


def test_after_warm_up_nothing_is_compiled_and_nothing_is_indexed():
    drafter = TrieSource(TrieConfig(capacity=1 << 16, learning_rate=0))
    drafter.warm_up()
    assert drafter.trie.nbytes == 0
    functions = [entry_points.step, arrays.valid, arrays.tight]
    functions += [text_cursor.ingest, text_cursor.publish, text_cursor.withdraw]
    functions += [entry_points.known_suffix, recycled.best_of_rows]
    before = [len(function.signatures) for function in functions]
    for _ in range(60):
        generate(drafter, [1, 2, 3, 1], list(range(1, 30)), 40)
    drafter.warm("default", [range(200)] * 30)
    frozen = np.arange(9)
    frozen.flags.writeable = False
    drafter.trie.begin(-1, "default", frozen)
    drafter.trie.retrieve(-1, np.int64(4), np.int64(4), frozen[::2])
    request = Request([1, 2, 3, 1], 8)
    row = opened(drafter, request)
    request.append(2)
    drafter.promise([row])
    best_of_rows(torch.randn(3, 50))
    assert [len(function.signatures) for function in functions] == before


def test_a_given_trie_is_used_with_its_own_configuration():
    trie = Trie(TrieConfig(capacity=1 << 17))
    assert TrieSource(trie=trie).trie is trie
    with pytest.raises(ValueError, match="config and trie are both given"):
        TrieSource(TrieConfig(), trie)


# Before the trie's machine code is there, texts are generated without drafts


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Processes that run until the test says otherwise."""
    started = SimpleNamespace(running=True, wait=lambda: pytest.fail("nobody should wait for it"))
    monkeypatch.setattr(trie_source, "compiled_before", lambda: False)
    monkeypatch.setattr(trie_source, "Compilation", lambda: started)
    return started


def test_a_text_has_drafts_from_when_the_code_is_there_and_is_drafted_from_afterwards(compilation):
    drafter, answer = TrieSource(waits=False), [7, 8, 9, 10, 11]
    drafter.warm_up()
    assert generate(drafter, [1, 2, 3], answer, 10) == 10
    request = Request([1, 2, 3], 60, namespace="other")
    row = opened(drafter, request)
    assert drafter.read(row, 100) and drafter.promise([row]) == [0]
    assert [len(step(drafter, row, answer, 8)) for _ in range(20)] == [0] * 20
    compilation.running = False
    assert len(step(drafter, row, answer, 8))
    before = len(request.generated)
    assert len(step(drafter, row, answer, 8)) and len(request.generated) > before + 2
    row.close()
    later = opened(drafter, Request([4, *answer[:2]], 8))  # in the namespace of the text that ended before
    assert answer[2] in draft(drafter, later, 8).tokens


def test_an_engine_gives_the_same_text_before_and_after_the_code_is_there(compilation):
    model, options = tiny("llama"), {"max_new_tokens": 24}
    expected = Engine(model, "none").generate(PROMPTS[1], **options).generated
    engine = Engine(model, "trie", _runtime=replace(default_runtime(), waits_for_code=False))
    for running in (True, False):
        compilation.running = running
        found = engine.generate(PROMPTS[1], **options)
        assert found.generated == expected and any(found.stats[0].drafted) is not running
