"""Rows that come and go: each text is what it is alone, whoever shares its steps, waits for it, or fails beside it."""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import CHUNK, Reads, engine, finish, finish_all, prompt
from support.mocks import Told
from support.tiny import tiny

import forerun
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.decoding.level import Level
from forerun.decoding.row import Row
from forerun.decoding.source import Limit
from forerun.engine.batch import Batch
from forerun.engine.engine import Engine
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.engine.prefix_sharing import PrefixSharing
from forerun.engine.result import Commit
from forerun.kv.cache import READ_BLOCK
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedMemory, SharedPrefix
from forerun.models.loading.load import load


def options(seed: int) -> dict[str, Any]:
    return {"do_sample": True, "seed": seed} if seed % 2 else {}


def sampled(one: Engine, tokens: Sequence[int], seed: int, new: int = 12) -> Request:
    return one.requests([list(tokens)], max_new_tokens=new, **options(seed))[0]


def answer(tokens: list[int], new: int = 12) -> list[int]:
    """The text of the request alone and without drafts, in float32."""
    return engine("none").generate([tokens], max_new_tokens=new).generated[0]


def no_room(*_: Any) -> Any:
    raise MemoryError("no room")


def broken(*_: Any) -> Any:
    raise RuntimeError("it broke")


def fails_after(count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A processor that lets so many scores through."""
    calls = itertools.count()
    return lambda ids, scores: scores if next(calls) < count else broken()


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COMING = ("none", "trie", "triforce", "triforce-trie", "low-rank", "retrieval")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("drafter", "dtype"), [
    pytest.param(drafter, dtype, marks=[pytest.mark.matrix] * ((i - j) % 3 > 0))
    for i, drafter in enumerate(COMING)
    for j, dtype in enumerate(DTYPES)
], ids=str)  # fmt: skip
def test_rows_that_come_and_go_get_the_text_they_get_alone(drafter, dtype):
    one = engine(drafter, dtype)
    alone = engine("none", dtype)
    random = np.random.default_rng(7)
    prompts = [prompt(int(length), seed) for seed, length in enumerate(random.integers(2, 60, 12))]
    prompts += [[*prompts[0], *prompt(9, 50)], list(prompts[3]), [*prompts[3], 9], [*prompts[5][:20], *prompt(17, 51)]]
    wanted = [alone.generate([p], **options(seed), max_new_tokens=12).generated[0] for seed, p in enumerate(prompts)]
    requests = [sampled(one, p, seed) for seed, p in enumerate(prompts)]
    cancelled, waiting, drafted = set(), list(range(len(prompts))), 0
    with one.batch() as batch:
        while batch or waiting:
            for _ in range(int(random.integers(0, 3))):
                if waiting:
                    batch.admit(requests[waiting.pop(0)])
            if batch and random.random() < 0.05:
                gone = batch.requests[int(random.integers(len(batch)))]
                batch.cancel(gone)
                cancelled.add(gone.id)
            drafted += sum(commit.drafted for commit in batch.step())
    assert drafted or drafter == "none"
    assert 0 < len(cancelled) < 6
    for request, text in zip(requests, wanted, strict=True):
        length = len(request.generated) if request.id in cancelled else len(text)
        assert request.generated.tolist() == text[:length]


def test_a_long_prompt_does_not_hold_up_the_others():
    one = engine("none")
    reads = Reads(one.target)
    first, long, late = (sampled(one, prompt(n, n), 0, new) for n, new in ((5, 40), (90, 3), (6, 4)))
    with one.batch(limit=CHUNK) as batch:
        batch.admit(first)
        batch.step()
        batch.admit(long)
        got = []
        for step in range(10):
            if step == 2:
                batch.admit(late)
            got.append({commit.request.id for commit in batch.step()})
        assert all(first.id in commits for commits in got)
        assert len(late.generated) > 0, "it waited for the long prompt"
        assert not len(long.generated)
        finish(batch)
    assert all(sum(tokens) <= CHUNK + 2 for tokens in reads.passes)
    assert len(long.generated) == 3


def test_the_parts_of_steps_come_to_the_time_that_they_take(monkeypatch):
    """On a clock that goes on in what is timed, each part by its own amount."""
    one, now = engine("trie"), [0.0]
    monkeypatch.setattr(one.level, "_clock", lambda: now[0])
    monkeypatch.setattr("forerun.engine.step.time", SimpleNamespace(perf_counter=lambda: now[0]))
    parts, counts = one.step_seconds, Counter[str]()

    def time_of(owner: Any, name: str, seconds: float) -> None:
        inner = getattr(owner, name)

        def timed(*given: Any) -> Any:
            now[0] += seconds
            counts[name] += 1
            return inner(*given)

        monkeypatch.setattr(owner, name, timed)

    time_of(one.level.planner, "plan", 1.0)
    time_of(one.target, "score_rows", 1e3)
    time_of(Level, "_verify", 1e6)
    requests = [one.requests([prompt(n)], max_new_tokens=20, eos_token_id=None)[0] for n in (30, 20, 3)]
    with one.batch() as batch:
        batch.admit(requests[0])
        batch.step()
        assert parts.read > 0 == parts.score
        for request in requests[1:]:
            batch.admit(request)
        finish(batch)
    assert parts.total == pytest.approx(now[0]) and min(counts.values()) > 9
    assert (parts.propose, parts.verify) == (counts["plan"], 1e6 * counts["_verify"])
    assert parts.read + parts.score == pytest.approx(1e3 * counts["score_rows"]) and parts.read > 1e3 < parts.score


@pytest.mark.parametrize("drafter", ["none", "trie", "triforce-trie"])
def test_an_error_in_one_row_ends_that_row_and_no_other(drafter):
    one, prompts = engine(drafter), [prompt(n, n) for n in (5, 30, 12)]
    wanted = [answer(p) for p in prompts]
    requests = [sampled(one, p, 0) for p in prompts]
    bad = one.requests([prompts[1]], max_new_tokens=12, logits_processor=[fails_after(5)])[0]
    with one.batch() as batch:
        for request in (*requests, bad):
            batch.admit(request)
        commits = [commit for _ in range(40) for commit in batch.step() if commit.request is bad]
    assert [request.generated.tolist() for request in requests] == wanted
    assert bad.finish_reason == "error" and "it broke" in str(bad.error)
    assert bad.generated.tolist() == wanted[1][: len(bad.generated)] and len(bad.generated) > 0
    assert [token for commit in commits for token in commit.tokens] == bad.generated.tolist()


def test_generate_raises_a_rows_error_once_the_others_have_ended():
    one = engine("none")
    good = sampled(one, prompt(9), 0)
    bad = one.requests([prompt(9)], max_new_tokens=12, logits_processor=[fails_after(2)])[0]
    with pytest.raises(RuntimeError, match="it broke"):
        list(one.run([bad, good]))
    assert good.finish_reason in ("length", "eos")


class Full(FullCache):
    """A cache that cannot take more than so many tokens."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def _grow(self, end: int) -> None:
        if end > self._most:
            raise MemoryError(f"no room for {end} tokens")
        super()._grow(end)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("most", [6, 25, 33])
def test_a_cache_that_has_no_room_ends_its_row(architecture, most):
    one = Engine(tiny(architecture, torch.float32), "none", prune_drafts=False, prefill_block=CHUNK)
    wanted = one.generate([prompt(30)], max_new_tokens=12).generated[0]
    good, poor = sampled(one, prompt(30), 0), sampled(one, prompt(30), 0)
    with one.batch() as batch:
        batch.admit(poor, Full(most))
        batch.admit(good)
        finish(batch)
    assert isinstance(poor.error, MemoryError)
    assert good.generated.tolist() == wanted
    assert poor.generated.tolist() == wanted[: len(poor.generated)]
    assert len(poor.generated) == max(0, most - 30 + 1)


@pytest.mark.parametrize("drafter", ["none", "trie", "triforce"])
def test_a_cancelled_row_leaves_nothing_behind(drafter):
    one = engine(drafter)
    ended: list[int] = []
    one.level.planner.sources.append(Told(None, lambda row: ended.append(row.request.id)))
    request, other = sampled(one, prompt(40), 0, 30), sampled(one, prompt(7), 2, 30)
    with one.batch() as batch:
        batch.admit(request)
        batch.admit(other)
        row = batch._rows[request.id]
        cache = weakref.ref(row.cache)
        del row
        for _ in range(8):
            batch.step()
        assert len(request.generated) and cache() is not None
        batch.cancel(request)
        batch.cancel(request)  # a client may go twice
        gc.collect()
        assert cache() is None and ended == [request.id]
        assert request.finish_reason is None and request.error is None
        finish(batch)
    assert sorted(ended) == sorted([request.id, other.id])
    assert other.finish_reason is not None


@pytest.mark.parametrize("moment", ["read", "propose", "learn"])
@pytest.mark.parametrize("prune", [True, False])
def test_an_error_in_a_source_ends_its_drafts_for_that_row_and_no_text(moment, prune):
    """The other row goes on with drafts, and both texts are what they are alone."""
    ended: list[int] = []

    class Broken(Told):
        def fail(self, rows: Sequence[Row]) -> None:
            if any(row.request.prompt_length == 5 for row in rows):
                raise LookupError("the source failed")

        def read(self, row: Row, tokens: int) -> bool:
            if moment == "read":
                self.fail([row])
            return True

        def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[forerun.DraftTree]:
            if moment == "propose":
                self.fail(rows)
            return [forerun.DraftTree.chain([1]) for row in rows]

        def learn(self, rows: Sequence[Row], outcomes: Sequence[Any]) -> None:
            if moment == "learn":
                self.fail(rows)

    one = Engine(tiny("llama"), Broken(None, lambda row: ended.append(row.request.id)), prune_drafts=prune)
    plain = Engine(tiny("llama"), "none")
    requests, alone = ([sampled(each, prompt(5), 0), sampled(each, prompt(7), 1)] for each in (one, plain))
    finish_all(one, requests)
    for request in alone:
        finish_all(plain, [request])
    assert [request.generated.tolist() for request in requests] == [each.generated.tolist() for each in alone]
    assert requests[1].id in ended
    assert sum(requests[1].stats.drafted) > 0 or moment == "learn"


def test_an_admission_that_fails_leaves_nothing_behind(monkeypatch):
    told: list[str] = []
    source = Told(lambda row: told.append("begin"), lambda row: told.append("finish"))
    one = Engine(tiny("llama"), source, prefill_block=CHUNK)
    wanted = one.generate([prompt(20)], max_new_tokens=4).generated[0]
    told.clear()
    with one.batch() as batch:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="it broke"):
            patch.setattr(PrefixSharing, "join", broken)
            batch.admit(sampled(one, prompt(20), 0, 4))
        assert not len(batch) and told == ["begin", "finish"]
        again = sampled(one, prompt(20), 0, 4)
        batch.admit(again)
        finish(batch)
    assert again.generated.tolist() == wanted


def test_all_of_a_row_is_let_go_of_whatever_of_that_fails(monkeypatch):
    """It takes no tokens from the other rows."""
    freed: list[FullCache] = []
    one = engine("trie")
    requests = [sampled(one, prompt(9, n), 0, 5) for n in range(3)]
    batch, leave = one.batch(), PrefixSharing.leave
    monkeypatch.setattr(batch, "_free", freed.append)
    for request in requests:
        batch.admit(request)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixSharing, "leave", broken)
        with pytest.raises(RuntimeError, match="it broke"):
            batch.cancel(requests[0])
    assert len(freed) == 1 and batch.requests == requests[1:]

    def fails_for_one(self: PrefixSharing, row: Row) -> None:
        leave(self, row)
        if row.request is requests[1]:
            broken()

    monkeypatch.setattr(PrefixSharing, "leave", fails_for_one)
    told: dict[int, list[int]] = {request.id: [] for request in requests}
    while batch:
        for commit in batch.step():
            told[commit.request.id] += commit.tokens
    assert [told[request.id] for request in requests[1:]] == [answer(prompt(9, n), 5) for n in (1, 2)]
    assert len(freed) == 3


def test_a_prompt_that_cannot_be_taken_in_ends_its_row_alone(monkeypatch):
    one, commit = engine("none"), Row.commit_prompt
    good, bad = sampled(one, prompt(5, 1), 0), sampled(one, prompt(60, 2), 0)
    monkeypatch.setattr(Row, "commit_prompt", lambda row, block: broken() if row.request is bad else commit(row, block))
    finish_all(one, [good, bad])
    assert good.generated.tolist() == answer(prompt(5, 1))
    assert bad.finish_reason == "error" and "it broke" in str(bad.error)


def test_a_row_that_failed_already_is_not_lost_a_second_time(monkeypatch):
    one = engine("none")
    bad, worse, good = (sampled(one, prompt(20, n), 0, 4) for n in range(3))
    with one.batch() as batch:
        for request in (bad, worse, good):
            batch.admit(request)
        gone = [batch._rows[request.id].cache for request in (bad, worse)]

        def catch_up(unread: Any, beside: bool) -> Any:
            bad.fail(OSError("a copy failed"))
            return True, [Commit(bad, [], 0)]

        step = Mock(side_effect=OSError("a copy failed"))
        with monkeypatch.context() as patch:
            patch.setattr(FullCache, "lost", property(lambda cache: OSError("gone") if cache in gone else None))
            patch.setattr(batch, "_catch_up", catch_up)
            patch.setattr(batch, "_pass", Batch._pass.__get__(SimpleNamespace(_rows=batch._rows, _step=step)))
            assert [commit.request for commit in batch.step()] == [bad, worse]
        finish(batch)
    assert good.generated.tolist() == answer(prompt(20, 2), 4)


def test_what_cannot_be_admitted_is_refused_and_leaves_no_trace():
    one = engine("none")
    request = sampled(one, prompt(5), 0)
    with one.batch() as batch:
        with pytest.raises(ValueError, match="may hold at most 4"):
            batch.admit(request, one.prefill(prompt(8)))
        assert not len(batch)
        batch.admit(request)
        with pytest.raises(ValueError, match="already"):
            batch.admit(request)
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"limit is {wrong}"):
            one.batch(limit=wrong)
    with pytest.raises(ValueError, match="prefix_cache is -1"):
        engine("none", prefix_cache=-1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "deepseek_v3"])
def test_prompts_with_the_same_beginning_are_read_once(architecture):
    model = tiny(architecture)
    one = Engine(model, "none", prune_drafts=False, prefill_block=CHUNK)
    book = prompt(40)
    prompts = [[*book, *prompt(5 + n, n)] for n in range(5)]
    wanted = [one.generate([p], max_new_tokens=6).generated[0] for p in prompts]
    reads = Reads(one.target)
    requests = [sampled(one, p, 0, 6) for p in prompts]
    finish_all(one, requests)
    assert [request.generated.tolist() for request in requests] == wanted
    steps = sum(len(text) - 1 for text in wanted)
    assert reads.tokens == 40 + sum(len(p) - 40 for p in prompts) + steps


def test_namespaces_share_nothing():
    one = engine("none", prefix_cache=1 << 20)
    reads = Reads(one.target)
    requests = [one.requests([prompt(30)], max_new_tokens=1, namespace=name)[0] for name in ("a", "b", "a")]
    finish_all(one, requests)
    assert reads.tokens == 30 + 30 + 30 - 24


@pytest.mark.parametrize("pacing", [None, PrefillPacing()])
def test_a_step_reads_chunks_of_as_many_prompts_as_its_limit_allows(pacing):
    """Where nobody decodes meanwhile; and no chunk is cut then."""
    one = engine("none")
    reads = Reads(one.target)
    with one.batch(limit=3 * CHUNK, pacing=pacing) as batch:
        for seed in range(4):
            batch.admit(sampled(one, prompt(3 * CHUNK, seed), 0))
        batch.step()
    assert reads.passes == [[CHUNK] * 3]


def test_nothing_is_copied_but_for_a_second_continuation(monkeypatch):
    """Where all layers are alike, and passes are programs: rows with equal prompts share one memory, and each turn of a
    conversation writes what is new to that of the turn before. A copy of a long text would hold up all other rows."""
    copies: list[int] = []
    of = SharedPrefix.of
    monkeypatch.setattr(SharedPrefix, "of", lambda layers, *told: copies.append(len(layers)) or of(layers, *told))
    model, _ = load("bundled", "float32", device="cpu")
    one = Engine(model, "trie", prune_drafts=False, prefill_block=CHUNK, prefix_cache=1 << 26)
    plain = Engine(model, "none", prune_drafts=False)
    wanted = {n: plain.generate([prompt(50)], max_new_tokens=n).generated[0] for n in (6, 30)}
    together, later = ([sampled(one, prompt(50), 0, n) for n in lengths] for lengths in ((6, 30, 30), (30,)))
    for requests in (together, later):
        finish_all(one, requests)
        assert all(request.generated.tolist() == wanted[request.max_new_tokens] for request in requests)
    assert one.prefixes.hits and not copies
    one.prefixes.clear()
    turn, turns = prompt(150), list[list[int]]()
    for seed in range(4):
        (request,) = one.requests([turn], max_new_tokens=9)
        finish_all(one, [request])
        assert request.generated.tolist() == plain.generate([turn], max_new_tokens=9).generated[0]
        assert request.cached_tokens == (len(turns[-1]) + 8 if turns else 0)
        turns.append(turn)
        turn = [*turn, *request.generated.tolist(), *prompt(20, seed + 1)]
    assert not copies and len(one.prefixes) == 1
    branches = [[*turns[2], *prompt(90, seed)] for seed in (7, 8)]
    requests = [sampled(one, branch, 0, 12) for branch in (*branches, turn)]
    finish_all(one, requests)
    for request, asked in zip(requests, (*branches, turn), strict=True):
        assert request.cached_tokens >= len(turns[2]) // CHUNK * CHUNK
        assert request.generated.tolist() == plain.generate([asked], max_new_tokens=12).generated[0]
    assert len(copies) == 2


def test_rows_read_for_themselves_where_there_is_no_memory_to_share(monkeypatch):
    one, wanted = engine("none", prefix_cache=1 << 20), answer(prompt(50), 6)
    monkeypatch.setattr("forerun.kv.shared_prefix.SharedMemory.of", no_room)
    requests = [sampled(one, prompt(50), 0, 6) for _ in range(3)]
    finish_all(one, requests)
    assert [request.generated.tolist() for request in requests] == [wanted] * 3
    assert len(one.prefixes) == 0


@pytest.mark.parametrize("end", ["cancel", "error"])
def test_a_row_whose_leader_goes_reads_on_where_that_was(end):
    one, wanted = engine("none"), answer(prompt(50), 6)
    reads = Reads(one.target)
    leader, *others = (sampled(one, prompt(50), 0, 6) for _ in range(3))
    with one.batch(limit=CHUNK) as batch:
        for request in (leader, *others):
            batch.admit(request)
        for _ in range(3):
            batch.step()
        if end == "cancel":
            batch.cancel(leader)
        else:
            batch._rows[leader.id].cache.reserve = no_room
        finish(batch)
    assert all(request.generated.tolist() == wanted for request in others)
    assert leader.finish_reason == (None if end == "cancel" else "error")
    assert reads.tokens <= 50 + 2 + 2 * 5 + (0 if end == "cancel" else 2 * CHUNK)


def test_a_prefix_cache_keeps_prompts_for_later_ones_within_its_limit():
    token = 2 * 2 * 8 * 4 * 2  # keys and values, KV heads, width, bytes, layers
    one = engine("none", prefix_cache=token * 60)
    wanted = one.generate([prompt(45, 1)], max_new_tokens=4).generated[0]
    assert (one.prefixes.nbytes, len(one.prefixes)) == (48 * token, 1)  # with its answer but for the last token
    reads = Reads(one.target)
    assert one.generate([prompt(45, 1)], max_new_tokens=4).generated[0] == wanted
    assert reads.tokens == len(wanted)
    one.generate([[*prompt(45, 1), *prompt(10, 2)]], max_new_tokens=4)  # holds the shorter one, which goes
    assert (one.prefixes.nbytes, len(one.prefixes)) == (58 * token, 1)
    one.generate([prompt(45, 1)[:30]], max_new_tokens=4)  # the beginning of it, which is kept with it
    assert (one.prefixes.nbytes, len(one.prefixes)) == (58 * token, 1)
    one.generate([prompt(30, 3)], max_new_tokens=4)
    assert (one.prefixes.nbytes, len(one.prefixes)) == (33 * token, 1)  # the other was used least recently
    one.generate([prompt(300, 3)[:120]], max_new_tokens=4)  # larger than all that may be kept
    assert (one.prefixes.nbytes, len(one.prefixes)) == (33 * token, 1)
    one.prefixes.clear()
    assert one.prefixes.nbytes == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_caches_that_share_a_beginning_do_not_see_each_other(mapped, monkeypatch):
    """In files that are mapped, and where there are none, as on GPUs."""
    if not mapped:
        monkeypatch.setattr(SharedMemory, "of", lambda layout: None)
    check_shared_beginnings()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 3), st.booleans())
def check_shared_beginnings(lengths: list[int], seed: int, truncates: bool) -> None:
    """Each is compared with a cache of its own that took the same steps."""
    random = np.random.default_rng(seed)

    def rows(count: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {i: (new(count, 4 + 4 * i), new(count, 4)) for i in range(2)}

    def new(count: int, width: int) -> torch.Tensor:
        return torch.from_numpy(random.random((1, 2, count, width)))

    shared, own = [FullCache(8)], [FullCache(8)]
    begin = rows(20)
    for cache in (shared[0], own[0]):
        cache.extend(begin)
    for length in lengths:
        at = int(random.integers(len(shared)))
        count = int(random.integers(1, shared[at].length + 1))
        branch, twin = FullCache(int(random.integers(0, 99))), FullCache()
        branch.begin_with(shared[at].share(count), count)
        twin.extend({i: own[at].read(i, 0, count) for i in own[at].layers})
        shared.append(branch)
        own.append(twin)
        if truncates:
            shared[at].truncate((count + 1) // 2)
            own[at].truncate((count + 1) // 2)
        more = rows(length)
        for caches in (shared, own):
            caches[int(seed + length) % len(caches)].extend(more)
    for cache, twin in zip(shared, own, strict=True):
        assert cache.length == twin.length
        for layer in twin.layers:
            for a, b in zip(cache.read(layer, 0, cache.length), twin.read(layer, 0, twin.length), strict=True):
                assert torch.equal(a, b)


def test_memory_is_shared_until_it_is_written():
    source = FullCache()
    source.extend({0: (torch.zeros(1, 2, 4096, 64), torch.zeros(1, 2, 4096, 64))})
    beginning = source.share(4096)
    before = _private()
    caches = []
    for _ in range(4):
        cache = FullCache()
        cache.begin_with(beginning, 4096)
        assert float(cache.read(0, 0, 4096)[0].sum()) == 0
        caches.append(cache)
    assert _private() - before < source.nbytes / 4
    caches[0].read(0, 0, 4096)[0].fill_(1)
    assert _private() - before > source.nbytes / 4
    assert float(caches[1].read(0, 0, 4096)[0].sum()) == 0


def _private() -> int:
    """Bytes of this process that nobody else has."""
    with Path("/proc/self/smaps_rollup").open() as smaps:
        return sum(int(line.split()[1]) * 1024 for line in smaps if line.startswith(("Private_Dirty", "Anonymous")))


@pytest.mark.parametrize("drafter", ["triforce", "streaming", "low-rank"])
def test_draft_levels_read_a_prompt_in_pieces(drafter):
    one, pieces = engine(drafter), list[int]()
    planner = one.level.planner
    read = planner.read
    planner.read = lambda row, tokens: pieces.append(tokens) or read(row, tokens)
    request = sampled(one, prompt(60), 0)
    finish_all(one, [request], limit=CHUNK)
    assert set(pieces) == {CHUNK} and READ_BLOCK > CHUNK
    assert sum(request.stats.drafted) > 0
    assert request.generated.tolist() == answer(prompt(60))


def levels(row: Row) -> int:
    """Bytes that the draft levels hold for a row."""
    states = (state for source, state in row.states.items() if isinstance(source, Level))
    return sum(state.cache.nbytes for state in states if state.prepared)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("drafter", ["triforce-auto", "none", "trie", "triforce", "streaming", "low-rank", "retrieval"])
def test_a_request_states_its_bytes_before_it_is_admitted(drafter):
    how = LongContextConfig(cache_budget=256, gamma1=3, gamma2=6, paced=False, draft_model=tiny("qwen2"), window=60)
    one = Engine(tiny("llama"), drafter, settings=how, prune_drafts=False)
    request = Request(prompt(1000), 30)
    with one.batch() as batch:
        stated = batch.needs(request)
        full = FullCache(batch.tokens(request)).needs(one.target.kv, 0)
        batch.admit(request)
        row, most = batch._rows[request.id], 0
        while batch:
            batch.step()
            if batch:
                assert row.cache.nbytes == full
                most = max(most, levels(row))
    assert (stated > full) == (most > 0)
    assert most <= stated - full <= 3 * most


def test_a_pass_that_always_fails_is_not_tried_at_every_step(monkeypatch):
    one, failures = engine("none"), list[int]()
    score_rows = one.target.score_rows

    def narrow(blocks: Any, *rest: Any) -> Any:
        if len(blocks) > 2:
            failures.append(len(blocks))
            raise MemoryError("none is left in the test")
        return score_rows(blocks, *rest)

    wanted = one.generate([prompt(9, n) for n in range(5)], max_new_tokens=20).generated
    monkeypatch.setattr(one.target, "score_rows", narrow)
    got = one.generate([prompt(9, n) for n in range(5)], max_new_tokens=20).generated
    assert got == wanted and failures == [5]


def test_a_cache_of_another_type_is_refused():
    """As after a cast of the model: rows would be read in the wrong type, or rounded."""
    cache, rows = FullCache(), torch.zeros(1, 2, 5, 4)
    cache.extend({0: (rows, rows)})
    with pytest.raises(ValueError, match=r"holds torch.float32 rows, but the model's are torch.bfloat16"):
        cache.append(0, rows.bfloat16(), rows.bfloat16())
    with pytest.raises(ValueError, match="use a new cache"):
        cache.reserve([0], rows.bfloat16(), 1)
