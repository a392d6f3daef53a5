"""Ways to draft as contestants over one engine: which drafter, how many nodes, and whether they are pruned to what
pays.

Making an engine takes seconds, so there is one per model, and a variant changes only what may change between texts.
Its source is new in each turn, so that no turn sees the answers of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.tasks.task_bench import TaskBench
from forerun.bench.rounds import Contestant, Tokens
from forerun.decoding.recipes import Setup
from forerun.decoding.source import Source
from forerun.engine.engine import BUDGET


@dataclass(frozen=True)
class Variant:
    """A way to draft.

    Attributes:
        make: makes the source of drafts, with what it remembers, or a level of the engine's own.
        budget: the most nodes of a tree.
        planned: whether only what pays is scored; otherwise all drafts are scored, as in the Lookahead paper.
    """

    make: Callable[[Setup], Source]
    budget: int = BUDGET
    planned: bool = True


class VariantBench(TaskBench):
    """The contestants of ``python -m benchmarks tasks``, and variants on the same engine."""

    def variant(self, variant: Variant) -> Contestant:
        """Greedy generation with a fresh drafter in each turn."""
        return self.forerun(variant.make, variant.budget, variant.planned)

    def variants(self, variants: Mapping[str, Variant]) -> dict[str, Contestant]:
        """A contestant for each variant, by name."""
        return {name: self.variant(variant) for name, variant in variants.items()}

    def answers(self, variant: Variant, prompts: Sequence[Tokens], max_new_tokens: int) -> list[Tokens]:
        """The target's answers to the prompts, one after another with one drafter; drafts do not change them."""
        self.variant(variant).prepare()
        return [text for prompt in prompts for text in self.generate([prompt], max_new_tokens)[0]]
