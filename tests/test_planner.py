"""The planner scores what pays: much when drafts hit, next to nothing when they never do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PROMPTS, OracleDrafter, tiny

import forerun
from forerun.planner import Planner
from forerun.tree import ROOT, DraftTree
from forerun.verify import Outcome, Verdict

NO_LOGITS = torch.empty(0, 0)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    if draw(st.booleans()):
        return DraftTree(np.arange(n), np.array(parents, np.int64))
    p: list[float] = []
    for parent in parents:
        p.append(draw(st.floats(0, 1)) * (p[parent] if parent != ROOT else 1))
    return DraftTree(np.arange(n), np.array(parents, np.int64), probability=np.array(p))


@given(st.lists(trees(), min_size=1, max_size=4), st.floats(1, 300), st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_what_is_kept_is_a_tree(rows: list[DraftTree], critical: float, seed: int) -> None:
    planner, rng = Planner(critical), np.random.default_rng(seed)
    for _ in range(3):
        planned = planner.plan(rows)
        for tree, part in zip(rows, planned, strict=True):
            assert set(part.tokens.tolist()) <= set(tree.tokens.tolist())
        leaves = [int(rng.integers(len(part))) if len(part) else ROOT for part in planned]
        paths = [
            part.ancestors[leaf].nonzero()[0].tolist() for part, leaf in zip(planned, leaves, strict=True) if len(part)
        ]
        planner.observe(
            [
                Outcome(part, Verdict(path, []), NO_LOGITS)
                for part, path in zip([p for p in planned if len(p)], paths, strict=True)
            ]
        )


def run(planner: Planner, accepted: int, steps: int = 300) -> list[int]:
    """Scored nodes per step for chains of 16 of which ``accepted`` are right."""
    sizes = []
    for _ in range(steps):
        (part,) = planner.plan([DraftTree.chain(list(range(16)))])
        sizes.append(len(part))
        planner.observe([Outcome(part, Verdict(list(range(min(accepted, len(part)))), []), NO_LOGITS)])
    return sizes


def test_drafts_that_never_hit_are_hardly_scored() -> None:
    assert np.mean(run(Planner(32), accepted=0)[20:]) < 0.05 * 32  # under 5 % of a pass per step


def test_drafts_that_always_hit_are_scored_in_full() -> None:
    assert np.mean(run(Planner(32), accepted=16)[20:]) == 16


def test_a_chain_is_cut_where_its_hits_end() -> None:
    assert 4 <= np.mean(run(Planner(32), accepted=4)[50:]) < 7


def test_drafts_are_tried_again_when_they_start_to_hit() -> None:
    planner = Planner(32)
    run(planner, accepted=0)
    assert np.mean(run(planner, accepted=16, steps=400)[300:]) == 16


def test_likelier_branches_are_kept_first() -> None:
    tree = DraftTree(np.arange(4), np.array([ROOT, ROOT, 0, 1]), probability=np.array([0.1, 0.6, 0.09, 0.55]))
    kept = [set(Planner(critical).plan([tree])[0].tokens.tolist()) for critical in (1.5, 2, 4, 8, 16, 32, 64)]
    assert {1, 3} in kept
    assert all(small <= large for small, large in itertools.pairwise(kept))


def test_a_cheap_pass_scores_more() -> None:
    tree = DraftTree.chain(list(range(40)))
    assert len(Planner(8).plan([tree])[0]) < len(Planner(64).plan([tree])[0])


def test_the_same_history_gives_the_same_plan() -> None:
    assert run(Planner(32), accepted=3) == run(Planner(32), accepted=3)


def test_probes_are_left_alone() -> None:
    tree = DraftTree(np.arange(3), np.array([ROOT, 0, 1]), probe=np.array([False, True, True]))
    assert Planner(0.1).plan([tree])[0] is tree


def test_an_impossible_critical_length_is_refused() -> None:
    with pytest.raises(ValueError, match="critical_length is 0; it must be positive"):
        Planner(0)


def test_output_does_not_depend_on_the_plan() -> None:
    model, options = tiny("llama"), {"max_new_tokens": 30, "do_sample": False}
    plain = forerun.Engine(model, "none").generate(list(PROMPTS), **options)
    drafter = OracleDrafter([request.tokens for request in plain.requests])
    for planner in (None, Planner(0.5), Planner(8), Planner(1000)):
        engine = forerun.Engine(model, drafter, planner=planner)
        assert engine.generate(list(PROMPTS), **options).generated == plain.generated
