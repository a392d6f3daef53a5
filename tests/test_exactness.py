"""The promise: in float64 every drafter, batch and way of sampling gives the text that plain generation gives."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from tiny import ARCHITECTURES, PROMPTS, OracleDrafter, tiny

import forerun
from forerun import Drafter
from forerun.recipes import RECIPES, build_drafter

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


DRAFTERS: dict[str, Callable[[str, str], Drafter]] = {
    **{name: lambda architecture, sampling, name=name: build_drafter(name) for name in RECIPES},
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
