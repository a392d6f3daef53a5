"""Recycled logits and known noise: which lists are kept, who is drafted from them, and that no answer leaks in."""

import hashlib

import numpy as np
import pytest
import torch
from support.mocks import draft, opened

from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.sampling import MASK64, Salt, Sampler, gumbel, mixed
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict, verify
from forerun.decoding.sources.trie_source import TrieSource, best_of_rows
from forerun.trie import logistic_mixer, trie_file
from forerun.trie.arrays import OWN_LISTS, RECYCLED_SHARE
from forerun.trie.candidates import RECYCLED, RECYCLED_CELLS, STATIC_GROUP
from forerun.trie.evidence import EULER, noise_of
from forerun.trie.recycled import RecycledRows, RowsToKeep, joined
from forerun.trie.tables import CHANCE_CLASSES, LISTED, NOISE, OWN, RECYCLED_LIST, SHARED
from forerun.trie.trie import SamplingNoise, TextUpdate, Trie, TrieConfig


def rows(before: int, last: int, tokens: list[int], gap: float = 3.0) -> RecycledRows:
    """One row whose best tokens are these, each ``gap`` below the one before it."""
    filled = np.full((1, LISTED), -1, np.int32)
    filled[0, : len(tokens)] = tokens
    scores = np.where(filled >= 0, -gap * np.arange(LISTED), -np.inf).astype(np.float32)
    return RecycledRows(np.array([before]), np.array([last]), filled, scores)


def place_of(token: int, rows: int) -> int:
    """The row of a token's list in a table."""
    mixed = (token + 2) * 0x9E3779B97F4A7C15 & MASK64
    return (mixed ^ mixed >> 29) >> 20 & rows - 1


def begun(trie: Trie | None = None, *requests: int) -> Trie:
    """A trie in which requests of a namespace go on after the same prompt."""
    trie = trie or Trie()
    for request in requests or (0,):
        trie.begin(request, "n", [1, 2, 3, 4])
    return trie


def drafted(trie: Trie, request: int, budget: int = 4) -> list[int]:
    """Tokens that a draft has right after the text."""
    draft = trie.retrieve(request, budget, 8)
    return draft.tokens[draft.parents < 0].tolist()


@pytest.mark.parametrize("size", [3, LISTED, 1000, 4099])
def test_the_best_tokens_of_rows_are_those_of_a_sort(size):
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).half().float()
    tokens, scores = best_of_rows(logits)
    best = logits.sort(dim=-1, descending=True, stable=True)
    count = min(size, LISTED)
    assert tokens[:, :count].tolist() == best.indices[:, :count].tolist()
    assert scores[:, :count].tolist() == best.values[:, :count].tolist()
    assert (tokens[:, count:] == -1).all()


def test_what_the_model_nearly_said_is_drafted_where_the_same_two_tokens_come_again():
    trie = begun()
    assert 77 not in drafted(trie, 0)
    trie.recycle(0, rows(3, 4, [77, 78]))
    draft = trie.retrieve(0, 4, 8)
    first = draft.tokens.tolist().index(77)
    assert draft.parents[first] == -1
    assert Origin(draft.origins[first]) is Origin.RECYCLED


def test_rows_without_their_lists_are_refused_and_texts_replayed_without_logits_leave_none():
    drafter, request = TrieSource(), Request([1, 2], 8)
    row = opened(drafter, request)
    uneven = RecycledRows(np.array([1, 2]), np.array([2, 3]), *rows(1, 2, [5])[2:])
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 1, 1\]"):
        drafter.trie.recycle(request.id, uneven)
    for token in range(3, 8):
        request.append(token)
        drafter.learn([row], [Outcome(DraftTree.empty(), Verdict([], [token]), torch.empty(0, 0))])
        draft(drafter, row, 0)
        assert drafter.trie.retrieve(request.id, 16, 8).tokens.max(initial=0) <= token


def test_a_list_of_two_tokens_speaks_louder_than_one_of_the_last_alone():
    trie = begun()
    trie.recycle(0, rows(9, 4, [50]))
    trie.recycle(0, rows(3, 4, [60]))
    trie.recycle(0, rows(8, 4, [70]))  # behind 4 alone it is the latest
    assert drafted(trie, 0)[:2] == [60, 70]


def test_a_newer_list_takes_the_place_of_an_older_one_and_the_tables_do_not_grow():
    trie = begun(Trie(TrieConfig(capacity=1 << 16)))
    trie.recycle(0, rows(3, 4, [50]))
    before = trie.nbytes
    for token in range(5000):
        trie.recycle(0, rows(token % 71, token % 97, [token]))
    trie.recycle(0, rows(3, 4, [60]))
    own = OWN_LISTS * RECYCLED_LIST.itemsize
    assert before < trie.nbytes <= before + own + (1 << 16) * RECYCLED_SHARE
    assert drafted(trie, 0)[0] == 60
    kept = trie._shared.nbytes
    trie.finish(0)
    assert trie.nbytes == kept  # the request's own lists go with it


def test_requests_of_one_namespace_do_not_overwrite_each_others_lists():
    trie = begun(None, 0, 1)
    for number, token in ((0, 50), (1, 60)):
        trie.recycle(number, rows(3, 4, [token]))
    assert [drafted(trie, number)[0] for number in (0, 1)] == [50, 60]
    assert drafted(begun(trie, 2), 2)[0] == 60  # the latest of its namespace


def test_static_lists_are_drafted_where_there_is_no_other_list_and_are_evidence_of_their_own():
    trie = Trie()
    trie.set_static_lists(rows(-1, 4, [70, 71]))
    trie.begin(0, "n", [1, 2, 3, 4])
    assert drafted(trie, 0)[0] == 70
    cells = []
    for make in (lambda: None, lambda: trie.recycle(0, rows(-1, 4, [70, 71])), lambda: trie.begin(1, "n", [2, 3, 4])):
        make()
        number = max(trie._live)
        trie.retrieve(number, 1, 1)
        table = trie._workspace.table
        [listed] = [n for n in range(table.size[0]) if table.candidates[n].token == 70]
        cells.append(int(table.cells[listed, RECYCLED]))
    assert [(cell - RECYCLED_CELLS) // ((LISTED + 1) * CHANCE_CLASSES) for cell in cells] == [STATIC_GROUP, OWN, SHARED]


def test_no_request_changes_static_lists_and_the_first_of_two_in_one_place_stays():
    count = 2 * OWN_LISTS
    each = [rows(-1, token, [token + 5]) for token in range(count)]
    trie = Trie()
    trie.set_static_lists(RecycledRows(*map(np.concatenate, zip(*each, strict=True))))
    table = trie._static
    before = table.tobytes()
    places = {place_of(token, len(table)): token for token in reversed(range(count))}
    assert [int(table[row].tokens[0]) for row in places] == [token + 5 for token in places.values()]
    begun(trie)
    trie.recycle(0, rows(3, 4, [9000]))
    trie.extend(0, [9000, 4, 9000])
    assert trie._static.tobytes() == before


def test_no_other_namespace_is_drafted_from_a_list_or_learns_what_one_was_worth():
    used, fresh = Trie(), Trie()
    for trie in (used, fresh):
        trie.set_static_lists(rows(-1, 4, [70, 71]))
    used.begin(0, "one", [1, 2, 3, 4])
    used.recycle(0, rows(3, 4, [77, 78]))
    used.extend(0, [77, 4, 77, 4, 78])
    for trie in (used, fresh):
        trie.begin(1, "other", [1, 2, 3, 4])
    assert [part.tolist() for part in used.retrieve(1, 16, 8)] == [part.tolist() for part in fresh.retrieve(1, 16, 8)]


def test_a_steps_lists_are_kept_after_its_tokens_were_learned():
    at_once, after, before = tries = begun(), begun(), begun()
    steps = [(5, rows(3, 4, [5, 6])), (6, rows(4, 5, [6, 7]))]
    at_once.step([TextUpdate(0, [5, 6], joined([RowsToKeep(np.array([n]), each) for n, each in steps]))])
    for token, lists in steps:
        after.extend(0, [token])
        after.recycle(0, lists)
        before.recycle(0, lists)
        before.extend(0, [token])
    learned = [trie.snapshot("n")[1] for trie in tries]
    assert (learned[0] == learned[1]).all() and (learned[0] != learned[2]).any()
    assert drafted(at_once, 0) == drafted(after, 0)


def test_rows_of_a_tree_are_kept_by_the_tokens_on_the_path_to_them():
    drafter, request = TrieSource(), Request([1, 2, 3, 4], 8)
    row = opened(drafter, request)
    draft(drafter, row, 4)
    tree = DraftTree(np.array([10, 11, 12]), np.array([-1, 0, 0]))
    logits = torch.zeros(4, 100)
    logits[0, 10] = logits[1, 12] = logits[2, 90] = logits[3, 91] = 20.0
    drafter.learn([row], [Outcome(tree, verify(tree, logits, request), logits)])
    assert request.generated.tolist() == [10, 12, 91]
    assert drafter.trie.length(request.id) == 4  # until a draft is wanted
    draft(drafter, row, 0)
    assert drafter.trie.length(request.id) == 7
    for text, expected in (([10, 11], True), ([10, 12], False)):  # 90 was never written: it stands on a list alone
        drafter.trie.begin(1000, "default", [5, *text])
        assert (90 in drafted(drafter.trie, 1000)) == expected
        drafter.trie.finish(1000)


def test_known_noise_is_the_samplers_own():
    place = np.zeros(1, NOISE)
    place[0] = (mixed(123), 40, 0.7)
    expected = 0.7 * (gumbel(123, 43, 50, Salt.TARGET).numpy() - EULER)
    assert np.allclose([noise_of(place, 3, token) for token in range(50)], expected, rtol=0, atol=1e-12)


def test_of_two_equal_candidates_the_one_with_more_noise_is_drafted_first():
    for seed in range(6):
        trie = Trie()
        trie.begin(0, "n", [1, 2, 3, 4], noise=SamplingNoise(mixed(seed), 1.0))
        trie.recycle(0, rows(3, 4, [50, 60], gap=0.0))
        noise = gumbel(seed, 4, 61, Salt.TARGET)
        assert drafted(trie, 0)[0] == (50 if noise[50] > noise[60] else 60)


@pytest.mark.parametrize(("method", "known"), [("greedy", False), ("coupled", True), ("rejection", False)])
def test_only_coupled_noise_is_known(method, known, monkeypatch):
    given: list[SamplingNoise | None] = []
    begin = Trie.begin
    monkeypatch.setattr(Trie, "begin", lambda *call: (given.append(call[-1]), begin(*call))[1])
    opened(TrieSource(), Request([1, 2], 4, sampler=Sampler(method, 5)))
    assert [each is not None for each in given] == [known]


@pytest.mark.parametrize("version", trie_file.TEXTS_VERSIONS)
def test_texts_of_older_versions_are_read_and_what_was_learned_starts_anew(version, tmp_path, monkeypatch):
    monkeypatch.setattr(trie_file, "TRIE_FILE_VERSION", version)
    trie_file.write(tmp_path / "trie", {"n": [np.array([5, 6, 7])]}, {"n": np.ones(154)}, "words")
    monkeypatch.undo()
    if version == trie_file.ONE_MIXER_VERSION:
        data = (tmp_path / "trie").read_bytes()
        (tmp_path / "trie").write_bytes(_halved_count(data))  # numbers of that version are twice as wide
    content = trie_file.read(tmp_path / "trie")
    assert [text.tolist() for text in content.namespaces["n"]] == [[5, 6, 7]]
    assert (logistic_mixer.dump(content.mixers["n"]) == logistic_mixer.dump(logistic_mixer.prior())).all()


def _halved_count(data: bytes) -> bytes:
    """A file whose header says 77 numbers of eight bytes where 154 of four are written."""
    start = len(trie_file.TRIE_FILE_MAGIC) + 4
    body = data[start + 32 :].replace(b"154", b" 77", 1)
    return data[:start] + hashlib.sha256(body).digest() + body
