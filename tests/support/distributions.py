"""Distributions of texts: enumerated over every random decision, or compared by a chi-square test."""

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from forerun.core.sampling import Salt, Sampler
from support.mocks import MockTarget


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a chi-square statistic at least as large, if the counts follow the probabilities."""
    expected = counts.sum() * probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.size - 1) / 2.0).double(), torch.tensor(statistic / 2)))


def assert_drawn_from(distribution: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], int]) -> None:
    """Texts that were counted may come from a distribution, and none is impossible."""
    assert set(counts) <= set(distribution)
    found, weights = (np.array([each.get(text, 0) for text in distribution]) for each in (counts, distribution))
    assert chi_square_p(found, weights) > 1e-4


verify_module = importlib.import_module("forerun.core.verify")
Decide = Callable[[Sequence[float]], int]


def enumerate_outcomes(experiment: Callable[[Decide], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of a random experiment, which leaves every random decision to its argument."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        decisions, weights = pending.pop(), list[float]()

        def decide(probabilities: Sequence[float], decisions=decisions, weights=weights) -> int:
            if len(weights) == len(decisions):
                first, *others = (i for i, p in enumerate(probabilities) if p > 0)
                pending.extend([*decisions, other] for other in others)
                decisions.append(first)
            choice = decisions[len(weights)]
            weights.append(probabilities[choice])
            return choice

        distribution[experiment(decide)] += math.prod(weights)
    return distribution


@dataclass
class UniformVariable:
    """A variable uniform on (0, scale): compared with a bound, it leaves the answer to ``decide``."""

    decide: Decide
    scale: float = 1.0

    def __mul__(self, factor: torch.Tensor | float) -> "UniformVariable":
        return UniformVariable(self.decide, self.scale * float(factor))

    def __ge__(self, bound: torch.Tensor | float) -> bool:
        below = min(1.0, float(bound) / self.scale)
        return self.decide([below, 1 - below]) == 1


@dataclass
class Noise:
    """Replaces the library's draws by decisions, and checks that no two of them share their noise.

    With ``redraw`` drafts may: one behind a rejected draft was never tested, so nothing depended on its noise.
    """

    decide: Decide
    used: set[tuple[int, Salt, int]]
    redraw: bool = False

    def take(self, position: int, salt: Salt, probabilities: torch.Tensor, seed: int = 0) -> int:
        self.claim(position, salt, seed)
        return self.decide((probabilities / probabilities.sum()).tolist())

    def claim(self, position: int, salt: Salt, seed: int) -> None:
        assert (position, salt, seed) not in self.used or (self.redraw and salt is Salt.DRAFT)
        self.used.add((position, salt, seed))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def uniform(seed: int, position: int, salt: Salt) -> UniformVariable:
            self.claim(position, salt, seed)
            return UniformVariable(self.decide)

        def draw(probability: torch.Tensor, seed: int, position: int, salt: Salt) -> int:
            return self.take(position, salt, probability, seed)

        def choose(sampler: Sampler, scores: torch.Tensor, position: int, salt: Salt | None = None) -> int:
            return self.take(
                position, sampler.salt if salt is None else salt, scores.double().softmax(-1), sampler.seed
            )

        patch.setattr(verify_module, "uniform", uniform)
        patch.setattr(verify_module, "draw", draw)
        patch.setattr(Sampler, "choose", choose)


def probabilities(model: MockTarget, context: Sequence[int], sampler: Sampler) -> torch.Tensor:
    """The distribution of the next token, in float64."""
    return sampler.scores(torch.tensor(context), model.logits(context)).double().softmax(-1)


def joint(target: MockTarget, prompt: Sequence[int], length: int, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the next ``length`` tokens."""
    return complete({(): 1.0}, target, prompt, length, sampler)


def complete(
    distribution: dict[tuple[int, ...], float], target: MockTarget, prompt: Sequence[int], length: int, sampler: Sampler
) -> dict[tuple[int, ...], float]:
    """A distribution of texts, each continued by the target itself to ``length`` tokens."""
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = defaultdict(float)
        for text, weight in distribution.items():
            if len(text) == length:
                longer[text] += weight
                continue
            for token, p in enumerate(probabilities(target, [*prompt, *text], sampler).tolist()):
                longer[(*text, token)] += weight * p
        distribution = longer
    return {text: weight for text, weight in distribution.items() if weight}


def assert_same_distribution(
    found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float], tolerance: float = 1e-12
) -> None:
    assert sum(found.values()) == pytest.approx(1, abs=tolerance)
    for text in {*found, *expected}:
        assert abs(found.get(text, 0) - expected.get(text, 0)) < tolerance
