"""The index against dictionaries of tuples, and what it promises about memory, files and tenants."""

import copy
import dataclasses
import doctest
import errno
import gc
import os
import random
import re
import stat
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun.trie
from forerun.core.tree import ROOT, DraftTree
from forerun.trie import logistic_mixer, text_cursor, trie_file
from forerun.trie import trie as trie_module
from forerun.trie.arrays import ORDERS, SIZE_CLASSES, Index, find, mix
from forerun.trie.contexts import KEPT_FOLLOWERS
from forerun.trie.gapped_match import SKIP_MARK, substitute_hash
from forerun.trie.trie import Draft, TextUpdate, Trie, TrieConfig, TrieFileError

Path_ = tuple[int, ...]
Counts = Counter[tuple[Path_, int]]

SMALL = TrieConfig(capacity=1 << 16)
START = (-1,) * ORDERS

token = st.integers(0, 3)
text = st.lists(token, max_size=14)
prompts = st.lists(token, min_size=1, max_size=14)


class Oracle:
    """The same index, slowly: what followed every context of every text, counted in a dictionary."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[list[int]]] = {}
        self.live: dict[int, tuple[str, list[int], list[int]]] = {}

    def begin(self, request: int, namespace: str, prompt: list[int]) -> None:
        self.live[request] = (namespace, list(prompt), [])

    def extend(self, request: int, tokens: list[int]) -> None:
        self.live[request][2].extend(tokens)

    def finish(self, request: int) -> None:
        namespace, _, output = self.live.pop(request)
        if output:
            self.outputs.setdefault(namespace, []).append(output)

    def withdraw(self, namespace: str) -> None:
        if self.outputs.get(namespace):
            self.outputs[namespace].pop(0)

    def shared(self, namespace: str) -> Counts:
        growing = [output for space, _, output in self.live.values() if space == namespace]
        return sum((contexts(output) for output in [*self.outputs.get(namespace, []), *growing]), Counter())

    def own(self, request: int) -> Counts:
        return contexts(self.live[request][1] + self.live[request][2])


def contexts(tokens: list[int]) -> Counts:
    """How often each token followed each context of one to ``ORDERS`` tokens."""
    padded = [*START, *tokens]
    pairs = [(tuple(padded[i - n : i]), padded[i]) for i in range(ORDERS, len(padded)) for n in range(1, ORDERS + 1)]
    return Counter(pairs)


def hash_of(context: Path_) -> np.uint64:
    hashed = np.uint64(0)
    for token in context:
        hashed = np.uint64(mix(hashed, token))
    return hashed


def followers(index: Index, context: Path_) -> dict[int, int]:
    """What the index counted behind a context; checks the context's own count."""
    slot = find(index, hash_of(context))
    if slot == 0:
        return {}
    value, total = int(index.slots[slot].value), int(index.slots[slot].total)
    if value >= 0:
        return {value: total}
    block = -1 - value
    size = int(index.blocks[block].followers)
    assert size >= 2
    found = {int(row.token): int(row.count) for row in index.blocks[block + 1 : block + 1 + size]}
    assert len(found) == size
    assert sum(found.values()) == total
    assert 0 <= index.blocks[block].last <= size
    return found


def counts(index: Index, known: Counts) -> Counts:
    """All counts of an index, whose contexts must be among those of ``known``."""
    every = {context for context, _ in known}
    found = Counter({(c, token): n for c in every for token, n in followers(index, c).items()})
    pairs = [
        np.uint64(mix(hash_of(context), SKIP_MARK + row)) for context in every if len(context) == 2 for row in (0, 1)
    ]
    beside = [
        *(np.uint64(substitute_hash(token)) for token in {token for _, token in known}),
        *pairs,
    ]  # what matches count
    assert len({context for context, _ in found}) + sum(find(index, one) != 0 for one in beside) == index.state[0].slots
    return found


def check_memory(index: Index) -> None:
    """Every slot and row of a block is in use, free or untouched."""
    free, slot = 0, int(index.state[0].slot_free)
    while slot:
        free, slot = free + 1, int(index.slots[slot].chain)
    assert index.state[0].slots + free == index.state[0].slot_top - 1
    rows = 0
    for size_class in range(SIZE_CLASSES):
        block = int(index.free_blocks[size_class])
        while block:
            rows, block = rows + (1 << size_class), int(index.blocks[block].free)
    assert index.state[0].rows + rows == index.state[0].block_top - 1


def shared(trie: Trie, namespace: str, known: Counts) -> Counts:
    space = trie._shared.get(namespace)
    return Counter() if space is None else counts(space.index, known)


def check(trie: Trie, oracle: Oracle) -> None:
    for namespace in "ab":
        assert shared(trie, namespace, oracle.shared(namespace)) == oracle.shared(namespace)
    assert trie._live.keys() == oracle.live.keys()
    for request, live in trie._live.items():
        assert counts(live.own, oracle.own(request)) == oracle.own(request)
        assert trie.length(request) == sum(map(len, oracle.live[request][1:]))
    for index in [*(space.index for space in trie._shared.values()), *(live.own for live in trie._live.values())]:
        check_memory(index)


def paths(draft: Draft) -> list[Path_]:
    """The path from the context of each node; checks that the draft is a tree."""
    tree = DraftTree(draft.tokens, draft.parents, probability=draft.probability)
    found: list[Path_] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((token,) if parent == ROOT else (*found[parent], token))
    return found


def agreed(draft: Draft, tokens: list[int]) -> int:
    """Tokens of the draft's path that follows a text."""
    found = set(paths(draft))
    return max((n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in found), default=0)


operation = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.sampled_from("ab"), prompts),
    st.tuples(st.just("extend"), st.integers(0, 3), text),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("withdraw"), st.sampled_from("ab")),
)


def play(trie: Trie, oracle: Oracle, operations: list[Any]) -> None:
    for name, subject, *rest in operations:
        if name == "withdraw" or (name == "begin") == (subject not in oracle.live):
            getattr(trie, name)(subject, *rest)
            getattr(oracle, name)(subject, *rest)


@given(st.lists(operation, max_size=25))
def test_counts_of_every_namespace_and_every_request_equal_the_oracles(operations):
    trie, oracle = Trie(SMALL), Oracle()
    play(trie, oracle, operations)
    check(trie, oracle)


@given(st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=8))
def test_withdrawing_every_output_leaves_nothing(sequences):
    trie, oracle = Trie(SMALL), Oracle()
    trie.warm("a", sequences)
    oracle.outputs["a"] = [sequence for sequence in sequences if sequence]
    for _ in range(len(sequences) + 1):
        check(trie, oracle)
        trie.withdraw("a")
        oracle.withdraw("a")
    index = trie._shared["a"].index
    assert trie.tokens("a") == index.state[0].slots == index.state[0].rows == 0


def test_many_contexts_and_followers_are_counted_through_every_growth():
    dice = random.Random(0)
    trie, oracle = Trie(TrieConfig()), Oracle()
    tokens = range(KEPT_FOLLOWERS)
    oracle.outputs["a"] = [[min(dice.choice(tokens), dice.choice(tokens)) for _ in range(500)] for _ in range(12)]
    trie.warm("a", oracle.outputs["a"])
    for _ in range(3):
        check(trie, oracle)
        for _ in range(4):
            trie.withdraw("a")
            oracle.withdraw("a")


def test_indexing_a_token_reads_a_bounded_number_of_followers_however_many_there_are():
    for count in (1000, 8000):
        trie = Trie()
        trie.begin(0, "a", [token for follower in range(1, count) for token in (0, follower)])
        trie.retrieve(0, 1, 1)  # reads the prompt
        own = trie._live[0].own
        block = -1 - int(own.slots[find(own, hash_of((0,)))].value)
        assert own.blocks[block].followers == KEPT_FOLLOWERS  # what is read to find one, and to replace one
        assert own.slots[find(own, hash_of((0,)))].total == count - 1
        assert own.state[0].rows <= 2 * KEPT_FOLLOWERS + 2


def test_frequent_followers_and_the_latest_stay_where_many_follow_once():
    trie = Trie()
    often = [token for _ in range(3) for follower in range(1, 30) for token in (0, follower)]
    trie.warm("a", [often + [token for follower in range(100, 900) for token in (0, follower)]])
    trie.begin(0, "a", [5, 0])
    index = trie._shared["a"].index
    slot = find(index, hash_of((0,)))
    block = -1 - int(index.slots[slot].value)
    rows = index.blocks[block + 1 : block + 1 + KEPT_FOLLOWERS]
    found = {int(row.token): int(row.count) for row in rows}
    assert {token: found[token] for token in range(1, 30)} == dict.fromkeys(range(1, 30), 3)
    assert rows[index.blocks[block].last - 1].token == 899 and 898 in found
    assert int(index.slots[slot].total) == 87 + 800


@given(st.lists(st.lists(st.integers(1, 200), max_size=150), min_size=1, max_size=5))
def test_withdrawing_followers_that_others_replaced_leaves_nothing(followers):
    trie = Trie()
    trie.warm("a", [[token for follower in each for token in (0, follower)] for each in followers])
    index = trie._shared["a"].index
    for _ in followers:
        check_memory(index)
        slot = find(index, hash_of((0,)))
        if slot and index.slots[slot].value < 0:
            block = -1 - int(index.slots[slot].value)
            rows = index.blocks[block + 1 : block + 1 + int(index.blocks[block].followers)]
            assert 2 <= len(rows) <= KEPT_FOLLOWERS and rows["count"].sum() <= index.slots[slot].total
        trie.withdraw("a")
    assert trie.tokens("a") == index.state[0].slots == index.state[0].rows == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), text, st.booleans())
def test_a_prompt_that_is_read_in_pieces_drafts_as_one_that_is_read_at_once(prompt, piece, output, caught_up):
    whole, parts = Trie(), Trie()
    whole.begin(0, "a", prompt)
    with pytest.MonkeyPatch.context() as patch:
        sizes: list[int] = []
        ingest = text_cursor.ingest
        patch.setattr(trie_module, "PROMPT_PIECE_TOKENS", piece)
        patch.setattr(text_cursor, "ingest", lambda *given: (sizes.append(len(given[2])), ingest(*given)))
        parts.begin(0, "a", prompt)
        assert parts.length(0) == len(prompt)
        while caught_up and not parts.catch_up(0, 1000):
            pass
        parts.extend(0, output)
        assert parts.catch_up(0, 1)
    assert sum(sizes) == len(prompt) and max(sizes) <= piece
    whole.extend(0, output)
    assert listed(whole.retrieve(0, 20, 9)) == listed(parts.retrieve(0, 20, 9))


def test_a_step_of_several_texts_is_what_its_parts_are_even_where_they_outgrow_their_room():
    dice, together, apart, generated = np.random.default_rng(1), Trie(SMALL), Trie(SMALL), 0
    for step in range(24):
        for request in range(3) if step % 4 == 0 else ():
            for trie in (together, apart):
                trie.finish(request)
                trie.begin(request, "a", [1, 2, request], expected=4)
        new = [dice.integers(0, 40, dice.integers(0, 90)) for _ in range(3)]
        generated += sum(map(len, new))
        pending = [dice.integers(0, 40, dice.integers(0, 3)) for _ in range(3)]
        updates = zip(range(3), new, pending, (0, 6, 20), strict=True)
        drafts = together.step(
            [TextUpdate(n, tokens, pending=trial, budget=size, max_depth=5) for n, tokens, trial, size in updates]
        )
        for request in range(3):
            apart.extend(request, new[request])
        for request, size, draft in zip(range(3), (0, 6, 20), drafts, strict=True):
            assert listed(draft) == listed(apart.retrieve(request, size, 5, pending[request]))
    assert together.tokens("a") < generated  # old outputs went


@given(st.lists(operation, max_size=12), prompts, text, st.integers(-1, 70), st.integers(-1, 9))
def test_drafts_are_trees_within_budget_and_depth_of_tokens_that_were_seen(
    operations, prompt, output, budget, max_depth
):
    trie, oracle = Trie(SMALL), Oracle()
    play(trie, oracle, [*operations, ("finish", 0), ("begin", 0, "a", prompt), ("extend", 0, output)])
    draft = trie.retrieve(0, budget, max_depth)
    nodes = paths(draft)
    assert len(nodes) <= max(budget, 0)
    assert max(map(len, nodes), default=0) <= max(max_depth, 0)
    assert len(set(nodes)) == len(nodes)
    seen = {token for _, token in oracle.own(0) + oracle.shared("a")}
    taken_back = {token for name, *rest in operations if name == "extend" for token in rest[1]}  # may be seen last
    assert set(draft.tokens.tolist()) <= seen | taken_back
    above = np.where(draft.parents == ROOT, 1.0, draft.probability[draft.parents])
    assert ((draft.probability > 0) & (draft.probability <= above)).all()


def listed(draft: Draft) -> list[list[float]]:
    return [part.tolist() for part in draft]


@given(prompts, text, text, st.integers(1, 40), st.floats(0, 1))
def test_pending_tokens_change_nothing_and_a_least_probability_only_cuts(prompt, output, pending, budget, least):
    trie, oracle = Trie(SMALL), Oracle()
    play(trie, oracle, [("begin", 0, "a", prompt), ("extend", 0, output)])
    whole = trie.retrieve(0, budget, 9)
    paths(trie.retrieve(0, budget, 9, pending))
    check(trie, oracle)
    assert listed(trie.retrieve(0, budget, 9)) == listed(whole)
    (cut,) = trie.step([TextUpdate(0, budget=budget, max_depth=9, least=least)])
    likely = int((whole.probability >= least).sum())
    assert listed(cut) == [part[:likely].tolist() for part in whole]


@pytest.mark.parametrize("pending", [0, 1, 3, 4, 6])
def test_how_long_the_end_of_a_text_was_seen_before_is_known_without_a_draft(pending):
    """Whether its last tokens are learned yet or not, in the prompt and in what others of the namespace wrote."""
    trie = Trie(SMALL)
    trie.warm("a", [[40, 41, 42, 43, 44, 45, 46]])
    prompt, generated = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [20, 3, 4, 5, 6, 7]

    def known(tokens: list[int], namespace: str = "") -> int:
        split = len(tokens) - pending
        trie.begin(0, namespace, prompt)
        trie.extend(0, tokens[:split])
        (found,) = trie.known_suffixes([(0, np.array([*prompt, *tokens]))])
        trie.finish(0)
        trie.withdraw(namespace) if not namespace else None
        return found

    assert known(generated) == 5
    assert known([*generated, 21]) == 0
    assert known([20, 20, 20, 20, 20, 3, 4]) == 0  # two tokens are too few to be looked for
    other = [20, 21, 42, 43, 44, 45]
    assert known(other, "a") == 4
    assert known(other, "b") == 0


def test_a_prompt_that_is_not_indexed_yet_has_no_known_suffix():
    trie = Trie(SMALL)
    trie.begin(0, "", [1, 2, 3] * 4096)
    text = np.array([1, 2, 3] * 4096)
    assert trie.known_suffixes([(0, text)]) == [0]
    while not trie.catch_up(0, 4096):
        pass
    assert trie.known_suffixes([(0, text)]) == [text_cursor.MAX_AGREED]
    with pytest.raises(ValueError, match="not live"):
        trie.known_suffixes([(1, text)])


def test_the_tree_comes_likeliest_first():
    trie = Trie()
    trie.warm("a", [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5]])
    trie.begin(0, "a", [9])
    draft = trie.retrieve(0, 10, 5, [1])
    assert (np.diff(draft.probability) <= 0).all()
    assert paths(draft)[0] == (2,)
    assert {(2, 3), (2, 4), (5,)} <= set(paths(draft))


@pytest.mark.parametrize("source", ["prompt", "namespace"])
def test_a_long_copy_is_drafted_to_full_length_with_probability_near_one(source):
    original = np.random.default_rng(0).integers(0, 30_000, 600).tolist()
    trie = Trie()
    if source == "namespace":
        trie.warm("a", [original])
    trie.begin(0, "a", original if source == "prompt" else [3])
    trie.extend(0, original[100:106])
    at, steps = 106, 0
    while at < 300:
        step = agreed(trie.retrieve(0, 64, 64), original[at : at + 64]) + 1
        trie.extend(0, original[at : at + step])
        at, steps = at + step, steps + 1
    assert steps <= 5
    draft = trie.retrieve(0, 64, 64)
    assert draft.tokens.tolist() == original[at : at + 64]
    assert draft.probability[-1] > 0.9


FEW_TOKENS, CYCLE = np.random.default_rng(1).integers(0, 3, 900).tolist(), list(range(1, 8))


@pytest.mark.parametrize(("prompt", "output", "following"), [
    pytest.param(FEW_TOKENS, FEW_TOKENS[100:200], FEW_TOKENS[200:264], id="where four tokens would not tell"),
    pytest.param(range(100, 200), [*range(110, 140), 7], range(141, 149), id="after a token that was replaced"),
    pytest.param([9, 9], CYCLE * 4, (CYCLE * 6)[:40], id="of a cycle, deeper than it was seen"),
])  # fmt: skip
def test_a_copy_is_drafted(prompt, output, following):
    trie = Trie()
    trie.begin(0, "a", list(prompt))
    trie.extend(0, list(output))
    assert agreed(trie.retrieve(0, len(following), len(following)), list(following)) == len(following)


def test_what_evidence_was_worth_is_learned_and_can_be_kept_from_changing():
    original = np.random.default_rng(2).integers(0, 5, 2000).tolist()
    chances = []
    for rate in (0.0, 0.01):
        trie = Trie(TrieConfig(learning_rate=rate))
        before = trie.snapshot("a")[1]
        trie.warm("a", [[1, 2, 3] * 9])
        assert (trie.snapshot("a")[1] == before).all()  # texts that warm the index teach nothing
        trie.begin(0, "a", original[:1000])
        trie.extend(0, original[100:900])
        assert (trie.snapshot("a")[1] == before).all() == (rate == 0)
        chances.append(trie.retrieve(0, 64, 64).probability[-1])
    assert chances[1] > chances[0]


def test_a_finished_prompt_is_gone_and_its_memory_free():
    trie = Trie()
    trie.begin(0, "a", [1, 2, 3])
    trie.extend(0, [1])
    before = trie.nbytes
    trie.begin(1, "a", list(range(100, 1100)))
    assert trie.nbytes > before
    trie.finish(1)
    trie.finish(1)
    assert trie.nbytes == before
    trie.begin(1, "a", [9])
    assert set(trie.retrieve(1, 8, 8, [100]).tokens.tolist()) <= {1, 9}


def test_no_tenant_is_ever_drafted_anothers_text_and_no_request_anothers_prompt():
    dice = random.Random(7)
    trie = Trie(SMALL)
    owner: dict[int, tuple[str, int | None]] = {}
    for request in range(300):
        namespace = dice.choice("abc")
        mark = 10 * (request + 1)
        prompt = [mark + dice.randrange(4) if dice.random() < 0.5 else dice.randrange(4) for _ in range(12)]
        owner |= {mark + i: (namespace, request) for i in range(4)}
        owner |= {100_000 * (1 + "abc".index(namespace)) + i: (namespace, None) for i in range(6)}
        trie.begin(request, namespace, prompt)
        trie.finish(request - 3)
        for _ in range(6):
            trie.extend(request, [100_000 * (1 + "abc".index(namespace)) + dice.randrange(6), dice.randrange(4)])
            for live in range(max(0, request - 2), request + 1):
                space = trie._live[live].namespace
                for drafted in trie.retrieve(live, 64, 6, [dice.randrange(4)]).tokens.tolist():
                    of_space, of_request = owner.get(drafted, (space, None))
                    assert of_space == space
                    assert of_request in (None, live)


@settings(max_examples=6)
@given(st.integers(0, 1 << 30), st.integers(2, 3000), st.integers(1, 400))
def test_a_full_namespace_stays_within_its_bytes_and_never_counts_what_was_not_said(seed, vocabulary, length):
    dice = random.Random(seed)
    trie, exact = Trie(SMALL), Counter()
    for request in range(2000 // length):
        output = [min(dice.randrange(vocabulary), dice.randrange(vocabulary)) for _ in range(length)]
        exact += contexts(output)
        trie.begin(request, "a", [5], expected=length)
        for at in range(0, length, 7):
            trie.extend(request, output[at : at + 7])
        trie.finish(request)
        index = trie._shared["a"].index
        assert sum(part.nbytes for part in index[:4]) <= SMALL.capacity
        assert trie.nbytes <= SMALL.capacity + (1 << 15)
    index = trie._shared["a"].index
    check_memory(index)
    every = {context for context, _ in exact}
    wrong = sum(n > exact[c, token] for c in every for token, n in followers(index, c).items())
    assert wrong <= 3  # a context is known by 31 bits of its hash


def test_a_full_namespace_keeps_the_latest_outputs():
    trie = Trie(SMALL)
    for number in range(500):
        trie.warm("a", [[100 * number + i for i in range(20)]])
    trie.begin(0, "a", [1])
    latest = [49900 + i for i in range(20)]
    assert agreed(trie.retrieve(0, 64, 15, latest[:5]), latest[5:]) >= 10
    assert agreed(trie.retrieve(0, 64, 15, [0, 1, 2, 3, 4]), list(range(5, 20))) == 0
    assert 300 < trie.tokens("a") < 2000


def test_a_text_that_does_not_fit_is_refused_aloud_and_as_a_whole(caplog):
    trie = Trie(SMALL)
    trie.warm("a", [[1, 2, 3]])
    said = "a sequence has 5,000 tokens; a namespace of 65,536 bytes holds sequences of up to 910"
    with pytest.raises(ValueError, match=said):
        trie.warm("a", [list(range(5000))])
    assert trie.tokens("a") == 3
    trie.begin(0, "a", [5])
    trie.extend(0, list(range(700)))
    assert not caplog.messages
    trie.warm("a", [list(range(800))])
    assert caplog.messages == ["a sequence of 800 tokens does not fit namespace 'a' and is not indexed"]
    assert trie.tokens("a") == 700
    check_memory(trie._shared["a"].index)
    trie.extend(0, list(range(700)))
    trie.extend(0, [1])
    assert caplog.messages[1:] == ["namespace 'a' is full of live requests: the rest of an output is not indexed"]


def test_a_long_prompt_is_indexed_and_of_one_beyond_the_capacity_the_latest_part():
    tokens = np.random.default_rng(0).integers(0, 1 << 31, 100_000)
    for capacity, early in ((TrieConfig().prompt_capacity, 6), (50_000, 0)):
        trie = Trie(TrieConfig(prompt_capacity=capacity))
        trie.begin(0, "a", tokens)
        assert trie.length(0) == 100_000
        for at, found in ((20_000, early), (99_000, 6)):
            assert agreed(trie.retrieve(0, 6, 6, tokens[at : at + 4]), tokens[at + 4 : at + 10].tolist()) == found


def test_a_request_may_outgrow_the_room_that_was_made_for_it():
    trie, oracle = Trie(), Oracle()
    dice = random.Random(4)
    trie.begin(0, "a", [1], expected=1)
    oracle.begin(0, "a", [1])
    for _ in range(100):
        play(trie, oracle, [("extend", 0, [dice.randrange(50) for _ in range(17)])])
    check(trie, oracle)


@contextmanager
def calls_counted() -> Iterator[list[str]]:
    """The calls that are made, Python's and numpy's."""
    calls: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(event) if event in ("call", "c_call") else None)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_thousand_requests_leave_nothing_but_their_outputs_and_never_stall():
    dice = random.Random(3)
    trie, oracle = Trie(SMALL), Oracle()
    trie.warm_up()
    outputs = [[dice.randrange(6) for _ in range(8)] for _ in range(10)]
    work = []
    for request in range(1000):
        trie.begin(request, "a", [dice.randrange(1 << 30) for _ in range(20)])
        for number in (0, 4):
            with calls_counted() as counted:
                trie.extend(request, outputs[request % 10][number : number + 4])
                trie.retrieve(request, 16, 9)
            work.append(len(counted))
        trie.finish(request)
    kept = trie.tokens("a") // 8
    oracle.outputs["a"] = [outputs[request % 10] for request in range(1000 - kept, 1000)]
    exact = oracle.shared("a")
    assert exact == shared(trie, "a", exact)
    # The first call finds where the workspace's arrays are. Compiled code makes no calls, but all that it walks through
    # is as small as the trie.
    assert 0 < max(work[1:]) < 600
    assert not trie._live


@pytest.mark.parametrize("bad", [-1, 1 << 31])
def test_token_ids_outside_31_bits_are_refused_and_change_nothing(bad):
    trie, oracle = Trie(), Oracle()
    play(trie, oracle, [("begin", 0, "a", [1]), ("extend", 0, [1, 2])])
    calls: list[Callable[[], Any]] = [
        lambda: trie.begin(1, "a", [1, bad]), lambda: trie.extend(0, [1, bad]),
        lambda: trie.retrieve(0, 4, 4, [1, bad]), lambda: trie.warm("a", [[1, bad]]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=f"token id is {bad}; allowed"):
            call()
    check(trie, oracle)
    trie.begin(1, "b", [(1 << 31) - 1, 0, (1 << 31) - 1])  # the largest
    assert trie.retrieve(1, 1, 4).tokens.tolist() == [0]


def test_a_copied_trie_goes_its_own_way():
    trie = Trie()
    trie.begin(0, "a", [1, 2, 3, 1])
    trie.extend(0, [2])
    before = trie.retrieve(0, 8, 8).tokens.tolist()
    twin = copy.deepcopy(trie)
    twin.extend(0, [9, 1, 2, 9, 1, 2])
    twin.finish(0)
    assert trie.retrieve(0, 8, 8).tokens.tolist() == before and 9 not in before
    assert trie.tokens("a") == 1 and twin.tokens("a") == 7


def test_requests_begin_once_and_before_anything_else():
    trie = Trie()
    trie.begin(0, "a", [1])
    with pytest.raises(ValueError, match="request 0 is already live"):
        trie.begin(0, "a", [1])
    for call in (lambda: trie.extend(1, [1]), lambda: trie.retrieve(1, 4, 4)):
        with pytest.raises(ValueError, match="request 1 is not live"):
            call()
    with pytest.raises(ValueError, match="allowed: a vector"):
        trie.extend(0, np.zeros((1, 2), np.int64))
    trie.begin(1, "n", [], expected=0)  # with nothing, it may go on
    trie.extend(1, [5, 6, 7])
    assert trie._live[1].own.tokens >= 3


@pytest.mark.parametrize(("field", "value"), [("capacity", 10), ("prompt_capacity", 0), ("learning_rate", 0.5)])
def test_a_wrong_setting_is_refused_with_its_name_value_and_what_is_allowed(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value!r}; allowed: \S"):
        TrieConfig(**{field: value})


def filled() -> tuple[Trie, Oracle]:
    trie, oracle = Trie(SMALL), Oracle()
    oracle.outputs = {"a": [[1, 2, 3, 1, 2, 4], [5, 1, 2]], "b": [[7, 8]]}
    for name, outputs in oracle.outputs.items():
        trie.warm(name, outputs)
    play(trie, oracle, [("begin", 0, "a", [60, 61]), ("extend", 0, [62])])
    return trie, oracle


def test_a_saved_trie_loads_as_it_was_without_its_prompts(tmp_path):
    before, oracle = filled()
    before.save(tmp_path / "trie")
    trie = Trie(SMALL)
    trie.begin(3, "old", [4])
    trie.extend(3, [4, 4])
    trie.load(tmp_path / "trie")
    oracle.finish(0)
    assert [shared(trie, name, oracle.shared(name)) for name in "ab"] == [oracle.shared(name) for name in "ab"]
    assert trie.tokens("old") == 0
    learned, loaded = (each.snapshot("a")[1] for each in (before, trie))
    assert loaded.tolist() == pytest.approx(learned.tolist(), rel=1e-6)  # a file has float32
    for each in (trie, before):
        each.begin(1, "a", [9])
    for now, then in zip(trie.retrieve(1, 9, 9, [1, 2]), before.retrieve(1, 9, 9, [1, 2]), strict=True):
        assert now.tolist() == pytest.approx(then.tolist(), rel=1e-4)
    assert b"=" not in (tmp_path / "trie").read_bytes().split(b"]]")[-1][-100:]  # 61, a token of the prompt
    trie.extend(3, [4])
    trie.finish(3)
    trie.save(tmp_path / "again")


def test_loading_into_less_room_keeps_the_latest_outputs(tmp_path):
    large = Trie()
    large.warm("a", [[100 * number + i for i in range(20)] for number in range(500)])
    large.save(tmp_path / "trie")
    assert large.tokens("a") == 10_000
    small = Trie(SMALL)
    small.load(tmp_path / "trie")
    assert 300 < small.tokens("a") < 2000
    small.begin(0, "a", [1])
    assert agreed(small.retrieve(0, 4, 4, [49900, 49901, 49902]), [49903, 49904]) == 2


def refuses(path: Path, match: str, trie_file: bytes | None = None) -> None:
    """A file, or one with these bytes, is refused, and the trie that wanted to load it stays as it was."""
    trie, oracle = filled()
    if trie_file is not None:
        path.write_bytes(trie_file)
    with pytest.raises(TrieFileError, match=match):
        trie.load(path)
    check(trie, oracle)


def test_no_truncated_file_and_none_with_a_flipped_byte_loads(tmp_path):
    path = tmp_path / "trie"
    filled()[0].save(path)
    data = path.read_bytes()
    for at in [*range(60), *range(60, len(data), 2000), len(data) - 1]:
        refuses(path, "damaged|has version|is not a trie file", data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        if at % 3 == 0 or at >= 60:
            refuses(path, "is truncated|is not a trie file", data[:at])


def test_what_is_no_trie_file_or_has_another_version_is_refused(tmp_path, monkeypatch):
    for content in (b"", b"{}", b"\x80\x04pickle", bytes(4096)):
        refuses(tmp_path / "trie", "is not a trie file", content)
    with monkeypatch.context() as patch:
        patch.setattr(trie_file, "TRIE_FILE_VERSION", 1)
        filled()[0].save(tmp_path / "trie")
    refuses(tmp_path / "trie", "has version 1; this program reads versions 3 to 5")
    with pytest.raises(FileNotFoundError):
        Trie().load(tmp_path / "nothing")
    with pytest.raises(OSError, match="not saved"):
        Trie().save(tmp_path / "nowhere" / "trie")


def test_wrong_content_in_a_well_formed_file_is_refused(tmp_path, monkeypatch):
    right = logistic_mixer.dump(logistic_mixer.prior())
    for text, learned, message in (
        ([1, 1, 1], np.zeros(3), "have the wrong size, or are not finite"),
        ([1, 1, 1], np.full(len(right), np.nan), "have the wrong size, or are not finite"),
        ([1, -5], right, "namespace 'a' is not a list of sequences"),
    ):
        trie_file.write(tmp_path / "trie", {"a": [np.array(text)]}, {"a": learned})
        refuses(tmp_path / "trie", message)
    long = '["", 0, ["a", 1, 99999999999]]'
    for header in ("[", "7", '["", 0, ["a", -1, 0]]', long, '["", 1, ["a", "b", 1]]', "[]", '["a"]'):
        monkeypatch.setattr(trie_file.json, "dumps", lambda _, header=header: header)
        trie_file.write(tmp_path / "trie", {"a": [np.ones(3, np.int64)]}, {"a": np.zeros(1)})
        refuses(tmp_path / "trie", "has no valid content")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, function, monkeypatch):
    path = tmp_path / "trie"
    filled()[0].save(path)
    before = path.read_bytes()
    trie, _ = filled()
    trie.warm("more", [[1, 2, 3]])

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if function == "fsync" else (Path, "replace")), full)
        with pytest.raises(OSError, match=r"not saved \(No space left on device\)") as caught:
            trie.save(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trie"]
    trie.save(path)
    assert path.read_bytes() != before


def test_a_folder_that_cannot_be_synchronised_gives_another_error_than_an_unsaved_trie(tmp_path, monkeypatch):
    trie, path, sync = filled()[0], tmp_path / "trie", os.fsync

    def fail_on_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fail_on_folders)
    with pytest.raises(OSError, match=r"the trie was saved, but .* power cut \(Input/output error\)") as caught:
        trie.save(path)
    assert caught.value.errno == errno.EIO
    again = Trie(trie.config)
    again.load(path)
    assert all(again.tokens(name) == trie.tokens(name) > 0 for name in trie._shared)


def test_namespaces_used_longest_ago_give_way_and_their_memory_is_freed():
    trie = Trie(dataclasses.replace(SMALL, namespaces=3))
    trie.begin(0, "live", [1, 2])
    trie.extend(0, [3])
    kept = weakref.ref(trie._shared["live"])
    gone = []
    for i in range(6):
        trie.warm(f"{i}", [[1, 2, 3]])
        gone.append(weakref.ref(trie._shared[f"{i}"]))
        trie.warm("0", [[4]]) if i == 1 else None
    gc.collect()
    assert list(trie._shared) == ["live", "4", "5"]
    assert [each() is None for each in gone] == [True] * 4 + [False] * 2 and kept() is not None
    trie.finish(0)
    trie.warm("6", [[1]])
    trie.warm("4", [[1]])
    trie.warm("7", [[1]])
    trie.warm("8", [[1]])
    assert list(trie._shared) == ["4", "7", "8"]
    assert trie.tokens("live") == 0


PAGE = Path(__file__).parents[2] / "docs" / "trie.md"


def test_the_numbers_on_the_page_are_what_the_code_gives():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 40
    assert result.failed == 0


def test_the_page_names_every_file_of_the_index_and_no_other():
    table = PAGE.read_text(encoding="utf-8").split("## Where everything is")[1]
    named = set(re.findall(r"`(\w+\.py)`", table))
    files = {path.name for path in Path(forerun.trie.__file__).parent.glob("*.py")}
    assert named == files - {"__init__.py"}
