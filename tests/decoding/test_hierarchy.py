"""TriForce's hierarchy over mock models: exact by enumeration, where the authors' inner loop is not."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
)
from support.mocks import (
    PROMPT,
    SAMPLERS,
    MockScorer,
    MockTarget,
    Silent,
    TokenCache,
    assert_consistent,
    ban_repeats,
    draft,
    opened,
    oracle,
)
from support.tiny import tiny

from forerun.core.block import Block, RowScores
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, verify
from forerun.decoding.level import Level
from forerun.decoding.planner import AdaptivePlanner, Planner
from forerun.decoding.recipes import Setup, build, reading
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.sources.trie_source import TrieSource
from forerun.models.forward.runtime import default_runtime
from forerun.policy.cost_curve import CostCurve
from forerun.policy.decision import PassShape
from forerun.policy.ledger import SHARE, START_SLACK

TARGET = MockTarget(3, peak=1.5, seed=7)
MIDDLE = MockTarget(3, peak=1.5, seed=8)
SMALL = MockTarget(3, peak=1.5, seed=9)


def middle_level(planner: Planner, nodes: int, chain: int, middle: MockTarget | MockScorer, **more: Any) -> Level:
    """A model of its own that verifies what a planner's sources propose."""
    scorer = middle if isinstance(middle, MockScorer) else MockScorer(middle)
    return Level(scorer, planner, cache=lambda *_: TokenCache(), nodes=nodes, chain=chain, helper=True, **more)


def small_level(chain: int, small: MockTarget | MockScorer) -> Level:
    """A small model that drafts chains by itself."""
    return middle_level(Planner(), 0, chain, small)


def two_levels(gamma1: int, gamma2: int, small: MockTarget = SMALL, middle: MockTarget = MIDDLE) -> Level:
    return middle_level(Planner(chains=small_level(gamma1, small)), gamma1, gamma2, middle)


def start(level: Level, request: Request) -> Row:
    """A row of which the level has read the prompt."""
    row = opened(level, request)
    assert level.read(row, len(request))
    return row


def one_step(level: Level, row: Row, target: MockTarget) -> Outcome:
    request = row.request
    before = request.tokens.tolist()
    tree = draft(level, row, 16)
    assert not len(tree) or tree.depths.max() <= request.max_draft_depth
    logits = target.score(before, tree)
    outcome = Outcome(tree, verify(tree, logits, request), logits)
    assert_consistent(outcome, request)
    for source in level.walk():
        source.learn([row], [outcome])
    return outcome


@pytest.mark.parametrize("processor", [None, ban_repeats], ids=["plain", "processor"])
@pytest.mark.parametrize("gammas", [(1, 1), (1, 2), (2, 2), pytest.param((2, 3), marks=pytest.mark.matrix)])
def test_two_levels_of_rejection_leave_the_targets_distribution_exactly(monkeypatch, gammas, processor):
    sampler, length = Sampler("rejection", processor=processor), gammas[1] + 1

    def step(decide: Decide) -> tuple[int, ...]:
        Noise(decide, set(), redraw=True).install(monkeypatch)
        request = Request((1, 2), length, sampler=sampler)
        level = two_levels(*gammas)
        one_step(level, start(level, request), TARGET)
        return tuple(request.generated.tolist())

    found = complete(enumerate_outcomes(step), TARGET, (1, 2), length, sampler)
    assert_same_distribution(found, joint(TARGET, (1, 2), length, sampler))


def test_what_the_middle_level_hands_on_is_its_own_distribution(monkeypatch):
    """Both the tokens and the ``q`` that comes with them, whatever the small model is like."""
    sampler = Sampler("rejection", processor=ban_repeats)

    def drafted(decide: Decide) -> tuple[int, ...]:
        Noise(decide, set(), redraw=True).install(monkeypatch)
        request = Request((1, 2), 4, sampler=sampler)
        level = two_levels(2, 3)
        tree = draft(level, start(level, request), 16)
        text = [1, 2]
        for token, q in zip(tree.tokens.tolist(), tree.q, strict=True):
            assert torch.allclose(q, probabilities(MIDDLE, text, sampler), atol=1e-12)
            text.append(token)
        return tuple(tree.tokens.tolist())

    assert_same_distribution(enumerate_outcomes(drafted), joint(MIDDLE, (1, 2), 3, sampler))


@pytest.mark.parametrize("seeds", [300, pytest.param(2000, marks=pytest.mark.matrix)])
@pytest.mark.one_in(2)
@pytest.mark.parametrize("processor", [None, ban_repeats], ids=["plain", "processor"])
def test_texts_of_many_seeds_have_the_targets_distribution(processor, seeds):
    """With the real noise, over several steps, so that what is drawn again is drawn with the same noise."""
    counts, drafted, accepted = Counter[tuple[int, ...]](), 0, 0
    for seed in range(seeds):
        request = Request((1, 2), 4, sampler=Sampler("rejection", seed, processor))
        level = two_levels(2, 3)
        row = start(level, request)
        while len(request.generated) < 3:
            outcome = one_step(level, row, TARGET)
            drafted, accepted = drafted + len(outcome.tree), accepted + len(outcome.verdict.path)
        counts[tuple(request.generated[:3].tolist())] += 1
    assert_drawn_from(joint(TARGET, (1, 2), 3, request.sampler), counts)
    assert 0.1 < accepted / drafted < 0.9


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p - q).abs().sum()) / 2


def test_the_authors_inner_loop_is_off_by_a_fifth(monkeypatch):
    """What TriForce's published code does when the small model's token x ~ q is rejected by the middle level: it draws
    anew from p-hat, not from norm(max(p-hat - q, 0)), and still tells the target that the token was drawn from p-hat.

    The small model is sure of token 0, the middle level of nothing. So the middle level keeps token 0 with probability
    1/2 and, having rejected it, draws it once more with probability 1/2: it hands on 0 in 3/4 of the cases and says
    1/2. A target of p = (7/10, 3/10) accepts every 0 (it believes it is rare), and of the 1s 3/5, so it gives 0 with
    probability 3/4 + 1/4 * 2/5 = 17/20. With p = (51/100, 49/100) it is off by more than 0.20 in total variation.
    """
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def authors(p: torch.Tensor) -> torch.Tensor:
        drawn = torch.tensor([0.5, 0.0]) + 0.5 * half  # accepted, or rejected and drawn from p-hat
        kept = drawn * (p / half).clamp(max=1)
        residual = (p - half).clamp(min=0)
        return kept + (1 - kept.sum()) * residual / residual.sum()

    assert authors(torch.tensor([0.7, 0.3])).tolist() == pytest.approx([0.85, 0.15])
    assert max(total_variation(authors(torch.tensor([x, 1 - x])), torch.tensor([x, 1 - x])) for x in (0.51, 0.6)) > 0.2

    target, middle, small = (MockTarget(2, order=1) for _ in range(3))
    for p in (0.51, 0.7):
        target.table[:] = torch.tensor([p, 1 - p]).log()
        middle.table[:] = 0.0
        small.table[:] = torch.tensor([0.0, -40.0])

        def step(decide: Decide) -> tuple[int, ...]:
            Noise(decide, set(), redraw=True).install(monkeypatch)
            request = Request((1, 0), 2, sampler=Sampler("rejection"))
            level = two_levels(1, 2, small, middle)
            one_step(level, start(level, request), target)
            return tuple(request.generated.tolist())[:1]

        found = enumerate_outcomes(step)
        assert found[(0,)] == pytest.approx(p, abs=1e-6)


Sources = Callable[[], dict[str, Any]]
INNER: dict[str, Sources] = {
    "model": lambda: {"chains": small_level(3, MockTarget(peak=1.5, seed=9))},
    "trie": lambda: {"trees": TrieSource()},
    "both": lambda: {"trees": TrieSource(), "costly": small_level(3, MockTarget(peak=1.5, seed=9)), "confident": 1.0},
    "hierarchy": lambda: {
        "chains": middle_level(
            Planner(chains=small_level(2, MockTarget(peak=1.5, seed=9))), 2, 3, MockTarget(peak=1.5, seed=5)
        )
    },
}
"""What proposes to a middle level."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "rejection without q"])
def test_any_inner_drafter_gives_the_oracles_text(sampler, inner, pruned):
    target, middle = MockTarget(peak=2.0, seed=1), MockTarget(peak=2.0, seed=2)
    middle.table = 0.8 * target.table + 0.2 * middle.table
    sources, scorer = INNER[inner](), MockScorer(middle)
    if pruned and "trees" in sources:
        curve = CostCurve((1, 2), (1.0, 1.02), unit=1e-3)
        runtime = replace(default_runtime(), costs=lambda scorer: curve)
        planner: Planner = AdaptivePlanner(runtime, scorer, **sources)
    else:
        planner = Planner(**sources)
    level, request = middle_level(planner, 6, 5, scorer), Request(PROMPT, 60, sampler=SAMPLERS[sampler])
    row = start(level, request)
    accepted = 0
    while request.finish_reason is None:
        accepted += len(one_step(level, row, target).verdict.path)
    row.close()
    assert request.generated.tolist() == oracle(target, PROMPT, 60, SAMPLERS[sampler])
    assert accepted > 20
    inner_stats = request.stats.middle
    assert inner_stats.steps > 0 and inner_stats.tokens >= accepted


def test_a_text_that_ends_in_a_draft_ends_there():
    target = MockTarget(peak=3.0, seed=1)
    text = oracle(target, PROMPT, 40, Sampler())
    eos = frozenset({text[17]})
    expected = text[: 1 + next(i for i, token in enumerate(text) if token in eos)]
    request = Request(PROMPT, 40, eos_token_ids=eos)
    level = two_levels(3, 6, target, target)
    row = start(level, request)
    while request.finish_reason is None:
        one_step(level, row, target)
    assert request.generated.tolist() == expected and request.finish_reason == "eos"


def test_rows_of_a_batch_share_the_passes_of_every_level():
    target = MockTarget(peak=2.0, seed=1)
    small, middle = MockScorer(target), MockScorer(target)
    level = middle_level(Planner(chains=small_level(3, small)), 3, 8, middle)
    requests = [Request(prompt, 20) for prompt in (PROMPT, (2, 3), (0, 1, 2, 3, 4))]
    rows = [start(level, request) for request in requests]
    before = small.passes, middle.passes
    trees = level.propose(rows, [Limit(16)] * 3)
    assert [len(tree) for tree in trees] == [8, 8, 8]
    assert (small.passes - before[0], middle.passes - before[1]) == (6, 2)  # 4 + 4 tokens, 3 of each drafted
    for request, tree in zip(requests, trees, strict=True):
        assert tree.tokens.tolist() == oracle(target, request.prompt.tolist(), 8, Sampler())


def test_the_planner_is_told_what_the_middle_levels_pass_reads():
    """A pass over a sparse cache reads less than all of a text, and its nodes are as cheap as that."""
    planner, told = Planner(trees=Silent()), list[PassShape]()
    planner.plan = lambda rows, budgets, shape: told.append(shape())
    level = middle_level(planner, 3, 2, MIDDLE, reads=reading(4, 0.5))
    rows = [start(level, request) for request in (Request([0, 1], 9), Request([1] * 11, 9))]
    level.propose(rows, [Limit(16)] * 2)
    assert [shape.cached for shape in told] == [[1, 7], [2, 7]]
    assert [shape.left for shape in told] == [[2, 2], [1, 1]]


def test_a_draft_model_that_knows_more_tokens_is_refused():
    setup = Setup(LongContextConfig(tiny("llama")), MockScorer(TARGET), default_runtime())
    with pytest.raises(ValueError, match=r"^the draft model has 48 tokens and the target 3: their tokenizers differ"):
        build("streaming", setup)


def test_a_draft_model_may_know_fewer_tokens():
    target, small, drawn = MockTarget(4, order=1, peak=2.0, seed=1), MockTarget(3, order=1, peak=2.0, seed=2), set()
    for seed in range(200):
        request = Request((1, 2), 3, sampler=Sampler("rejection", seed))
        level = small_level(1, small)
        row = start(level, request)
        assert draft(level, row, 4).q.shape == (1, 3)
        one_step(level, row, target)
        drawn.add(int(request.generated[0]))
    assert len(drawn) == 4  # the token that only the target knows is drawn, too


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"^chain is 0; it must be at least 1$"):
        small_level(0, SMALL)
    with pytest.raises(ValueError, match=r"^nodes is -1; it must be at least 0$"):
        middle_level(Planner(), -1, 1, MIDDLE)


def test_merging_keeps_both_trees_within_the_budget():
    chain = DraftTree.chain([1, 2, 3])
    branches = DraftTree.from_branches([[1, 2, 4, 5], [6, 7]], 10)
    merged = chain.merged(branches, 10)
    assert {(parent, token) for parent, token in zip(merged.parents.tolist(), merged.tokens.tolist(), strict=True)} == {
        (-1, 1), (0, 2), (1, 3), (1, 4), (3, 5), (-1, 6), (5, 7)
    }  # fmt: skip
    assert chain.merged(branches, 4).tokens.tolist() == [1, 2, 3, 4]
    assert chain.merged(branches, 2).tokens.tolist() == [1, 2]


class TimedScorer(MockScorer):
    """A middle level, and a clock that its passes move by about a second."""

    now = 0.0

    def score_rows(self, blocks: Sequence[Block], *rest: Any) -> list[RowScores]:
        self.now += 1.0 + 0.02 * (sum(map(len, blocks)) - len(blocks))
        return super().score_rows(blocks, *rest)


class Guesses(Source):
    """The middle level's own next tokens, or wrong ones; asking takes its time."""

    def __init__(self, middle: TimedScorer, right: bool, asking: float) -> None:
        self.middle, self.right, self.asking, self.asked = middle, right, asking, 0

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        self.asked += len(rows)
        self.middle.now += self.asking * len(rows)
        return [self._chain(row.request.tokens.tolist(), limit.nodes) for row, limit in zip(rows, limits, strict=True)]

    def _chain(self, text: list[int], budget: int) -> DraftTree:
        best = np.array(oracle(self.middle.target, text, min(budget, 6), Sampler()))
        places = np.arange(len(best))
        tokens = best if self.right else (best + 1) % self.middle.vocabulary
        return DraftTree(tokens, places - 1, probability=0.8 ** (places + 1))


@pytest.mark.parametrize("asking", [0.05, 0.3])
@pytest.mark.parametrize("right", [True, False])
def test_a_middle_level_asks_its_drafter_by_the_same_rule(right, asking):
    """What is asked in vain costs it no more than the target; what is right is asked for again and again."""
    target = MockTarget(peak=3.0, seed=1)
    scorer = TimedScorer(target)
    guesses, clock = Guesses(scorer, right, asking), lambda: scorer.now
    runtime = replace(default_runtime(), clock=clock, costs=lambda scorer: CostCurve((1, 2), (1.0, 1.02), unit=1.0))
    planner = AdaptivePlanner(runtime, scorer, guesses)
    level, request = middle_level(planner, 8, 12, scorer, clock=clock), Request(PROMPT, 300)
    row = start(level, request)
    scorer.now, chains = 0.0, 0
    while request.finish_reason is None:
        one_step(level, row, target)
        chains += 1
    passes = sum(request.stats.middle.accepted) + request.stats.middle.steps
    if right:
        assert scorer.now < 0.5 * passes
    else:
        lost = START_SLACK + SHARE * passes + 2 * asking + 0.02 * chains  # a chain's first pass reads two tokens
        assert scorer.now <= passes + lost and guesses.asked * asking <= lost
