"""The Lookahead paper's trie: its three forms of a draft, over weighted counts; it changes no output."""

from typing import Any

import pytest
from support.mocks import opened
from support.tiny import PROMPTS, tiny

from benchmarks.papers.lookahead_trie import RECIPES, Form, LookaheadTrieConfig, LookaheadTrieSource
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.decoding.recipes import build
from forerun.engine.engine import Engine


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        nodes.append((*(() if parent == ROOT else nodes[parent]), token))
    return nodes


def draft(form: Form, budget: int) -> DraftTree:
    drafter = LookaheadTrieSource(LookaheadTrieConfig(form=form))
    drafter.warm("default", [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6]])
    return drafter.draft(opened(drafter, Request([9, 1], 20)), budget)


def test_the_hierarchical_form_merges_shared_prefixes_heaviest_first():
    tree = draft("hierarchical", 10)
    assert paths(tree)[0] == (2,)
    assert sorted(paths(tree)) == [(2,), (2, 3), (2, 3, 4), (2, 5), (6,)]


def test_the_parallel_form_repeats_shared_prefixes_within_the_budget():
    tree = draft("parallel", 6)
    assert sorted(paths(tree)) == [(2,), (2,), (2, 3), (2, 3, 4), (2, 5), (6,)]
    assert len(draft("parallel", 4)) == 4


def test_the_single_form_is_one_chain_of_the_most_frequent():
    assert paths(draft("single", 10)) == [(2,), (2, 3), (2, 3, 4)]


def test_the_own_text_weighs_more_and_longer_contexts_come_first():
    drafter = LookaheadTrieSource(LookaheadTrieConfig(prompt_weight=3.0))
    drafter.warm("default", [[6, 1, 7], [6, 1, 7]])
    row = opened(drafter, Request([1, 8, 5, 1], 2))
    assert drafter.draft(row, 2).tokens.tolist() == [8, 7]
    longer = opened(drafter, Request([2, 1, 4, 1, 3, 1, 3, 2, 1], 20))
    assert drafter.draft(longer, 1).tokens.tolist() == [4]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.3, "seed": 11}])
def test_outputs_are_those_without_drafts_and_some_drafts_are_accepted(sampling: dict[str, Any]):
    engine = Engine(tiny("llama"), "none", prune_drafts=False)
    options = {"max_new_tokens": 60, "eos_token_id": None, **sampling}
    wanted = engine.generate([*PROMPTS], **options).generated
    engine.set_drafter(lambda setup: build("lookahead-trie", setup, RECIPES))
    result = engine.generate([*PROMPTS], **options)
    assert result.generated == wanted
    assert sum(sum(stats.accepted) for stats in result.stats) > 0
