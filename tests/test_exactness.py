"""The promise: in float64 every drafter, batch and way of sampling gives the text that plain generation gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny import ARCHITECTURES, PROMPTS, OracleDrafter, tiny

import forerun
from forerun import Drafter
from forerun.core.settings import Settings
from forerun.drafters.recipes import RECIPES, build_drafter

NEW_TOKENS = 28
SAMPLING = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "temperature": 0.7, "top_k": 12, "seed": 11}}


@functools.cache
def plain(architecture: str, sampling: str) -> list[list[int]]:
    """What each prompt continues to: by ``transformers`` when greedy, else by plain sampling, each alone."""
    model, options = tiny(architecture), SAMPLING[sampling]
    if sampling == "greedy":
        inputs = [torch.tensor([prompt]) for prompt in PROMPTS]
        texts = [
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)
            for ids in inputs
        ]
        return [text[0].tolist() for text in texts]
    engine = forerun.Engine(model, "none")
    results = [engine.generate(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in PROMPTS]
    return [result.requests[0].tokens.tolist() for result in results]


def settings(architecture: str) -> Settings:
    """Small enough that caches evict, choose anew and grow within a text; the small model differs from the target."""
    draft = tiny("llama" if architecture != "llama" else "qwen3")
    return Settings(draft, gamma1=2, gamma2=5, cache_budget=10, chunk=2, sinks=1, window=4, paced=False)


DRAFTERS: dict[str, Callable[[str, str], Drafter]] = {
    **{name: lambda architecture, sampling, name=name: build_drafter(name, settings(architecture)) for name in RECIPES},
    "oracle": lambda architecture, sampling: OracleDrafter(plain(architecture, sampling)),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_equals_plain_generation(architecture: str, drafter: str, sampling: str) -> None:
    expected = plain(architecture, sampling)
    engine = forerun.Engine(tiny(architecture), DRAFTERS[drafter](architecture, sampling), prefill_block=4)
    options = {"max_new_tokens": NEW_TOKENS, **SAMPLING[sampling]}
    alone = engine.generate(PROMPTS[1], **options)
    assert alone.requests[0].tokens.tolist() == expected[1]
    batch = engine.generate(list(PROMPTS), **options)
    assert [request.tokens.tolist() for request in batch.requests] == expected
    for request in batch.requests:
        assert request.stats.tokens == len(request.generated)
        assert len(request.stats.drafted_mask()) == len(request.generated)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrix_exercises_acceptance(architecture: str, sampling: str) -> None:
    engine = forerun.Engine(tiny(architecture), OracleDrafter(plain(architecture, sampling)))
    result = engine.generate(list(PROMPTS), max_new_tokens=NEW_TOKENS, **SAMPLING[sampling])
    steps = [step for stats in result.stats for step in zip(stats.drafted, stats.accepted, strict=True)]
    assert max(accepted for _, accepted in steps) >= 2
    assert any(accepted < drafted for drafted, accepted in steps)


LONG = ("low-rank", "retrieval", "triforce", "triforce-trie", "triforce-auto")


@pytest.mark.parametrize("choice", ["low-rank", "stride", "acceptance", "verify"])
@pytest.mark.parametrize("budget", [1, 2, 16, 1000])
@pytest.mark.parametrize("drafter", LONG)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("architecture", ["mistral", "gpt_neox", "gpt2"])
def test_output_equals_plain_generation_for_every_budget_and_policy(
    architecture: str, drafter: str, budget: int, choice: str, sampling: str
) -> None:
    how = {"sparse": choice} if choice == "low-rank" else {"sparse": "retrieval", "refresh": choice}
    chosen = replace(settings(architecture), cache_budget=budget, chunk=min(budget, 4), paced=True, **how)
    engine = forerun.Engine(tiny(architecture), drafter, settings=chosen, prefill_block=4, cut=False)
    batch = engine.generate(list(PROMPTS), max_new_tokens=NEW_TOKENS, **SAMPLING[sampling])
    assert [request.tokens.tolist() for request in batch.requests] == plain(architecture, sampling)


@pytest.mark.parametrize("budget", [1, 16, 64, 130])
@pytest.mark.parametrize("drafter", ["low-rank", "triforce", "triforce-trie"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "gpt2"])
def test_output_equals_plain_generation_where_queries_choose(
    architecture: str, drafter: str, budget: int, sampling: str
) -> None:
    """Texts of several chunks more than a query sees."""
    prompts = [list(range(3, 36)) * 3, [5, 6, 7] * 21]
    chosen = replace(settings(architecture), cache_budget=budget, chunk=1)
    options = SAMPLING[sampling] | {"max_new_tokens": NEW_TOKENS}
    expected, found = (
        forerun.Engine(tiny(architecture), name, settings=chosen, prefill_block=40, cut=False).generate(
            prompts, **options
        )
        for name in ("none", drafter)
    )
    assert [r.tokens.tolist() for r in found.requests] == [r.tokens.tolist() for r in expected.requests]
    assert sum(sum(request.stats.drafted) for request in found.requests) > 0


@pytest.mark.parametrize("drafter", [name for name, recipe in RECIPES.items() if name != "none"])
def test_rejection_sampling_gives_texts_of_the_right_length(drafter: str) -> None:
    """Their distribution is shown in test_distribution and test_hierarchy; here every drafter goes that way."""
    engine = forerun.Engine(tiny("qwen2"), drafter, settings=settings("qwen2"), prefill_block=4)
    options = {"do_sample": True, "temperature": 0.9, "seed": 4, "verification": "rejection"}
    batch = engine.generate(list(PROMPTS), max_new_tokens=NEW_TOKENS, **options)
    for request in batch.requests:
        assert len(request.generated) == NEW_TOKENS or request.finish_reason == "eos"


@pytest.mark.parametrize("drafter", ["triforce", "triforce-trie", "triforce-auto"])
def test_a_level_that_holds_all_of_the_text_is_passed_by_until_it_does_not(drafter: str) -> None:
    texts, middles = [], []
    for budget in (1000, 24, 8):
        chosen = replace(settings("mistral"), cache_budget=budget)
        result = forerun.Engine(tiny("mistral"), drafter, settings=chosen).generate([7, 9] * 5, max_new_tokens=40)
        texts.append(result.requests[0].tokens.tolist())
        middles.append(result.requests[0].stats.middle)
        assert sum(result.requests[0].stats.drafted) > 0
    assert texts[0] == texts[1] == texts[2]
    assert middles[0] is None
    assert middles[1].steps < middles[2].steps
