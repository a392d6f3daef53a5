"""Layers with sliding windows give memory back, and no text changes by it: what was given back is never read."""

import itertools
import sys

import numpy as np
import pytest
import torch
from support.batches import LONG, finish_all, prompt
from support.compiled_models import build
from support.pairwise import pairwise
from support.processes import resident

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.engine.batch import Batch
from forerun.engine.engine import Engine
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kernels.attention.attention_tile import BLOCK_TOKENS
from forerun.kernels.attention.ordered_attention import SPLIT_TOKENS
from forerun.kv import full_cache
from forerun.kv.cache import MIN_SLACK_TOKENS, most_rows, release, slack
from forerun.kv.full_cache import FullCache

LENGTH, NEW = 1400, 24
"""Tokens of a prompt, which is longer than all that is kept of a window of 19, and of an answer."""
WINDOW = 19
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back under Linux only")


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was released, as first and last row; it is filled with NaN, so that who reads it says nonsense."""
    found: list[tuple[int, int]] = []

    def spoil(rows: Rows, first: int, last: int, file: bool) -> None:
        found.append((first, last))
        for t in rows:
            t[:, :, first:last] = torch.nan

    monkeypatch.setattr(full_cache, "release", spoil)
    return found


MODELS, DRAFTERS = ["gemma3_text", "mistral", "olmo3", "qwen2"], ["none", "trie", "low-rank", "triforce-trie"]
CELLS = list(itertools.product(MODELS, DRAFTERS, DTYPES))
FEW = [
    *pairwise([cell for cell in CELLS if cell[2] != torch.float64]),
    ("mistral", "low-rank", torch.float64),
    ("gemma3_text", "triforce-trie", torch.float64),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "drafter", "dtype"), [
    pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in FEW)) for cell in CELLS
], ids=str)  # fmt: skip
def test_what_is_released_is_never_read(name, drafter, dtype, spoiled, monkeypatch):
    """By programs of kernels (float32 and bfloat16), by hooks (float64), and by sparse caches over the full one."""
    model, prompts = build(name, dtype), [prompt(LENGTH), prompt(LENGTH // 2, 7), prompt(LENGTH + 700, 8)]

    def steps() -> list[tuple[list[int], list[int], list[int]]]:
        """Texts, and what was drafted and accepted in each step: a draft that is nonsense changes these alone."""
        engine = Engine(model, drafter, settings=LONG, prune_drafts=False)
        requests = engine.requests(prompts, max_new_tokens=NEW)
        finish_all(engine, requests)
        return [(each.generated.tolist(), each.stats.drafted, each.stats.accepted) for each in requests]

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_releases", lambda batch, request: False)
        wanted = steps()
    assert not spoiled
    assert steps() == wanted
    assert len(spoiled) > 2 and all(first < last for first, last in spoiled)


@pytest.fixture
def cache() -> FullCache:
    """With 2,100 tokens; layer 0 has a window, layer 1 has none."""
    return filled(FullCache(2200, releases=True), 21)


def filled(cache: FullCache, blocks: int) -> FullCache:
    """Commit so many blocks of 100 tokens; all numbers of a token are its position and one."""
    specs = {0: AttentionSpec(1.0, WINDOW), 1: AttentionSpec(1.0)}
    for _ in range(blocks):
        block = Block(np.zeros(100, np.int64), DraftTree.empty(), cache.length)
        cache.begin_pass(specs)
        for layer in specs:
            places = torch.arange(cache.length, cache.length + 100, dtype=torch.float32) + 1
            rows = places[None, None, :, None].expand(1, 2, 100, 64)
            cache.append(layer, rows, rows)
        cache.commit(block, [])
    return cache


def positions(cache: FullCache, layer: int) -> list[int]:
    """The positions whose keys a cache still holds."""
    keys = cache.read(layer, 0, cache.length)[0][0, 0, :, 0]
    return (keys[keys > 0] - 1).int().tolist()


def test_all_but_the_window_and_as_many_tokens_as_may_be_taken_back_is_released(cache):
    """The first page of each head may hold another head's last rows, and is kept."""
    assert positions(cache, 1) == list(range(2100))
    held = positions(cache, 0)
    assert held[-1] == 2099 and len(held) <= most_rows(WINDOW) + 32
    seen = cache.length - WINDOW - MIN_SLACK_TOKENS
    assert set(range(seen, 2100)) <= set(held)


def test_a_text_is_taken_back_as_far_as_its_window_is_there_or_to_nothing(cache):
    assert 0 < cache.least <= 2100 - MIN_SLACK_TOKENS
    cache.truncate(cache.least)
    assert cache.length == cache.least
    filled(cache, 3)
    assert set(range(cache.least - WINDOW + 1, cache.length)) <= set(positions(cache, 0))
    cache.truncate(cache.least - 1)
    assert cache.length == cache.least == 0
    filled(cache, 12)
    assert set(range(1200 - WINDOW, 1200)) <= set(positions(cache, 0))
    assert positions(cache, 1) == list(range(1200))


@pytest.mark.parametrize("shareable", [False, True])
def test_a_text_begins_with_another_only_where_all_that_it_sees_is_there(shareable):
    cache = filled(FullCache(2200, shareable, releases=True), 21)
    prefix = cache.share(2000)
    assert prefix.least == cache.least > 0
    for length in (prefix.least - 1, 100):
        other = FullCache(releases=True)
        other.begin_with(prefix, length)
        assert other.length == 0
    other = FullCache(releases=True)
    other.begin_with(prefix, 2000)
    assert other.length == 2000 and other.least == prefix.least
    assert positions(other, 1) == list(range(2000))
    assert set(range(2000 - WINDOW, 2000)) <= set(positions(other, 0))
    other.truncate(prefix.least - 1)
    assert other.length == 0


def test_a_cache_that_grows_copies_only_what_it_keeps():
    cache = filled(FullCache(releases=True), 60)
    assert cache.capacity < 7000 and cache.least > 4000
    assert set(range(cache.least - WINDOW + 1, 6000)) <= set(positions(cache, 0))
    assert positions(cache, 1) == list(range(6000))


def test_less_is_needed_and_held_than_for_all_keys(cache):
    whole = filled(FullCache(2200), 21)
    layer = 2 * 2 * 64 * 4  # bytes of a token
    assert whole.needs(whole.shape, 100_000) == 100_000 * 2 * layer
    assert cache.needs(cache.shape, 100_000) == (100_000 + most_rows(WINDOW)) * layer
    assert whole.nbytes - cache.nbytes == (cache.capacity - most_rows(WINDOW)) * layer


def test_memory_is_really_given_back():
    rows = tuple(torch.ones(1, 4, 100_000, 32) for _ in range(2))
    before = resident()
    release(rows, 10, 90_000, False)
    assert before - resident() > 0.8 * sum(t.nbytes for t in rows)
    for t in rows:
        assert (t[:, :, :10] == 1).all() and (t[:, :, 90_000:] == 1).all()
        assert (t[:, :, 1000:89_000] == 0).all()


def test_what_is_kept_for_other_prompts_is_kept_whole():
    """As long as a prompt may be found again, in memory or in a store, nothing of it goes."""
    for limit, released in ((0, True), (1 << 20, True), (1 << 30, False)):
        engine = Engine(build("gemma3_text"), "none", prefix_cache=limit)
        with engine.batch() as batch:
            (request,) = engine.requests([prompt(LENGTH)], max_new_tokens=NEW)
            batch.admit(request)
            while request.finish_reason is None:
                assert batch._rows[request.id].cache.releases == released
                batch.step()
    engine = Engine(build("gemma3_text"), "none", prefill_block=2 * MIN_SLACK_TOKENS)
    with engine.batch() as batch:
        (request,) = engine.requests([prompt(LENGTH)], max_new_tokens=NEW)
        assert not batch._releases(request)


def test_a_slack_covers_what_kernels_read_before_a_window():
    assert max(BLOCK_TOKENS, SPLIT_TOKENS) <= MIN_SLACK_TOKENS <= slack(1)
