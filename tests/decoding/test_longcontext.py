"""A prompt that was read once is continued from its cache, and drafters choose what they read before they draft."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import tiny

from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import sparse_cache
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache
from forerun.kv.retrieval import RetrievalCache

SETTINGS = LongContextConfig(
    tiny("qwen3"), gamma1=2, gamma2=4, cache_budget=24, chunk=4, sinks=1, window=8, paced=False
)
DRAFTERS = ["triforce", "triforce-trie", "streaming", "retrieval"]
PROMPT = [7 + i * i % 40 for i in range(90)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama"), "none", prefill_block=32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_a_prompt_that_was_read_once_is_continued_again_and_again(engine, drafter, sampling):
    options = {"max_new_tokens": 12, **sampling}
    expected = engine.generate(PROMPT, **options).generated[0]
    cache = engine.prefill(PROMPT, room=4)
    for held in (len(PROMPT) - 1, len(PROMPT) - 1, len(PROMPT) - 40, 0):
        mine = Engine(tiny("llama"), drafter, settings=SETTINGS, prefill_block=32, prune_drafts=False)
        cache.truncate(held)
        request = mine.requests(PROMPT, **options)[0]
        list(mine.run([request], caches=[cache]))
        assert request.generated.tolist() == expected
        assert (sum(request.stats.drafted) > 0) == (drafter != "none")


def test_a_cache_reads_on_where_texts_part(engine):
    options = {"max_new_tokens": 12, "do_sample": False}
    cache, other = engine.prefill(PROMPT, room=4), [*PROMPT[:50], *PROMPT[60:], 1, 2]
    cache.truncate(50)
    done = list[tuple[int, int]]()
    assert engine.prefill(other, on_prefill=lambda *count: done.append(count), cache=cache) is cache
    assert cache.length == len(other) - 1 and done[-1] == (len(other) - 51, len(other) - 51)
    request = engine.requests(other, **options)[0]
    list(engine.run([request], caches=[cache]))
    assert request.generated.tolist() == engine.generate(other, **options).generated[0]
    with pytest.raises(ValueError, match="holds 93 tokens; it may hold at most 89"):
        engine.prefill(PROMPT, cache=cache)
    with pytest.raises(ValueError, match=r"holds \d+ tokens; it may hold at most 89"):
        list(engine.run(engine.requests(PROMPT, max_new_tokens=2), caches=[cache]))


def test_a_cut_cache_forgets_the_queries_of_what_is_gone(engine):
    cache = engine.prefill(PROMPT)
    assert cache.queries
    cache.truncate(cache.length)
    assert cache.queries
    cache.truncate(cache.length - 1)
    assert not cache.queries


@pytest.mark.parametrize("held", [89, 40])
@pytest.mark.parametrize("drafter", ["low-rank", "retrieval", "triforce-trie"])
def test_a_first_choice_is_never_made_while_drafting(engine, drafter, held, monkeypatch):
    """Not even where the cache that is continued has no queries left to choose by."""
    cache = engine.prefill([*PROMPT, 1])
    cache.truncate(held)
    mine = Engine(tiny("llama"), drafter, settings=SETTINGS, prefill_block=32)
    [level] = mine.level.planner.own
    drafting, choices, propose = False, [], level.propose

    def watched(rows: Any, limits: Any) -> list[DraftTree]:
        nonlocal drafting
        drafting = True
        trees = propose(rows, limits)
        drafting = False
        return trees

    monkeypatch.setattr(level, "propose", watched)
    for kind in (LowRankCache, RetrievalCache):
        sync = kind.sync
        monkeypatch.setattr(kind, "sync", lambda view, sync=sync: (choices.append(drafting), sync(view)))
    list(mine.run(mine.requests(PROMPT, max_new_tokens=12), caches=[cache]))
    assert choices[0] is False and True in choices


def test_keys_and_values_can_be_appended_for_every_layer_only(engine):
    cache, other = engine.prefill(PROMPT), engine.prefill(PROMPT[:20])
    rows = {layer: tuple(t.clone() for t in cache.read(layer, 19, 89)) for layer in cache.layers}
    other.extend(rows)
    assert other.length == cache.length
    assert all(torch.equal(a, b) for a, b in zip(other.read(1, 0, 89), cache.read(1, 0, 89), strict=True))
    with pytest.raises(ValueError, match="every layer"):
        other.extend({0: rows[0]})


def test_retrieval_is_the_default_on_cuda():
    for device, named, kind in (
        ("cuda", None, RetrievalCache), ("cpu", None, LowRankCache), ("cuda", "low-rank", LowRankCache),
    ):  # fmt: skip
        scorer: Any = SimpleNamespace(device=torch.device(device))
        assert type(sparse_cache(LongContextConfig(sparse=named))(scorer, FullCache(8))) is kind
