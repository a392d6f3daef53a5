"""What a hierarchy of drafts gives and costs when each draft is accepted with a known probability.

If each of n chained drafts is accepted with probability a, given that the one before was, a step gives 1 + a + ... +
a^n = (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1; reference [22] of the TriForce paper). For
long chains that nears 1 / (1 - a): the TriForce paper's upper bound of 13.1 (section 5.1) is 1 / (1 - 0.9234), with
the acceptance rate of its table 2.

In TriForce the middle level makes these n tokens with the small model's help, and the same formula holds there (section
4.2). Its last round is shorter, for no more tokens are wanted than n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Seconds = Callable[[int], float]
"""Seconds of a pass by its tokens."""


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Expected tokens of a step that verifies a chain: accepted drafts plus one."""
    return sum(acceptance**i for i in range(drafts + 1))


def chain_seconds(most: int, gamma1: int, acceptance: float, middle: Seconds, small: float | None) -> list[float]:
    """Expected seconds for a middle level to make chains of 0, 1, ..., ``most`` tokens.

    Args:
        gamma1: tokens that the small model drafts at a time.
        acceptance: rate at which the middle level accepts them.
        middle: the middle level's passes.
        small: seconds of the small model's pass over one token; None if there is no small model.
    """
    if small is None:
        return [drafts * middle(1) for drafts in range(most + 1)]
    found = [0.0]
    for missing in range(1, most + 1):
        tested = min(gamma1, missing - 1)
        rest = sum(chance * found[missing - 1 - n] for n, chance in enumerate(_accepted(acceptance, tested)))
        found.append(gamma1 * small + middle(tested + 1) + rest)
    return found


def waiting(most: int, gamma1: int, acceptance: float, rows: int) -> list[float]:
    """How many times longer a batch makes chains of 0, 1, ..., ``most`` tokens than one row does.

    Its rows share the middle level's passes, and the row that needs most of them counts.
    """
    if rows == 1:
        return [1.0] * (most + 1)
    done = np.zeros((most + 1, most + 1))  # the chance that a chain of so many tokens stands after so many rounds
    done[0] = 1.0
    for missing in range(1, most + 1):
        for n, chance in enumerate(_accepted(acceptance, min(gamma1, missing - 1))):
            done[missing, 1:] += chance * done[missing - 1 - n, :-1]
    alone, together = (1 - done).sum(1), (1 - done**rows).sum(1)
    return [1.0, *(together[1:] / alone[1:]).tolist()]


def _accepted(acceptance: float, tested: int) -> list[float]:
    """Chances that 0, 1, ... of so many chained drafts are accepted."""
    return [acceptance**n * (1 - acceptance) for n in range(tested)] + [acceptance**tested]
