"""The promise: every drafter, type, batch and way of sampling gives, bit for bit, the text that plain generation gives.

``make test`` takes so many cells of the matrix that every two values meet, except that not every architecture meets
every drafter, budget and choice. In ``make matrix`` every architecture meets every drafter twice, in float64 and in
another type, and every drafter every budget and choice. In a cell nothing goes by a clock: all that is drafted is
scored, and some of it has to be accepted.
"""

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.pairwise import Cell, pairs, pairwise
from support.tiny import (
    ARCHITECTURES,
    LEARNING,
    PROMPTS,
    OracleDrafter,
    by_transformers,
    small_caches,
    some_were_accepted,
    tiny,
)
from transformers import PreTrainedModel

import forerun
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.decoding.recipes import RECIPES

NEW_TOKENS, MORE_TOKENS = 12, 24
"""Of each text, and of those of the matrix."""
LONGER = {"lookup": 36}
"""For drafters that know nothing but the text itself, which has to repeat itself."""
DTYPES = ("float64", "float32", "bfloat16")
SAMPLING = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "temperature": 0.3, "top_k": 12, "seed": 11}}
TOGETHER = ("alone", "batch")
LEVELS = ("triforce", "triforce-trie", "triforce-auto")
"""Drafters with a middle level, which has either sparse cache."""
LONG = ("low-rank", "retrieval", *LEVELS)
BUDGETED = (*LONG, "auto")
"""Drafters with a cache of the target that has a budget."""
BUDGETS = (1, 2, 10, 16, 1000)
POLICIES = ("stride", "acceptance", "verify")
ORACLE = "oracle"


def target(architecture: str, dtype: str) -> PreTrainedModel:
    return tiny(architecture, getattr(torch, dtype))


@functools.cache
def kin(architecture: str, dtype: str) -> PreTrainedModel:
    """A small model that often agrees with the target: the same one, with noise on its weights."""
    model, generator = copy.deepcopy(tiny(architecture)), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data += 0.1 * weight.std(correction=0) * noise
    return model.to(getattr(torch, dtype))


def small(architecture: str, drafter: str, dtype: str) -> PreTrainedModel:
    """Another architecture's model, which seldom agrees, unless its drafts may be all that there is to be accepted."""
    if drafter in ("streaming", "triforce"):
        return kin(architecture, dtype)
    return target("llama" if architecture != "llama" else "qwen3", dtype)


@functools.cache
def plain(architecture: str, dtype: str, sampling: str, tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What each prompt continues to alone: by ``transformers`` where rounding cannot decide, else by plain decoding."""
    model, options = target(architecture, dtype), SAMPLING[sampling] | {"max_new_tokens": tokens}
    if sampling == "greedy" and dtype == "float64":
        return [[*prompt, *by_transformers(model, prompt, eos_token_id=None, **options)] for prompt in PROMPTS]
    engine = forerun.Engine(model, "none", prune_drafts=False)
    results = [engine.generate(prompt, eos_token_id=None, **options) for prompt in PROMPTS]
    return [result.requests[0].tokens.tolist() for result in results]


def settings(budget: int = 10, sparse: str = "low-rank") -> LongContextConfig:
    """Small enough that caches evict, choose anew and grow within a text.

    Args:
        budget: of the sparse cache.
        sparse: the kind of the middle level's cache, or the policy by which one that retrieves chooses anew.
    """
    how = {"sparse": sparse} if sparse == "low-rank" else {"sparse": "retrieval", "refresh": sparse}
    chunk = 2 if budget == 10 else min(budget, 4)
    return small_caches(cache_budget=budget, chunk=chunk, **how)


def caches(drafter: str, budgets: Sequence[int], policies: Sequence[str] = POLICIES) -> list[tuple[int | None, str]]:
    """Budgets and choices that make a difference to a drafter."""
    choices = {"low-rank": ("low-rank",), "retrieval": policies}.get(drafter, ("",))
    if drafter in LEVELS:
        choices = ("low-rank", *policies)
    return list(itertools.product(budgets if drafter in BUDGETED else (None,), choices))


def cells(
    architectures: Sequence[str], drafters: Sequence[str], budgets: Sequence[int], policies: Sequence[str] = POLICIES,
    dtypes: Sequence[str] = DTYPES, together: Sequence[str] = ("batch",),
) -> list[Cell]:  # fmt: skip
    """Architecture, type, sampling, alone or in a batch, drafter, budget, choice: without two that are the same."""
    return [
        (*where, drafter, *cache)
        for *where, drafter in itertools.product(architectures, dtypes, SAMPLING, together, drafters)
        for cache in caches(drafter, budgets, policies)
    ]


DRAFTERS = (*(name for name in RECIPES if name != "none"), ORACLE)


def every_pair() -> list[Cell]:
    """Every architecture with every drafter, in float64 and in one of the other types.

    Types, ways of sampling and the kind of the sparse cache take turns, so that any three values meet of an
    architecture or a drafter, a type and a way of sampling.
    """
    cells = []
    for (a, architecture), (d, drafter) in itertools.product(enumerate(ARCHITECTURES), enumerate(DRAFTERS)):
        options = caches(drafter, (10,), ("acceptance",))
        for turn, dtype in enumerate(("float64", ("float32", "bfloat16")[(a // 2 + d // 2) % 2])):
            sampling = tuple(SAMPLING)[(a + d + turn) % 2]
            cells.append((architecture, dtype, sampling, "batch", drafter, *options[(a + turn) % len(options)]))
    return cells


def every_budget() -> list[Cell]:
    """Every drafter with every budget and choice; architectures and ways of sampling take turns."""
    some, ways, cells = ("mistral", "gpt_neox", "gpt2"), tuple(SAMPLING), []
    for (d, drafter), (b, budget) in itertools.product(enumerate(LONG), enumerate(BUDGETS)):
        for c, cache in enumerate(caches(drafter, (budget,))):
            cells.append((some[(d + b + c) % 3], "float64", ways[(b + c) % 2], "batch", drafter, *cache))
    return cells


EVERY = list(dict.fromkeys([*every_pair(), *every_budget()]))
"""The matrix: every architecture with every drafter, and every drafter with every budget and choice of a cache."""
APART = ((0, 4), (0, 5), (0, 6))
FEW = pairwise(cells(tuple(ARCHITECTURES), DRAFTERS, BUDGETS, together=TOGETHER), APART)
"""What is tested each time, of all that can be combined."""


def name_of(cell: Cell) -> str:
    return "-".join(str(value) for value in cell if value not in (None, ""))


def check_cell(
    architecture: str, dtype: str, sampling: str, together: str, drafter: str, budget: int | None, choice: str,
    tokens: int = NEW_TOKENS,
) -> None:  # fmt: skip
    tokens = LONGER.get(drafter, tokens)
    expected = plain(architecture, dtype, sampling, tokens)
    chosen = replace(settings(budget or 10, choice or "low-rank"), draft_model=small(architecture, drafter, dtype))
    proposes = OracleDrafter(expected) if drafter == ORACLE else drafter
    engine = forerun.Engine(target(architecture, dtype), proposes, settings=chosen, prune_drafts=False, prefill_block=4)
    assert engine.exactness.level == "bitwise"
    if drafter in LEARNING:  # from elsewhere, and not all
        engine.warm(expected[1:])
    options = SAMPLING[sampling] | {"max_new_tokens": tokens, "eos_token_id": None}
    requests: list[Request] = []
    for rows in [[0, 1, 2]] if together == "batch" else [[1], [0], [2]]:
        found = engine.generate([PROMPTS[row] for row in rows], **options).requests
        assert [request.tokens.tolist() for request in found] == [expected[row] for row in rows]
        requests += found
        if any(sum(request.stats.accepted) for request in found):  # one text may never repeat itself
            break
    some_were_accepted(requests)


@pytest.mark.parametrize("cell", FEW, ids=name_of)
def test_output_equals_plain_generation(cell):
    check_cell(*cell)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", [cell for cell in EVERY if cell not in FEW], ids=name_of)
def test_output_equals_plain_generation_in_every_cell(cell):
    check_cell(*cell, tokens=MORE_TOKENS)


def test_every_two_values_meet_in_a_few_cells_and_none_is_there_twice():
    meet = [set().union(*(pairs(cell, APART) for cell in some)) for some in (FEW, EVERY)]
    assert meet[0] >= meet[1]
    values = [set(column) for column in zip(*FEW, strict=True)]
    assert values[:5] == [set(ARCHITECTURES), set(DTYPES), set(SAMPLING), set(TOGETHER), set(DRAFTERS)]
    assert values[5:] == [{*BUDGETS, None}, {"", "low-rank", *POLICIES}]
    for i, j in {*itertools.combinations(range(5), 2)} - {*APART}:  # what meets in any case, counted on its own
        assert {(cell[i], cell[j]) for cell in FEW} == set(itertools.product(values[i], values[j]))
    assert {cell[4:] for cell in EVERY if cell[4] in LEVELS} >= set(
        itertools.product(LEVELS, BUDGETS, ("low-rank", *POLICIES))
    )
    assert len(set(FEW)) == len(FEW) < 150 and len(set(EVERY)) == len(EVERY)
    met = {(i, j, cell[i], cell[j], cell[2]) for cell in every_pair() for i, j in ((0, 1), (0, 4), (1, 4))}
    for i, j in ((0, 1), (0, 4), (1, 4)):
        assert met >= {(i, j, *three) for three in itertools.product(values[i], values[j], SAMPLING)}
    assert {cell[::4] for cell in every_pair() if cell[1] == "float64"} == set(itertools.product(values[0], DRAFTERS))
    assert {cell[::4] for cell in every_pair() if cell[1] != "float64"} == set(itertools.product(values[0], DRAFTERS))
    assert len(set(map(name_of, FEW))) == len(FEW)


PLAIN = list(itertools.product(ARCHITECTURES, SAMPLING, DTYPES))
FEW_PLAIN = [
    *pairwise(PLAIN, ((0, 1), (0, 2))),
    *((architecture, "greedy", "float64") for architecture in ARCHITECTURES),
]


@pytest.mark.parametrize(
    ("architecture", "sampling", "dtype"),
    [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in FEW_PLAIN)) for cell in PLAIN],
)
def test_without_drafts_a_batch_equals_each_row_alone(architecture, sampling, dtype):
    """And alone, greedy and in float64, that is what ``transformers`` generates."""
    engine = forerun.Engine(target(architecture, dtype), "none", prefill_block=4)
    options = SAMPLING[sampling] | {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    batch = engine.generate(list(PROMPTS), **options)
    assert batch.generated == [
        text[len(p) :] for text, p in zip(plain(architecture, dtype, sampling), PROMPTS, strict=True)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("drafter", "sampling"), [
    pytest.param(drafter, sampling, marks=[pytest.mark.matrix] * ((i + j) % 2))
    for i, drafter in enumerate(["none", *DRAFTERS])
    for j, sampling in enumerate(SAMPLING)
])  # fmt: skip
def test_a_text_ends_where_the_model_ends_it(drafter, sampling):
    """At a token that was drafted, where one of these comes for the first time; a greedy text soon repeats itself."""
    text = plain("gpt2", "float64", sampling)[1]
    whole = text[len(PROMPTS[1]) :]

    def generated(end: int | None) -> Request:
        chosen = replace(settings(), draft_model=small("gpt2", drafter, "float64"))
        proposes = OracleDrafter([text]) if drafter == ORACLE else drafter
        model = target("gpt2", "float64")
        engine = forerun.Engine(model, proposes, settings=chosen, prune_drafts=False, prefill_block=4)
        if drafter in LEARNING:
            engine.warm([text])
        options = SAMPLING[sampling] | {"max_new_tokens": NEW_TOKENS, "eos_token_id": end}
        return engine.generate(PROMPTS[1], **options).requests[0]

    first = [i for i, token in enumerate(whole) if i > 4 and token not in whole[:i]]
    mask = generated(None).stats.drafted_mask()
    drafted = [i for i in first if mask[i]]
    assert drafted or sampling == "greedy" or drafter not in LEARNING
    place = (drafted or first)[0]
    request = generated(whole[place])
    assert request.generated.tolist() == whole[: place + 1]
    assert request.finish_reason == "eos"
    assert bool(drafted) == (request.stats.emitted[-1] == request.stats.accepted[-1])


AXES = (("mistral", "qwen2", "gpt2"), tuple(SAMPLING), ("low-rank", "triforce", "triforce-trie"), (1, 16, 64, 130))
QUERIES = list(itertools.product(*AXES))
FEW_QUERIES = pairwise(QUERIES)
MORE_QUERIES = [cell for cell in QUERIES if sum(map(tuple.index, AXES, cell)) % 2 and cell not in FEW_QUERIES]
"""Every architecture, drafter and budget; ways of sampling take turns."""


def check_where_queries_choose(architecture: str, sampling: str, drafter: str, budget: int, tokens: int) -> None:
    prompts = [list(range(3, 36)) * 3, [5, 6, 7] * 21]
    model, options = target(architecture, "float64"), SAMPLING[sampling] | {"max_new_tokens": tokens}
    chosen = replace(settings(budget), chunk=1, draft_model=small(architecture, drafter, "float64"))
    options["eos_token_id"] = None
    plainly, engine = (
        forerun.Engine(model, name, settings=chosen, prefill_block=40, prune_drafts=False) for name in ("none", drafter)
    )
    expected = [request.tokens.tolist() for request in plainly.generate(prompts, **options).requests]
    if drafter in LEARNING:
        engine.warm(expected[1:])
    found = engine.generate(prompts, **options)
    assert [request.tokens.tolist() for request in found.requests] == expected
    some_were_accepted(found.requests)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cell", FEW_QUERIES, ids=name_of)
def test_output_equals_plain_generation_where_queries_choose(cell):
    """Texts of several chunks more than a query sees."""
    check_where_queries_choose(*cell, tokens=NEW_TOKENS)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", MORE_QUERIES, ids=name_of)
def test_output_equals_plain_generation_wherever_queries_choose(cell):
    check_where_queries_choose(*cell, tokens=MORE_TOKENS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != ORACLE])
def test_rejection_sampling_gives_texts_of_the_right_length(drafter):
    """Their distribution is shown in test_distribution and test_hierarchy; here every drafter goes that way."""
    chosen = replace(settings(), draft_model=small("qwen2", drafter, "float64"))
    engine = forerun.Engine(target("qwen2", "float64"), drafter, settings=chosen, prune_drafts=False, prefill_block=4)
    plainly, options = forerun.Engine(target("qwen2", "float64"), "none"), {
        "do_sample": True, "temperature": 0.9, "seed": 4, "verification": "rejection", "max_new_tokens": NEW_TOKENS,
    }  # fmt: skip
    texts = plainly.generate(list(PROMPTS), eos_token_id=None, **options).generated
    end = next(token for i, token in enumerate(texts[0]) if i > 4 and token not in texts[0][:i])
    if drafter in LEARNING:
        engine.warm(texts[1:])
    batch = engine.generate(list(PROMPTS), eos_token_id=end, **options)
    assert sum(sum(request.stats.drafted) for request in batch.requests) > 0
    for request, text in zip(batch.requests, texts, strict=True):
        found, ended = request.generated.tolist(), request.finish_reason == "eos"
        assert request.sampler.method == "rejection"
        assert (found.index(end) == len(found) - 1) if ended else (len(found) == NEW_TOKENS and end not in found)
        if drafter in ("lookup", "trie"):  # they have no probabilities, so each token is the plain text's
            assert found == text[: len(found)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", LEVELS)
def test_a_level_that_holds_all_of_the_text_is_passed_by_until_it_does_not(drafter):
    texts, middles = [], []
    for budget in (1000, 24, 8):
        chosen = replace(settings(budget), chunk=2, draft_model=small("mistral", drafter, "float64"))
        engine = forerun.Engine(target("mistral", "float64"), drafter, settings=chosen)
        result = engine.generate([7, 9] * 5, max_new_tokens=40)
        texts.append(result.requests[0].tokens.tolist())
        middles.append(result.requests[0].stats.middle)
        assert sum(result.requests[0].stats.drafted) > 0
    assert texts[0] == texts[1] == texts[2]
    assert middles[0] is None
    assert middles[1].steps < middles[2].steps
