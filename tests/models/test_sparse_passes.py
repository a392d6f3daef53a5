"""Passes over sparse caches as one program: the logits of the modules' own passes over the same caches."""

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.all_keys import AllKeysView
from support.compiled_models import DTYPES, MODELS, TEXT, kept
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention import topk_attention
from forerun.kernels.runtime import vector_ir
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import StreamingCache
from forerun.kv.view import View
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.gate import admit
from forerun.models.forward.prefill import read_prompt as read
from forerun.models.forward.scorer import PassResult, Scorer

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

CACHES: dict[str, Callable[[Scorer, FullCache], Cache]] = {
    "streaming": lambda scorer, full: StreamingCache(50, 3, 16, scorer.rotation()),
    "retrieval": lambda scorer, full: RetrievalCache(full, RetrievalConfig(128, 4, 16, 16)),
    "low-rank": lambda scorer, full: LowRankCache(full, LowRankConfig(128, 16, 8)),
    "low-rank, all seen": lambda scorer, full: LowRankCache(full, LowRankConfig(4096, 16, 8)),
}
TREES = (DraftTree.empty(), DraftTree.chain(TEXT[3:9]), DraftTree.from_branches([[1, 2, 3], [1, 4], [9], [5, 6]], 9))


class Counting(CompiledScorer):
    """Counts the passes that no program makes."""

    others = 0

    def _forward(self, *args: object) -> PassResult:
        self.others += 1
        return super()._forward(*args)


def source(model: PreTrainedModel, length: int) -> FullCache:
    """The target's cache over the text, with the queries by which sparse caches choose."""
    target, full = admit(model), FullCache()
    target.keep_queries(0)
    read(target, full, TEXT[:length], 300)
    return full


def follow(scorer: Scorer, cache: Cache, length: int) -> None:
    """Bring a cache to a length."""
    if isinstance(cache, View):
        while not cache.prepare(64):
            pass
        cache.sync()
    else:
        read(scorer, cache, TEXT[:length], 40)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max())


@pytest.fixture
def llama() -> tuple[Scorer, PreTrainedModel]:
    model = kept("llama", torch.float32)
    scorer = admit(model)
    assert isinstance(scorer, CompiledScorer)
    return scorer, model


@pytest.mark.one_in(22)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_passes(name, kind, dtype):
    """In ragged batches, with chains and trees, over texts that go on, and after drafts that were dropped. In bfloat16
    as near as modules come to float32."""
    model = kept(name, dtype)
    windows = name in ("mistral", "qwen2", "gemma3_text")
    ours = Counting(model)
    scorers = (ours, Scorer(model), Scorer(copy.deepcopy(model).float()))
    caches: list[list[Cache]] = [[] for _ in scorers]
    for length in (600, 333, 90):
        fulls = {scorer.model.dtype: source(scorer.model, length) for scorer in scorers}
        for scorer, into in zip(scorers, caches, strict=True):
            cache = CACHES[kind](scorer, fulls[scorer.model.dtype])
            follow(scorer, cache, length)
            into.append(cache)
    errors: list[list[float]] = [[], []]
    for trees in itertools.islice(itertools.permutations(TREES), 6):
        blocks = [
            Block(TEXT[cache.length :][:1], tree, cache.length) for cache, tree in zip(caches[0], trees, strict=False)
        ]
        *found, exact = (scorer.score(blocks, own) for scorer, own in zip(scorers, caches, strict=True))
        for each, into in zip(found, errors, strict=True):
            into += [difference(*rows) for rows in zip(each, exact, strict=True)]
        for *each, block in zip(*caches, blocks, strict=True):
            path = {0: [], 6: [0, 1]}.get(len(block.tree), [0, 3])
            for cache in each:
                cache.commit(block, path)
                if len(block.tree) == 6:
                    cache.truncate(cache.length - 1)
    if dtype == torch.float32:
        assert max(errors[0]) < 2e-5
    else:  # where rounding decides which chunk is chosen, errors are large by chance
        assert np.quantile(errors[0], 0.3) < 1.2 * np.quantile(errors[1], 0.3) + 0.02
    assert bool(ours.others) == (windows and kind != "streaming")


@torch.inference_mode()
def test_heads_of_a_group_that_fill_more_than_a_tile():
    """Seven query heads to a KV head are a tile of four and one of three."""
    config = kept("qwen3", torch.float32).config.to_dict() | {"num_attention_heads": 7, "num_key_value_heads": 1}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    full, ours, found = source(model, 500), Counting(model), []
    for scorer in (ours, Scorer(model)):
        view = LowRankCache(full, LowRankConfig(128, 16, 8))
        follow(scorer, view, 500)
        found.append(scorer.score([Block(TEXT[500:501], TREES[2], 500)], [view])[0])
    assert difference(*found) < 2e-5 and not ours.others and topk_attention.HEADS_AT_ONCE < 7


@torch.inference_mode()
def test_the_target_may_grow_its_memory_between_passes(llama):
    own, model = llama
    full = source(model, 400)
    view, block = LowRankCache(full, LowRankConfig(128, 16, 8)), Block(TEXT[400:401], TREES[1], 400)
    follow(own, view, 400)
    before = own.score([block], [view])[0]
    place = full.read(0, 0, 1)[0].data_ptr()
    own.score([Block(TEXT[400:700], DraftTree.empty(), 400)], [full])
    assert full.read(0, 0, 1)[0].data_ptr() != place
    assert torch.equal(own.score([block], [view])[0], before)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["streaming", "low-rank"])
def test_layers_whose_buffers_differ_take_the_models_own_pass(kind, llama):
    """As a pass that failed half-way may leave them."""
    own, model = llama
    full, block, found = source(model, 400), Block(TEXT[400:401], TREES[2], 400), []
    for broken in (False, True):
        cache = CACHES[kind](own, full)
        follow(own, cache, 400)
        if broken:
            layers = cache._layers if isinstance(cache, StreamingCache) else cache._near
            layers[0] = tuple(torch.nn.functional.pad(t, (0, 0, 0, 99)) for t in layers[0])
            assert cache.addressed(range(3), torch.empty(1, 2, 0, 16), len(block)) is None
        found.append(own.score([block], [cache])[0])
    assert difference(*found) < 2e-5


@torch.inference_mode()
def test_an_index_that_moved_unused_is_found(llama):
    """The text grows, the index with it, and nothing is drafted; then the text is cut back to where it was."""
    own, full = llama[0], FullCache(3000)  # whose memory need not move
    own.keep_queries(0)
    read(own, full, TEXT[:300], 300)
    view, block = LowRankCache(full, LowRankConfig(128, 16, 8)), Block(TEXT[300:301], TREES[2], 300)
    follow(own, view, 300)
    before, place = own.score([block], [view])[0], view._indexes[0].addresses[1]
    read(own, full, np.resize(TEXT, 2700), 500)
    view.sync()
    grown = view._indexes[0]._short  # kept, or its memory could be had again
    full.truncate(300)
    view.sync()
    assert view._indexes[0].addresses[1] != place and grown is not None
    assert difference(own.score([block], [view])[0], before) < 2e-5


@torch.inference_mode()
def test_other_caches_and_batches_of_two_kinds_take_the_models_own_pass(llama):
    own, model = llama
    cache, expected = (AllKeysView(source(model, 200)) for _ in range(2))
    for each in (cache, expected):
        each.sync()
    block = Block(np.array([7]), TREES[2], 200)
    assert difference(own.score([block], [cache])[0], Scorer(model).score([block], [expected])[0]) < 2e-5
    full, block = source(model, 300), Block(TEXT[300:301], TREES[1], 300)
    caches = [CACHES[kind](own, full) for kind in ("low-rank", "streaming")]
    for cache in caches:
        follow(own, cache, 300)
    for found, cache in zip(own.score([block] * 2, caches), caches, strict=True):
        assert difference(found, own.score([block], [cache])[0]) < 2e-5
