"""The n-gram index against a dictionary of tuples, and what it promises about memory, files and tenants."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import ngrams, trie_file
from forerun.ngrams import FREE, LIVE, NEXT, TOP, Ngrams
from forerun.tree import ROOT, DraftTree
from forerun.trie import Draft, Trie, TrieConfig, TrieFileError

Path_ = tuple[int, ...]
Counts = Counter[Path_]

SMALL = TrieConfig(branch_length=5, max_prefix=3, min_matches=6, capacity=4000, prompt_capacity=4000)
quick = settings(max_examples=60, deadline=None)

token = st.integers(0, 3)
text = st.lists(token, max_size=14)
prompts = st.lists(token, min_size=1, max_size=14)


class Oracle:
    """The same index, slowly: every n-gram of every text, counted in dictionaries."""

    def __init__(self, config: TrieConfig) -> None:
        self.config = config
        self.texts: dict[str, list[list[int]]] = {}
        self.live: dict[int, tuple[str, list[int], list[int]]] = {}

    def begin(self, request: int, namespace: str, prompt: list[int]) -> None:
        self.live[request] = (namespace, list(prompt), [])
        self.texts.setdefault(namespace, []).append(self.live[request][2])

    def extend(self, request: int, tokens: list[int]) -> None:
        self.live[request][2].extend(tokens)

    def finish(self, request: int) -> None:
        del self.live[request]

    def grams(self, tokens: list[int]) -> Iterator[tuple[int, Path_]]:
        for start in range(len(tokens)):
            for end in range(start + 1, min(len(tokens), start + self.config.branch_length) + 1):
                yield start, tuple(tokens[start:end])

    def shared(self, namespace: str) -> Counts:
        return Counter(gram for output in self.texts.get(namespace, []) for _, gram in self.grams(output))

    def private(self, request: int) -> Counts:
        _, prompt, output = self.live[request]
        return Counter(gram for start, gram in self.grams(prompt + output) if start < len(prompt))

    def weights(self, request: int, context: Path_) -> dict[Path_, float]:
        """Weighted counts of what follows ``context``, by the path from it."""
        found: Counter[Path_] = Counter()
        counts = ((self.config.prompt_weight, self.private(request)), (1.0, self.shared(self.live[request][0])))
        for factor, grams in counts:
            for gram, count in grams.items():
                if len(gram) > len(context) and gram[: len(context)] == context:
                    found[gram[len(context) :]] += factor * count  # type: ignore[assignment]
        return dict(found)


def counts(index: Ngrams) -> Counts:
    """All n-grams of an index."""
    paths: list[Path_] = [()]
    found: Counts = Counter()
    for parent, token, count in ngrams.dump(index).T.tolist():
        paths.append((*paths[parent], token))
        found[paths[-1]] = count
    assert len(found) == len(paths) - 1 == index.state[LIVE]
    return found


def shared(trie: Trie, namespace: str) -> Counts:
    return counts(trie._shared[namespace]) if namespace in trie._shared else Counter()


def private(trie: Trie, request: int) -> Counts:
    return counts(trie._live[request].private)


def paths(draft: Draft) -> list[Path_]:
    """The path from the context of each node; checks that the draft is a tree."""
    tree = DraftTree(draft.tokens, draft.parents, probability=draft.probability)
    found: list[Path_] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((token,) if parent == ROOT else (*found[parent], token))
    return found


def check_draft(oracle: Oracle, request: int, context: list[int], budget: int, max_depth: int, draft: Draft) -> None:
    """Stage by stage the heaviest nodes come first, whichever of equally heavy ones."""
    nodes = paths(draft)
    assert len(set(nodes)) == len(nodes) <= budget
    size, config = 0, oracle.config
    for length in range(min(config.max_prefix, len(context)), 0, -1):
        deepest = min(max_depth, config.branch_length - length)
        weights = oracle.weights(request, tuple(context[len(context) - length :]))
        fresh = {path: w for path, w in weights.items() if len(path) <= deepest and path not in nodes[:size]}
        expected = sorted(fresh.values(), reverse=True)[: budget - size]
        assert [fresh.get(path) for path in nodes[size : size + len(expected)]] == expected
        size += len(expected)
        if size >= config.min_matches:
            break
    assert size == len(nodes)


operation = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.sampled_from("ab"), prompts),
    st.tuples(st.just("extend"), st.integers(0, 3), text),
    st.tuples(st.just("finish"), st.integers(0, 3)),
)


def play(trie: Trie, oracle: Oracle, operations: list[Any]) -> None:
    for name, request, *rest in operations:
        if (name == "begin") == (request not in oracle.live):
            getattr(trie, name)(request, *rest)
            getattr(oracle, name)(request, *rest)


@quick
@given(st.lists(operation, max_size=25))
def test_counts_of_every_namespace_and_every_private_prompt_equal_the_oracles(operations: list[Any]) -> None:
    trie, oracle = Trie(SMALL), Oracle(SMALL)
    play(trie, oracle, operations)
    for namespace in "ab":
        assert shared(trie, namespace) == oracle.shared(namespace)
        assert trie.nodes(namespace) == len(oracle.shared(namespace))
    assert trie._live.keys() == oracle.live.keys()
    for request in oracle.live:
        assert private(trie, request) == oracle.private(request)


@quick
@given(
    st.lists(operation, max_size=12), prompts, text, st.integers(0, 12), st.integers(0, 6), st.sampled_from([1, 6, 50])
)
def test_retrieval_takes_the_heaviest_nodes_of_the_longest_contexts_first(
    operations: list[Any], prompt: list[int], output: list[int], budget: int, max_depth: int, enough: int
) -> None:
    config = dataclasses.replace(SMALL, min_matches=enough)
    trie, oracle = Trie(config), Oracle(config)
    play(trie, oracle, [*operations, ("finish", 0), ("begin", 0, "a", prompt), ("extend", 0, output)])
    context = prompt + output
    draft = trie.retrieve(0, context, budget, max_depth)
    check_draft(oracle, 0, context, budget if max_depth else 0, max_depth, draft)


@quick
@given(prompts, st.lists(text, max_size=6))
def test_extending_token_by_token_counts_the_same_as_at_once(prompt: list[int], pieces: list[list[int]]) -> None:
    slow, fast = Trie(SMALL), Trie(SMALL)
    slow.begin(0, "a", prompt)
    fast.begin(0, "a", prompt)
    for piece in pieces:
        fast.extend(0, piece)
        for one in piece:
            slow.extend(0, [one])
    assert shared(slow, "a") == shared(fast, "a")
    assert private(slow, 0) == private(fast, 0)


@quick
@given(st.lists(text, max_size=6))
def test_warming_counts_the_same_as_generating(sequences: list[list[int]]) -> None:
    warmed, generated = Trie(SMALL), Trie(SMALL)
    warmed.warm("a", sequences)
    for i, sequence in enumerate(sequences):
        generated.begin(i, "a", [9])
        generated.extend(i, sequence)
        generated.finish(i)
    assert shared(warmed, "a") == shared(generated, "a")


def test_a_branch_grows_with_every_token_and_can_be_drafted_at_once() -> None:
    trie = Trie()
    trie.begin(0, "a", [1, 2])
    trie.extend(0, [3, 1, 2])
    assert paths(trie.retrieve(0, [1, 2], 3, 3)) == [(3,), (3, 1), (3, 1, 2)]
    trie.extend(0, [4])
    assert (4,) in paths(trie.retrieve(0, [1, 2], 5, 3))


def test_prompt_branches_weigh_more_than_those_of_outputs() -> None:
    trie = Trie(TrieConfig(prompt_weight=3.0))
    trie.warm("a", [[1, 7], [1, 7]])
    trie.begin(0, "a", [1, 8, 5])
    assert trie.retrieve(0, [1], 2, 1).tokens.tolist() == [8, 7]


def test_probabilities_are_discounted_relative_frequencies_that_fall_along_paths() -> None:
    trie = Trie()
    trie.warm("a", [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5]])
    trie.begin(0, "a", [9])
    draft = trie.retrieve(0, [1], 10, 5)
    probability = dict(zip(paths(draft), draft.probability.tolist(), strict=True))
    expected = {(2,): 2.25 / 4.5, (2, 3): 0.8 * 1.25 / 4.5, (2, 4): 0.8 * 0.25 / 4.5, (5,): 0.25 / 4.5}
    assert probability == pytest.approx(expected)


@quick
@given(prompts, text, st.floats(0.01, 9))
def test_no_node_is_likelier_than_its_parent_or_impossible(
    prompt: list[int], output: list[int], prompt_weight: float
) -> None:
    trie = Trie(dataclasses.replace(SMALL, prompt_weight=prompt_weight, min_matches=99))
    trie.begin(0, "a", prompt)
    trie.extend(0, output)
    draft = trie.retrieve(0, prompt + output, 99, 9)
    above = np.where(draft.parents == ROOT, 1.0, draft.probability[draft.parents])
    assert ((draft.probability > 0) & (draft.probability <= above)).all()


def test_equally_frequent_branches_come_latest_first() -> None:
    trie = Trie()
    trie.warm("a", [[1, 2], [1, 3], [1, 4]])
    trie.begin(0, "a", [9])
    assert trie.retrieve(0, [1], 3, 1).tokens.tolist() == [4, 3, 2]


def with_form(form: str) -> Trie:
    trie = Trie(TrieConfig(form=form))  # type: ignore[arg-type]
    trie.warm("a", [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6]])
    trie.begin(0, "a", [9])
    return trie


def test_the_hierarchical_form_merges_shared_prefixes() -> None:
    found = paths(with_form("hierarchical").retrieve(0, [1], 10, 9))
    assert sorted(found) == [(2,), (2, 3), (2, 3, 4), (2, 5), (6,)]


def test_the_parallel_form_repeats_shared_prefixes_within_the_budget() -> None:
    trie = with_form("parallel")
    draft = trie.retrieve(0, [1], 6, 9)
    assert paths(draft) == [(2,), (2, 3), (2, 3, 4), (6,), (2,), (2, 5)]
    assert draft.parents.tolist() == [-1, 0, 1, -1, -1, 4]
    assert paths(trie.retrieve(0, [1], 4, 9)) == [(2,), (2, 3), (2, 3, 4), (6,)]


def test_the_single_form_is_the_most_frequent_chain_of_the_longest_context() -> None:
    draft = with_form("single").retrieve(0, [1], 10, 9)
    assert paths(draft) == [(2,), (2, 3), (2, 3, 4)]
    assert DraftTree(draft.tokens, draft.parents).is_chain


@quick
@given(prompts, text, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["hierarchical", "parallel", "single"]))
def test_no_form_exceeds_budget_or_depth(
    prompt: list[int], output: list[int], budget: int, max_depth: int, form: str
) -> None:
    trie = Trie(dataclasses.replace(SMALL, form=form))  # type: ignore[arg-type]
    trie.begin(0, "a", prompt)
    trie.extend(0, output)
    found = paths(trie.retrieve(0, prompt + output, budget, max_depth))
    assert len(found) <= budget
    assert max(map(len, found), default=0) <= max_depth


def test_a_context_that_was_never_seen_drafts_nothing() -> None:
    trie = Trie()
    trie.begin(0, "a", [1, 2])
    for context in ([77], []):
        assert [len(part) for part in trie.retrieve(0, context, 8, 8)] == [0, 0, 0]


def test_a_finished_prompt_is_gone_and_its_memory_free() -> None:
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
    assert not len(trie.retrieve(1, [100], 8, 8).tokens)


def test_no_tenant_is_ever_drafted_anothers_text_and_no_request_anothers_prompt() -> None:
    dice = random.Random(7)
    trie = Trie(TrieConfig(branch_length=6, max_prefix=3, capacity=300))
    owner: dict[int, tuple[str, int | None]] = {}
    for request in range(200):
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
                for drafted in trie.retrieve(live, [dice.randrange(4)], 64, 6).tokens.tolist():
                    of_space, of_request = owner.get(drafted, (space, None))
                    assert of_space == space
                    assert of_request in (None, live)


def check_structure(index: Ngrams) -> None:
    """Every node can be found, and every slot is in use, free or untouched."""
    free, slot = 0, int(index.state[FREE])
    while slot:
        free, slot = free + 1, int(index.nodes[slot, NEXT])
    assert index.state[LIVE] + free == index.state[TOP] - 1
    for path in counts(index):
        assert ngrams.locate(index, np.array(path, np.int64)) != 0


@quick
@given(st.lists(operation, max_size=60), st.sampled_from([0.0, 0.5, 0.9]))
def test_capacity_is_never_exceeded_and_counts_only_decay(operations: list[Any], decay: float) -> None:
    config = dataclasses.replace(SMALL, capacity=40, prompt_capacity=40, decay=decay)
    trie, oracle = Trie(config), Oracle(config)
    for i in range(len(operations)):
        play(trie, oracle, operations[i : i + 1])
        assert all(trie.nodes(namespace) <= 40 for namespace in "ab")
    for namespace, index in trie._shared.items():
        check_structure(index)
        exact = oracle.shared(namespace)
        assert all(count <= exact[path] for path, count in counts(index).items())
    for request, live in trie._live.items():
        assert live.private.state[LIVE] <= 40
        check_structure(live.private)
        assert all(count <= oracle.private(request)[path] for path, count in private(trie, request).items())


@pytest.mark.parametrize("capacity", [20, 60, 200])
def test_requests_that_share_a_full_trie_never_count_what_none_of_them_said(capacity: int) -> None:
    config = dataclasses.replace(SMALL, capacity=capacity)
    trie, oracle, dice = Trie(config), Oracle(config), random.Random(capacity)
    for request in range(4):
        play(trie, oracle, [("begin", request, "a", [dice.randrange(5)])])
    for _ in range(60):
        operations = [("extend", dice.randrange(4), [dice.randrange(5) for _ in range(1 + dice.randrange(3))])]
        play(trie, oracle, operations * 3)
        exact = oracle.shared("a")
        assert all(count <= exact[path] for path, count in shared(trie, "a").items())
    check_structure(trie._shared["a"])
    assert trie.nodes("a") == capacity


def test_a_full_trie_keeps_what_is_frequent_and_learns_what_is_new() -> None:
    trie = Trie(TrieConfig(branch_length=4, max_prefix=2, capacity=400))
    dice = random.Random(1)
    trie.begin(0, "a", [1])
    for _ in range(300):
        trie.extend(0, [1, 2, 3, 4])
        trie.extend(0, [dice.randrange(10, 100_000) for _ in range(4)])
    assert trie.nodes("a") == 400
    assert trie.retrieve(0, [1], 3, 3).tokens.tolist() == [2, 3, 4]
    trie.extend(0, [5, 6, 7])
    assert 6 in trie.retrieve(0, [5], 8, 3).tokens


def test_of_a_prompt_beyond_its_capacity_the_latest_part_is_indexed() -> None:
    trie = Trie(TrieConfig(branch_length=4, max_prefix=2, prompt_capacity=400))
    trie.begin(0, "a", list(range(1000)))
    assert len(private(trie, 0)) <= 400
    assert not len(trie.retrieve(0, [500], 4, 4).tokens)
    assert trie.retrieve(0, [995], 3, 3).tokens.tolist() == [996, 997, 998]


def test_a_prompt_of_100_000_tokens_can_be_indexed_and_drafted_from() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 31, 100_000)
    trie = Trie()
    trie.begin(0, "a", tokens)
    assert trie.retrieve(0, tokens[50_000:50_004], 6, 6).tokens.tolist() == tokens[50_004:50_010].tolist()


def test_a_thousand_requests_leave_nothing_but_their_outputs() -> None:
    dice = random.Random(3)
    trie, oracle = Trie(SMALL), Oracle(SMALL)
    outputs = [[dice.randrange(6) for _ in range(8)] for _ in range(10)]
    nbytes = set()
    for request in range(1000):
        trie.begin(request, "a", [dice.randrange(1 << 30) for _ in range(20)])
        trie.extend(request, outputs[request % 10])
        trie.finish(request)
        nbytes.add(trie.nbytes)
    oracle.texts["a"] = outputs
    assert shared(trie, "a") == Counter({gram: 100 * count for gram, count in oracle.shared("a").items()})
    assert len(nbytes) == 1
    assert not trie._live


@pytest.mark.parametrize("bad", [-1, 1 << 31])
def test_token_ids_outside_31_bits_are_refused_and_change_nothing(bad: int) -> None:
    trie = Trie()
    trie.begin(0, "a", [1])
    trie.extend(0, [1, 2])
    before = shared(trie, "a")
    calls: list[Callable[[], Any]] = [
        lambda: trie.begin(1, "a", [1, bad]),
        lambda: trie.extend(0, [1, bad]),
        lambda: trie.retrieve(0, [1, bad], 4, 4),
        lambda: trie.warm("a", [[1, bad]]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"token id is {bad}; allowed"):
            call()
    assert shared(trie, "a") == before
    assert list(trie._live) == [0]


def test_the_largest_token_id_is_a_token() -> None:
    trie = Trie()
    trie.begin(0, "a", [(1 << 31) - 1, 0])
    assert trie.retrieve(0, [(1 << 31) - 1], 4, 4).tokens.tolist() == [0]


def test_requests_begin_once_and_before_anything_else() -> None:
    trie = Trie()
    trie.begin(0, "a", [1])
    with pytest.raises(ValueError, match="request 0 has begun already"):
        trie.begin(0, "a", [1])
    with pytest.raises(ValueError, match="request 1 is not live"):
        trie.extend(1, [1])
    with pytest.raises(ValueError, match="request 1 is not live"):
        trie.retrieve(1, [1], 4, 4)
    with pytest.raises(ValueError, match="allowed: a vector"):
        trie.extend(0, np.zeros((1, 2), np.int64))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("branch_length", 1),
        ("max_prefix", 12),
        ("max_prefix", 0),
        ("min_matches", 0),
        ("capacity", 10),
        ("prompt_capacity", 1 << 31),
        ("prompt_weight", 0.0),
        ("decay", 1.0),
        ("form", "wide"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_value_and_what_is_allowed(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value!r}; allowed: \S"):
        TrieConfig(**{field: value})


def filled(capacity: int = 4000) -> Trie:
    trie = Trie(dataclasses.replace(SMALL, capacity=capacity))
    trie.warm("a", [[1, 2, 3, 1, 2, 4], [5, 1, 2]])
    trie.warm("ü", [[7, 8]])
    trie.begin(0, "a", [60, 61])
    trie.extend(0, [62])
    return trie


def test_a_saved_trie_loads_as_it_was_without_its_prompts(tmp_path: Path) -> None:
    filled().save(tmp_path / "trie")
    trie = Trie(SMALL)
    trie.begin(3, "old", [4])
    trie.extend(3, [4, 4])
    trie.load(tmp_path / "trie")
    assert [shared(trie, name) for name in "aü"] == [shared(filled(), name) for name in "aü"]
    assert trie.nodes("old") == 0
    trie.begin(1, "a", [9])
    before = filled()
    before.begin(1, "a", [9])
    for now, then in zip(trie.retrieve(1, [1, 2], 9, 9), before.retrieve(1, [1, 2], 9, 9), strict=True):
        assert now.tolist() == then.tolist()
    assert b"=" not in (tmp_path / "trie").read_bytes()  # 61, a token of the prompt
    trie.extend(3, [4])
    assert (4,) in shared(trie, "old")


def test_loading_into_less_room_keeps_the_shallow_nodes(tmp_path: Path) -> None:
    filled().save(tmp_path / "trie")
    full = shared(filled(), "a")
    small = Trie(dataclasses.replace(SMALL, capacity=20))
    small.load(tmp_path / "trie")
    assert small.nodes("a") == 20
    assert max(map(len, shared(small, "a"))) <= min(map(len, full.keys() - shared(small, "a").keys()))
    shallow = Trie(TrieConfig(branch_length=2, max_prefix=1))
    shallow.load(tmp_path / "trie")
    assert shared(shallow, "a") == Counter({path: count for path, count in full.items() if len(path) <= 2})


def refuses(path: Path, match: str = "") -> None:
    trie = filled()
    before = shared(trie, "a")
    with pytest.raises(TrieFileError, match=match):
        trie.load(path)
    assert shared(trie, "a") == before
    trie = Trie(SMALL)
    with pytest.raises(TrieFileError):
        trie.load(path)
    trie.begin(0, "a", [1, 2, 1])
    assert len(trie.retrieve(0, [1], 4, 4).tokens)


def test_no_truncated_file_loads(tmp_path: Path) -> None:
    filled().save(tmp_path / "trie")
    data = (tmp_path / "trie").read_bytes()
    for end in [*range(0, 60, 3), *range(60, len(data), 40), len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:end])
        refuses(tmp_path / "cut", "is truncated|is not a trie file")


def test_no_file_with_a_flipped_byte_loads(tmp_path: Path) -> None:
    filled().save(tmp_path / "trie")
    data = bytearray((tmp_path / "trie").read_bytes())
    for at in [*range(60), *range(60, len(data), 20)]:
        data[at] ^= 0x10
        (tmp_path / "flipped").write_bytes(data)
        refuses(tmp_path / "flipped", "damaged|has version|is not a trie file")
        data[at] ^= 0x10


def test_another_version_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trie_file, "VERSION", 2)
        filled().save(tmp_path / "trie")
    refuses(tmp_path / "trie", "has version 2; this program reads version 1")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04pickle", bytes(4096)])
def test_what_is_no_trie_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    refuses(tmp_path / "other", "is not a trie file")


@pytest.mark.parametrize(
    "rows",
    [
        [[1], [5], [1]],  # its own parent
        [[0], [-5], [1]],  # a negative token
        [[0], [5], [-1]],  # a negative count
        [[0, 0], [5, 5], [1, 1]],  # the same child twice
        [[0, 1, 0], [5, 6, 7], [1, 1, 1]],  # not by depth
    ],
)
def test_a_well_formed_file_that_holds_no_trie_is_refused(tmp_path: Path, rows: list[list[int]]) -> None:
    trie_file.write(tmp_path / "trie", {"a": np.array(rows, np.int32)})
    refuses(tmp_path / "trie", "namespace 'a' is not a trie")


@pytest.mark.parametrize("header", [b"[", b"7", b'[["a", -1]]', b'[["a", 99999999999]]', b'[["a", "b"]]', b"[]"])
def test_a_wrong_header_under_a_right_checksum_is_refused(
    tmp_path: Path, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trie_file.json, "dumps", lambda _: header.decode())
    trie_file.write(tmp_path / "trie", {"a": np.ones((3, 1), np.int32)})
    refuses(tmp_path / "trie", "has no valid content")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trie"
    filled().save(path)
    before = path.read_bytes()
    trie = filled()
    trie.warm("more", [[1, 2, 3]])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if function == "fsync" else (Path, "replace")), full)
        with pytest.raises(OSError, match=r"not saved \(No space left on device\)") as caught:
            trie.save(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trie"]
    trie.save(path)
    assert path.read_bytes() != before


def test_a_missing_file_or_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trie().load(tmp_path / "nothing")
    with pytest.raises(OSError, match="not saved"):
        Trie().save(tmp_path / "nowhere" / "trie")
