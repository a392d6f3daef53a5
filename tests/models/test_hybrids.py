"""Models with recurrent layers: exact in float64, and refused where a state is wrong."""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import (
    HYBRIDS,
    LEARNING,
    PROMPTS,
    VOCABULARY,
    OracleDrafter,
    build,
    letters,
    small_caches,
    some_were_accepted,
    texts_in_float64,
    tiny,
)
from transformers import PreTrainedModel

import forerun
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.decoding.recipes import RECIPES
from forerun.engine import kv_store
from forerun.kv import recurrent
from forerun.kv.recurrent import SNAPSHOT_TOKENS
from forerun.models.forward import gate
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.gate import UnsupportedModelError

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
PROGRAM = "lfm2"
"""Its passes are a program of kernels, but in float64."""
FEW = ("bamba", PROGRAM, "qwen3_5")
"""One family of each recurrence."""
EVERY_DRAFTER = ("qwen3_next", "lfm2_moe", "falcon_h1")
"""Others of these, with every drafter. They differ in their recurrence only, as far as drafting goes."""
ORACLE = "oracle"
SMALL_MODEL = [name for name, recipe in RECIPES.items() if recipe.small]


@functools.cache
def hybrid(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    if dtype != torch.float64:
        return copy.deepcopy(hybrid(name)).to(dtype)
    return build(*HYBRIDS[name], seed=len(HYBRIDS[name][0]))


@functools.cache
def plain(name: str, tokens: int) -> list[list[int]]:
    return texts_in_float64(hybrid(name), max_new_tokens=tokens, **GREEDY)


def engine(model: PreTrainedModel, drafter: Any, **options: Any) -> forerun.Engine:
    how = {"settings": small_caches(tiny("llama")), "prefill_block": 4, "prune_drafts": False}
    return forerun.Engine(model, drafter, **how | options)


def few_of(names: Iterable[str]) -> list[Any]:
    """Names, of which ``make test`` takes the first."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.matrix) for name in others)]


def cells() -> list[Any]:
    """Family, drafter and tokens; ``make test`` takes one of each recurrence."""
    few = [(name, drafter, 24) for name, drafter in zip(FEW, ("low-rank", "auto", "trie"), strict=True)]
    every = [(name, drafter, 48) for name in EVERY_DRAFTER for drafter in RECIPES]
    every += [(name, "trie", 200) for name in HYBRIDS]
    every += [(name, ORACLE, 200) for name in (*FEW, *EVERY_DRAFTER)]
    return [*few, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in every)]


@pytest.mark.parametrize(("name", "drafter", "tokens"), cells())
def test_output_equals_transformers(name, drafter, tokens):
    texts = plain(name, tokens)
    drafting = engine(hybrid(name), OracleDrafter(texts) if drafter == ORACLE else drafter)
    if drafter in LEARNING:
        drafting.warm(texts[1:])
    batch = drafting.generate([list(prompt) for prompt in PROMPTS], max_new_tokens=tokens, **GREEDY)
    assert [request.tokens.tolist() for request in batch.requests] == texts
    if drafter not in ("none", "lookup", *SMALL_MODEL):
        some_were_accepted(batch.requests)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = drafting.generate(list(prompt), max_new_tokens=tokens, **GREEDY)
        assert alone.requests[0].tokens.tolist() == text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_text_of_a_program_does_not_depend_on_drafts(dtype):
    """Greedy and sampled, alone and in a batch, over sparse caches and with drafts of which some are right."""
    model, prompts = hybrid(PROGRAM, dtype), [list(prompt) for prompt in PROMPTS]
    assert type(gate.admit(model)) is CompiledScorer
    ways: list[dict[str, Any]] = [GREEDY, {"do_sample": True, "temperature": 0.8, "seed": 3, "eos_token_id": None}]
    none = engine(model, "none")
    for how in ways:
        texts = [none.generate(prompt, max_new_tokens=24, **how).requests[0].tokens.tolist() for prompt in prompts]
        for drafter in (OracleDrafter(texts), "trie", "low-rank", "retrieval", "auto"):
            drafting = engine(model, drafter)
            if drafter in LEARNING:
                drafting.warm(texts[1:])
            batch = drafting.generate(prompts, max_new_tokens=24, **how)
            assert [request.tokens.tolist() for request in batch.requests] == texts
            if how is GREEDY:
                some_were_accepted(batch.requests)
            assert drafting.generate(prompts[0], max_new_tokens=24, **how).requests[0].tokens.tolist() == texts[0]


@pytest.mark.parametrize("name", FEW)
def test_a_siblings_state_is_noticed(name, monkeypatch):
    def of_the_token_before(block: Block, before: int) -> Any:
        return np.arange(-1, before + len(block) - 1)

    monkeypatch.setattr(recurrent, "_parents", of_the_token_before)
    with pytest.raises(UnsupportedModelError, match="its logits over a draft tree differ from its own"):
        gate.admit(hybrid(name))


@pytest.mark.parametrize("name", FEW)
def test_a_path_that_is_not_read_into_the_state_is_noticed(name, monkeypatch):
    own = recurrent.RecurrentStates.commit

    def without_moving(states: recurrent.RecurrentStates, block: Block, path: Any) -> None:
        own(states, block, list(range(len(path))))

    monkeypatch.setattr(recurrent.RecurrentStates, "commit", without_moving)
    with pytest.raises(UnsupportedModelError, match="its logits over a draft tree differ from its own"):
        gate.admit(hybrid(name))


@pytest.mark.parametrize("name", few_of(FEW))
def test_a_stop_string_in_a_draft_ends_the_text(name):
    (prompt, text), tokenizer = (PROMPTS[0], plain(name, 24)[0]), letters()
    drafting = forerun.Engine(hybrid(name), OracleDrafter([text]), tokenizer=tokenizer)
    written = tokenizer.decode(text[len(prompt) :])
    result = drafting.generate(list(prompt), max_new_tokens=24, stop_strings=[written[9:11]], **GREEDY)
    assert result.finish_reasons == ["stop"]
    assert tokenizer.decode(result.generated[0]) == written[: written.find(written[9:11]) + 2]


BOOK = np.random.default_rng(3).integers(6, VOCABULARY, 150).tolist()
QUESTIONS = ([7, 8, 9], [12, 9])


def answer(one: forerun.Engine, question: list[int]) -> list[int]:
    return list(one.generate([*BOOK, *question], max_new_tokens=6, **GREEDY).generated[0])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("name", few_of(dict.fromkeys((*FEW, *HYBRIDS))))
def test_a_beginning_that_was_read_gives_the_bits_of_reading_it(name, dtype, tmp_path, monkeypatch):
    """In memory, from another row of the batch, and from a folder that another engine has filled."""
    monkeypatch.setattr(kv_store, "MIN_STORED_TOKENS", SNAPSHOT_TOKENS)
    model, options = hybrid(name, dtype), {"prefill_block": SNAPSHOT_TOKENS, "prune_drafts": False}
    wanted = [answer(forerun.Engine(model, "none", prune_drafts=False), question) for question in QUESTIONS]
    one = forerun.Engine(model, "trie", prefix_cache=1 << 26, **options)
    assert [answer(one, question) for question in QUESTIONS] == wanted
    assert one.prefixes.hits == 2 * SNAPSHOT_TOKENS
    together = forerun.Engine(model, "trie", **options)
    rows = together.generate([[*BOOK, *question] for question in QUESTIONS], max_new_tokens=6, **GREEDY)
    assert rows.generated == wanted
    writer = forerun.Engine(model, "none", kv_store=tmp_path, **options)
    answer(writer, QUESTIONS[0])
    writer.close()
    reader = forerun.Engine(model, "none", kv_store=tmp_path, **options)
    assert answer(reader, QUESTIONS[1]) == wanted[1]
    assert reader.prefixes.hits == (2 * SNAPSHOT_TOKENS if name != "mamba2" else 0)  # it has no keys to store


@pytest.mark.parametrize("name", few_of(FEW))
def test_a_cache_that_is_cut_goes_on_as_if_it_were_new(name):
    one = engine(hybrid(name), "trie")
    cache = one.prefill(BOOK)
    for question, cut in zip((*QUESTIONS, QUESTIONS[0]), (148, 90, 20), strict=True):
        requests = one.requests([*BOOK[:149], *question], max_new_tokens=6, **GREEDY)
        cache.truncate(min(cut, cache.length))
        list(one.run(requests, caches=[cache]))
        alone = one.generate([*BOOK[:149], *question], max_new_tokens=6, **GREEDY)
        assert requests[0].generated.tolist() == alone.generated[0]


def test_what_cannot_be_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="kv_memory cannot offload states of recurrent layers"):
        forerun.Engine(hybrid("lfm2"), "none", kv_memory=1 << 30)
    with pytest.raises(ValueError, match="draft_model has recurrent layers"):
        forerun.Engine(tiny("llama"), "streaming", settings=LongContextConfig(hybrid("lfm2")))
