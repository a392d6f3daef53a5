"""The papers' baselines, built on Forerun's public classes: their texts are those without drafts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.mocks import draft, opened
from support.tiny import PROMPTS, tiny

from benchmarks.papers.baselines import RECIPES, SPARSE
from benchmarks.papers.topk import TopKCache
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.decoding import recipes
from forerun.decoding.recipes import Setup
from forerun.engine.engine import Engine
from forerun.kernels.attention.attention import AttentionSpec, attend
from forerun.kv.full_cache import FullCache
from forerun.models.forward.prefill import read_prompt as read
from forerun.models.forward.runtime import default_runtime
from forerun.models.forward.scorer import Scorer

BASELINES = [name for name in RECIPES if name not in recipes.RECIPES]
CELLS = [(name, how, dtype) for name in BASELINES for how in ("greedy", "coupled") for dtype in ("float64", "bfloat16")]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.3, "top_k": 12, "seed": 11},
}


def settings(**changed: Any) -> LongContextConfig:
    sizes = {"gamma1": 2, "gamma2": 5, "cache_budget": 10, "chunk": 2, "sinks": 1, "window": 4, "paced": False}
    return LongContextConfig(**{"draft_model": tiny("llama"), **sizes, **changed})


@pytest.mark.parametrize(("name", "how", "dtype"), CELLS)
def test_the_text_is_that_without_drafts_and_some_drafts_are_right(name, how, dtype):
    model = copy.deepcopy(tiny("llama")).to(getattr(torch, dtype))
    options = {"max_new_tokens": 60, "eos_token_id": None, **HOW[how]}
    engine = Engine(model, "none", prune_drafts=False)
    wanted = engine.generate([*PROMPTS], **options).generated
    engine.set_drafter(lambda setup: recipes.build(name, setup, RECIPES), settings(draft_model=copy.deepcopy(model)))
    result = engine.generate([*PROMPTS], **options)
    assert result.generated == wanted
    assert sum(sum(stats.accepted) for stats in result.stats) > 0


def test_the_names_are_those_of_the_package_and_of_the_baselines():
    published = {"lookahead-trie", "streaming-self", "topk"}
    assert set(BASELINES) == published
    assert set(SPARSE) - set(recipes.SPARSE) == {"topk", "streaming"}
    assert not {"triforce", "none"} & set(recipes.buildable(settings(draft_model=None), RECIPES))
    with pytest.raises(ValueError, match=r"drafter is 'none at all'; known are .*lookahead-trie"):
        recipes.check_drafter("none at all", RECIPES)
    with pytest.raises(ValueError, match="drafter is 'lookahead-trie'; known are "):
        recipes.check_drafter("lookahead-trie")


@torch.inference_mode()
def test_drafts_longer_than_the_recent_tokens_can_be_rejected():
    setup = Setup(settings(gamma2=200, cache_budget=8), Scorer(tiny("llama")), default_runtime())
    chains = recipes.build("streaming-self", setup, RECIPES).planner.chains
    request = Request(list(range(6, 18)), 300)
    assert chains is not None
    row = opened(chains, request, FullCache())
    assert chains.read(row, len(request))
    first = draft(chains, row, 200).tokens.tolist()
    request.append((first[0] + 1) % 40)
    assert len(first) == len(draft(chains, row, 200)) == 200


# --- the oracle beside the full cache


@torch.inference_mode()
def test_an_oracle_that_sees_every_key_gives_what_the_full_cache_gives():
    scorer, text, source = Scorer(tiny("llama")), np.arange(60) % 40, FullCache()
    read(scorer, source, text)
    other = TopKCache(source, 80)
    other.sync()
    tree = DraftTree.from_branches([[3, 4, 5], [3, 7], [9]], 16)
    for path in ([0, 1], []):
        block = Block(text[:1], tree, other.length)
        found, wanted = (scorer.score([block], [cache])[0] for cache in (other, source))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for cache in (other, source):
            cache.commit(block, path)


def test_the_oracle_sees_the_best_keys_of_each_query():
    generator, spec, group = torch.Generator().manual_seed(0), AttentionSpec(0.35), 2
    q, k, v, keys, values = (
        torch.randn(1, heads, count, 8, generator=generator, dtype=torch.float64)
        for heads, count in ((4, 1), (2, 1), (2, 1), (2, 50), (2, 50))
    )
    full = FullCache()
    full.extend({0: (keys, values)})
    cache = TopKCache(full, 7)
    cache.sync()
    out = cache.attend(0, q, k, v, Block(np.zeros(1, np.int64), DraftTree.empty(), 50), spec)
    for head in range(4):
        own = slice(head // group, head // group + 1)
        best = (keys[0, head // group] @ q[0, head, 0]).topk(7).indices
        mine = [torch.cat((t[:, own][:, :, best], new[:, own]), 2) for t, new in ((keys, k), (values, v))]
        assert torch.allclose(attend(q[:, head : head + 1], *mine, spec).out[0, 0], out[0, head], atol=1e-12)
    with pytest.raises(ValueError, match=r"^budget is 0; it must be at least 1$"):
        TopKCache(full, 0)
