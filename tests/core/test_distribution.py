"""Verification leaves the target's distribution exactly: enumerated over every random decision, and sampled by seed."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.distributions import (
    Decide,
    Noise,
    assert_drawn_from,
    assert_same_distribution,
    complete,
    enumerate_outcomes,
    joint,
    probabilities,
    verify_module,
)
from support.mocks import PROMPT, MockTarget, assert_consistent, ban_repeats, oracle

from forerun.core.request import Request
from forerun.core.sampling import Salt, Sampler, draw
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict, verify

# Exactness by enumeration: the code runs once for every sequence of random decisions, weighted by their probability.


def drawn_chain(
    model: MockTarget, request: Request, length: int, sampler: Sampler, pick: Callable[[torch.Tensor, int], int]
) -> DraftTree:
    """Tokens drawn one after the other from ``model``, with the distributions they came from."""
    text, rows = request.tokens.tolist(), []
    for _ in range(length):
        rows.append(probabilities(model, text, sampler))
        text.append(pick(rows[-1], len(text)))
    q = torch.stack(rows) if rows else torch.empty(0, 5, dtype=torch.float64)
    return DraftTree.chain(text[len(request) :], q=q)


DRAFTS = {
    "unlike the target": MockTarget(peak=1.5, seed=8),
    "equal to the target": MockTarget(peak=1.5, seed=7),
    "certain of one token": MockTarget(peak=400, seed=9),
}


@pytest.mark.parametrize("processor", [None, ban_repeats])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_rejection_leaves_the_targets_distribution_exactly(monkeypatch, draft, length, processor):
    target, sampler = MockTarget(peak=1.5, seed=7), Sampler("rejection", processor=processor)
    accepted: dict[int, float] = defaultdict(float)

    def one_step(decide: Decide) -> tuple[int, ...]:
        noise = Noise(decide, set())
        noise.install(monkeypatch)
        request = Request(PROMPT, length + 1, sampler=sampler)
        tree = drawn_chain(
            DRAFTS[draft], request, length, sampler, lambda q, position: noise.take(position, Salt.DRAFT, q)
        )
        verdict = verify(tree, target.score(PROMPT, tree), request)
        assert_consistent(Outcome(tree, verdict, torch.empty(0)), request)
        return (len(verdict.path), *verdict.tokens)

    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for (path_length, *tokens), weight in enumerate_outcomes(one_step).items():
        texts[tuple(tokens)] += weight
        accepted[path_length] += weight
    assert_same_distribution(
        complete(texts, target, PROMPT, length + 1, sampler), joint(target, PROMPT, length + 1, sampler)
    )
    p, q = (probabilities(model, PROMPT, sampler) for model in (target, DRAFTS[draft]))
    assert accepted[0] == pytest.approx(1 - float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({2})])
def test_rejection_is_exact_over_several_steps_up_to_the_end(monkeypatch, eos):
    target, draft = MockTarget(3, peak=1.5, seed=7), MockTarget(3, peak=1.5, seed=8)
    sampler = Sampler("rejection")

    def whole_text(decide: Decide) -> tuple[int, ...]:
        noise = Noise(decide, set())
        noise.install(monkeypatch)
        request = Request((1, 2), 3, sampler=sampler, eos_token_ids=eos)
        while request.finish_reason is None:
            pick = Noise(decide, set())  # drafts behind a rejected one are drawn anew: nothing depended on them
            length = min(2, request.max_draft_depth)
            tree = drawn_chain(draft, request, length, sampler, lambda q, at, pick=pick: pick.take(at, Salt.DRAFT, q))
            q = torch.empty(0, 3) if not len(tree) else tree.q
            verify(DraftTree.chain(tree.tokens, q=q), target.score(request.tokens.tolist(), tree), request)
        return tuple(request.generated.tolist())

    def cut(text: tuple[int, ...]) -> tuple[int, ...]:
        return next((text[: i + 1] for i, token in enumerate(text) if token in eos), text)

    expected: dict[tuple[int, ...], float] = defaultdict(float)
    for text, weight in joint(target, (1, 2), 3, sampler).items():
        expected[cut(text)] += weight
    assert_same_distribution(enumerate_outcomes(whole_text), expected)


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("branches", [[], [[1, 2, 3]], [[0, 1], [0, 2], [3, 3, 3], [4]]])
def test_the_walk_leaves_the_targets_distribution_exactly(monkeypatch, method, branches):
    target, tree = MockTarget(seed=6), DraftTree.from_branches(branches, 16)
    sampler = Sampler(method, processor=ban_repeats)

    def one_step(decide: Decide) -> tuple[int, ...]:
        Noise(decide, set()).install(monkeypatch)
        request = Request(PROMPT, 4, sampler=sampler)
        return tuple(verify(tree, target.score(PROMPT, tree), request).tokens)

    found = complete(enumerate_outcomes(one_step), target, PROMPT, 4, sampler)
    assert_same_distribution(found, joint(target, PROMPT, 4, sampler))


# Exactness by sampling: the real noise, a seed a text.


def draft_and_verify(draft: MockTarget, target: MockTarget, request: Request) -> tuple[int, int]:
    """A step with at most two drafts, drawn with the noise the sampler says; how many were drafted and accepted."""
    sampler, length = request.sampler, min(2, request.max_draft_depth)
    tree = drawn_chain(
        draft, request, length, sampler, lambda q, position: draw(q, sampler.seed, position, sampler.draft_salt())
    )
    verdict = verify(tree, target.score(request.tokens.tolist(), tree), request)
    return len(tree), len(verdict.path)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seeds", [300, pytest.param(3000, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("processor", [None, ban_repeats])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_texts_of_many_seeds_have_the_targets_distribution(method, processor, seeds):
    target, draft = DRAFTS["equal to the target"], DRAFTS["unlike the target"]
    found, drafted, accepted = Counter[tuple[int, ...]](), 0, 0
    for seed in range(seeds):
        request = Request(PROMPT, 3, sampler=Sampler(method, seed, processor))
        while len(request.generated) < 2:
            counts = draft_and_verify(draft, target, request)
            drafted, accepted = drafted + counts[0], accepted + counts[1]
        found[tuple(request.generated[:2].tolist())] += 1
    assert_drawn_from(joint(target, PROMPT, 2, request.sampler), found)
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_drafts_from_the_targets_own_distribution_are_always_accepted(method):
    target = DRAFTS["equal to the target"]
    requests = (Request(PROMPT, 3, sampler=Sampler(method, seed, ban_repeats)) for seed in range(300))
    assert {draft_and_verify(target, target, request) for request in requests} == {(2, 2)}


def test_greedy_has_one_text_with_or_without_q():
    target = MockTarget(seed=7)
    text = oracle(target, PROMPT, 4, Sampler())
    for tokens in itertools.product(range(5), repeat=2):
        tree = DraftTree.chain(tokens, q=torch.full((2, 5), 0.2))
        verdict = verify(tree, target.score(PROMPT, tree), Request(PROMPT, 4))
        assert verdict.tokens == text[: len(verdict.tokens)]
        assert len(verdict.path) == next((i for i in range(2) if tokens[i] != text[i]), 2)


def test_drafts_of_no_probability_are_rejected_and_certain_ones_accepted():
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0]])
    for seed in range(50):
        request = Request([0], 4, sampler=Sampler("rejection", seed))
        verdict = verify(DraftTree.chain([0, 1], q=torch.eye(3)[:2]), torch.cat([logits, logits[:1]]), request)
        assert verdict == Verdict([0], [0, 2])


@pytest.mark.parametrize("first", [0.3, 0.0])
def test_a_draft_that_its_model_could_not_choose_is_rejected(first):
    """As where a processor leaves only tokens that the draft model does not know, and its softmax is not a number."""
    p, drawn = torch.tensor([first, 0.2, 0.8 - first]), []
    for seed in range(300):
        request = Request([0], 4, sampler=Sampler("rejection", seed))
        verdict = verify(DraftTree.chain([0], q=torch.full((1, 2), math.nan)), p.log().repeat(2, 1), request)
        assert verdict.path == []
        drawn += verdict.tokens
    assert [drawn.count(token) / 300 for token in (0, 1)] == pytest.approx([first, 0.2], abs=0.08)


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    request = Request([0], 4, sampler=Sampler("rejection"))
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert verify_module._draw_residual(p, p, request) in (0, 1)
    assert verify_module._draw_residual(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), request) == 1


def test_rejection_refuses_q_on_a_tree_that_branches():
    tree = DraftTree(np.array([1, 2]), np.array([ROOT, ROOT]), q=torch.full((2, 3), 1 / 3))
    request = Request([0], 4, sampler=Sampler("rejection"))
    with pytest.raises(ValueError, match=r"^rejection sampling with q needs a chain, and this tree branches$"):
        verify(tree, torch.zeros(3, 3), request)
    assert verify(tree, torch.zeros(3, 3), Request([0], 4, sampler=Sampler("coupled"))).tokens
