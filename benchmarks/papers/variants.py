"""Ways to draft as contestants over one engine: which drafter, how many nodes, and whether they are pruned to what
pays.

Making an engine takes seconds, so there is one per model, and a variant changes only what may change between texts.
Its drafter is new in each turn, so that no turn sees the answers of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from forerun.bench.contestants import end_tokens, padded, until_end
from forerun.bench.rounds import Contestant, Rows, Run, Tokens
from forerun.drafting.drafter import Drafter
from forerun.engine.engine import BUDGET, Engine


@dataclass(frozen=True)
class Variant:
    """A way to draft.

    Attributes:
        make: makes the drafter, including what it remembers.
        budget: the most nodes of a tree.
        planned: whether only what pays is scored; otherwise all drafts are scored, as in the Lookahead paper.
    """

    make: Callable[[], Drafter]
    budget: int = BUDGET
    planned: bool = True


class Track:
    """One engine on which variants take turns.

    Args:
        engine: of the target; its drafter and budget are changed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def contestant(self, variant: Variant) -> Contestant:
        """Greedy generation with a fresh drafter in each turn."""

        def prepare() -> None:
            self.engine.prune_drafts, self.engine.budget = variant.planned, variant.budget
            self.engine.set_drafter(variant.make())

        return Contestant(self._run, prepare)

    def contestants(self, variants: Mapping[str, Variant]) -> dict[str, Contestant]:
        """A contestant for each variant, by name."""
        return {name: self.contestant(variant) for name, variant in variants.items()}

    def answers(self, variant: Variant, prompts: Sequence[Tokens], max_new_tokens: int) -> list[Tokens]:
        """The target's answers to the prompts, one after another with one drafter; drafts do not change them."""
        self.contestant(variant).prepare()
        runs = [self._run([prompt], max_new_tokens) for prompt in prompts]
        return [text for run in runs for text in run.texts if isinstance(text, list)]

    def _run(self, rows: Rows, max_new_tokens: int) -> Run:
        begin = time.perf_counter()
        found = self.engine.generate(list(rows), max_new_tokens=max_new_tokens, do_sample=False)
        seconds = time.perf_counter() - begin
        return Run(found.generated, seconds, max(stats.steps for stats in found.stats))


def transformers_greedy(model: PreTrainedModel) -> Contestant:
    """``model.generate`` over a padded batch: a pass for each token of the longest row."""
    pad = (end_tokens(model) or [0])[0]

    def run(rows: Rows, max_new_tokens: int) -> Run:
        begin = time.perf_counter()
        ids, mask = padded(rows, model)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
        texts = [until_end(row, model) for row in out[:, ids.shape[1] :].tolist()]
        return Run(texts, time.perf_counter() - begin, out.shape[1] - ids.shape[1])

    return Contestant(run)
