"""Draft trees of a given shape: Sequoia's against brute force, and texts against the slow generator."""

from __future__ import annotations

import itertools
import math

import pytest
from support.mocks import PROMPT, SAMPLERS, MockScorer, MockTarget, TokenCache, oracle, step

from benchmarks.papers.sequoia import Shape, ShapedDrafter
from forerun.core.request import Request
from forerun.drafting.drafter import Drafter
from forerun.kv.full_cache import FullCache
from forerun.models.forward.runtime import default_runtime


def token_cache(*_: object) -> TokenCache:
    return TokenCache()


def start(drafter: Drafter, request: Request, target: MockTarget) -> None:
    drafter.bind(MockScorer(target), default_runtime())  # type: ignore[arg-type]
    drafter.prefilled(request, FullCache())
    assert drafter.catch_up(request, len(request))


RATES = (0.6, 0.2, 0.1)
SHAPES = {
    "chain": Shape.chain(4),
    "independent": Shape.independent(3, 3),
    "sequoia": Shape.sequoia(12, 4, RATES),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_tree_of_any_shape_gives_the_oracles_text(sampler: str, shape: str) -> None:
    target, small = MockTarget(peak=2.0, seed=1), MockTarget(peak=2.0, seed=2)
    small.table = 0.6 * target.table + 0.4 * small.table
    drafter = ShapedDrafter(token_cache, SHAPES[shape], MockScorer(small))
    request = Request(PROMPT, 60, sampler=SAMPLERS[sampler])
    start(drafter, request, target)
    while request.finish_reason is None:
        step(target, drafter, request, 16)
    assert request.generated.tolist() == oracle(target, PROMPT, 60, SAMPLERS[sampler])


@pytest.mark.parametrize("sampler", ["coupled", "coupled with a processor"])
def test_a_wider_tree_is_accepted_deeper(sampler: str) -> None:
    target, small = MockTarget(peak=2.0, seed=1), MockTarget(peak=2.0, seed=2)
    small.table = 0.6 * target.table + 0.4 * small.table
    steps = {}
    for name, shape in SHAPES.items():
        drafter = ShapedDrafter(token_cache, shape, MockScorer(small))
        request = Request(PROMPT, 300, sampler=SAMPLERS[sampler])
        start(drafter, request, target)
        steps[name] = 0
        while request.finish_reason is None:
            step(target, drafter, request, 16)
            steps[name] += 1
    assert steps["sequoia"] < steps["chain"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sequoias_tree_expects_the_most_accepted_tokens(size: int, depth: int) -> None:
    """Against every tree of that size, by brute force."""

    def chance(node: tuple[int, ...]) -> float:
        return math.prod(RATES[rank] for rank in node)

    nodes = [node for level in range(1, depth + 1) for node in itertools.product(range(3), repeat=level)]
    best = max(
        sum(map(chance, chosen))
        for chosen in itertools.combinations(nodes, min(size, len(nodes)))
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    )
    shape = Shape.sequoia(size, depth, RATES)
    assert len(shape.levels) <= depth and len(shape) == min(size, len(nodes))
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), rank))
    assert len(set(paths)) == len(paths)
    assert sum(map(chance, paths)) == pytest.approx(best)


def test_shapes_say_what_is_wrong_with_rates() -> None:
    for rates in ((0.2, 0.6), (0.9, 0.2)):
        with pytest.raises(ValueError, match=r"^rates are .*; they must fall and sum up to at most 1$"):
            Shape.sequoia(4, 2, rates)
