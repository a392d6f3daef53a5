"""Verification changes nothing: the walk gives the slow generator's text, whatever the tree and wherever it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mocks import PROMPT, SAMPLERS, MockTarget, RowByRow, Silent, generate, oracle

from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Verdict, verify


@dataclass(eq=False)
class Prophet(RowByRow):
    """Knows the text, and drafts it with some tokens spoilt: never, sometimes or always accepted."""

    text: Sequence[int]
    spoilt: Callable[[int], bool] = lambda position: False
    depth: int = 4

    def draft(self, request: Request, budget: int) -> DraftTree:
        start = len(request.generated)
        depth = min(self.depth, budget, request.max_draft_depth)
        after = [*self.text, *[0] * depth][start : start + depth]  # drafts go on behind the end of the text
        tokens = np.array([(t + 1) % 5 if self.spoilt(start + i) else t for i, t in enumerate(after)], np.int64)
        return DraftTree.chain(tokens)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("limit", [1, 2, 5, 33])
@pytest.mark.parametrize(("spoilt", "fastest"), [
    pytest.param(lambda position: False, 5, id="always accepted"),
    pytest.param(lambda position: position % 7 % 3 == 0, 4, id="sometimes accepted"),
    pytest.param(lambda position: True, 1, id="never accepted"), pytest.param(None, 1, id="not there"),
])  # fmt: skip
def test_the_text_is_the_oracles_when_drafts_are(name, limit, spoilt, fastest):
    target = MockTarget(peak=2, seed=1)
    text = oracle(target, PROMPT, limit, SAMPLERS[name])
    request = Request(PROMPT, limit, sampler=SAMPLERS[name])
    assert generate(target, Prophet(text, spoilt) if spoilt else Silent(), request) == text
    assert request.finish_reason == "length"
    assert max(request.stats.emitted) <= fastest
    if limit == 33:
        assert (request.stats.steps == 33) == (fastest == 1)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("end", range(9))
def test_an_end_of_sequence_inside_an_accepted_run_cuts_exactly_there(name, end):
    target = MockTarget(vocabulary=12, order=1, seed=3)
    prompt = (1, 2)
    text = oracle(target, prompt, 20, SAMPLERS[name])
    eos = frozenset({text[end]})
    cut = text[: text.index(text[end]) + 1]
    assert oracle(target, prompt, 20, SAMPLERS[name], eos) == cut
    request = Request(prompt, 20, sampler=SAMPLERS[name], eos_token_ids=eos)
    assert generate(target, Prophet(text), request) == cut
    assert request.finish_reason == "eos"
    assert max(request.stats.emitted) == min(len(cut), 5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_stopping_criterion_inside_an_accepted_run_cuts_exactly_there(name):
    target = MockTarget(seed=3)
    text = oracle(target, PROMPT, 20, SAMPLERS[name])
    for end in range(1, 9):
        request = Request(PROMPT, 20, sampler=SAMPLERS[name], stopping=lambda ids, n=end: ids.shape[1] == 3 + n)
        assert generate(target, Prophet(text), request) == text[:end]
        assert request.finish_reason == "stop"


@pytest.mark.parametrize("name", SAMPLERS)
@given(data=st.data())
def test_no_tree_whatsoever_changes_the_text(name, data):
    class Anything(RowByRow):
        def draft(self, request: Request, budget: int) -> DraftTree:
            n = data.draw(st.integers(0, budget))
            parents = [data.draw(st.integers(ROOT, i - 1)) for i in range(n)]
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
            tree = DraftTree(np.array(tokens), np.array(parents))
            return tree.cut(len(tree), request.max_draft_depth, 1 << 31)

    target = MockTarget(vocabulary=3, seed=4)
    request = Request((1, 2), 6, sampler=SAMPLERS[name], eos_token_ids=frozenset({0}))
    expected = oracle(target, (1, 2), 6, SAMPLERS[name], frozenset({0}))
    assert generate(target, Anything(), request, budget=6) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("processor", [None, lambda ids, scores: scores])
def test_greedy_breaks_ties_alike_on_every_path_and_in_every_dtype(dtype, processor):
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]], dtype=dtype)
    if dtype == torch.float64:
        logits[0, 2] += 1e-12  # a tie in float32, in which transformers compares
    request = Request([0], 4, sampler=Sampler(processor=processor))
    assert verify(DraftTree.chain([1]), logits, request) == Verdict([0], [1, 0])


def test_of_equal_siblings_the_first_is_followed():
    tree = DraftTree(np.array([1, 1, 2, 0]), np.array([ROOT, ROOT, 0, 1]))
    logits = torch.eye(3)[[1, 2, 0, 1, 1]]
    assert verify(tree, logits, Request([0], 4)) == Verdict([0, 2], [1, 2, 1])
