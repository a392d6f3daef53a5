"""A small model that cannot read all that the target can drafts where it can, and never changes a text."""

import itertools
from typing import Any

import pytest
from support.pairwise import pairwise
from support.tiny import PROMPTS, VOCABULARY, build, small_caches, tiny

import forerun

TARGET = tiny("llama")
DRAFTERS = ["streaming", "triforce", "triforce-auto"]
KNOWN = 30
POSITIONS = 24
NEW = 28
"""Tokens of an answer: it ends behind what the small model can read."""
SMALL = {
    "fewer tokens": build("LlamaForCausalLM", {"vocab_size": KNOWN}, seed=5),
    "fewer positions": build("OPTForCausalLM", {"max_position_embeddings": POSITIONS, "ffn_dim": 32}, seed=5),
}


CELLS = list(itertools.product(SMALL, DRAFTERS, ["greedy", "coupled", "rejection"]))
FEW = pairwise(CELLS)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("small", "drafter", "how"), [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in FEW)) for cell in CELLS]
)
def test_the_text_is_that_without_drafts(small, drafter, how):
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": how != "greedy", "seed": 1}
    if how == "rejection":
        options["verification"] = how
    long = [1, 2, 3] * (POSITIONS // 2)
    prompts = [*PROMPTS, [VOCABULARY - 1], [3, VOCABULARY - 1, 5], long]
    engine = forerun.Engine(TARGET, drafter, settings=small_caches(SMALL[small]), prefill_block=4)
    result = engine.generate(prompts, **options)
    assert [len(text) for text in result.generated] == [NEW] * len(prompts)
    if how != "rejection":
        assert result.generated == forerun.Engine(TARGET, "none").generate(prompts, **options).generated
    assert any(max(text) >= KNOWN for text in result.generated)


@pytest.mark.parametrize("small", SMALL)
def test_it_drafts_where_it_can(small):
    engine = forerun.Engine(TARGET, "streaming", settings=small_caches(SMALL[small]), prefill_block=4)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    prompts = {"read": [1, 2, 3], "not read": [VOCABULARY - 1, *range(POSITIONS)]}
    drafted = {name: sum(engine.generate(prompt, **options).stats[0].drafted) for name, prompt in prompts.items()}
    assert drafted["read"] > 0 == drafted["not read"]
