"""The Lookahead paper's ablations and sweeps: named variants, each with labels for its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.lookahead_methods import (
    NAMESPACE,
    Known,
    Lengths,
    default,
    form_config,
    llma,
    published,
    warmed,
)
from benchmarks.papers.timed_drafter import Clocked, Times
from benchmarks.papers.variants import Variant
from forerun.bench.rounds import Tokens
from forerun.core.request import Request
from forerun.core.verify import Outcome
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.trie.trie import Form, TrieConfig

Row = dict[str, Any]
Labelled = dict[str, tuple[Row, Variant]]
"""Variants by name, with labels for their rows."""
PRUNED = 1 << 16
"""Bytes of a pruned trie, the least possible: some hundreds of tokens."""
CONTEXT = 4
"""Prompt tokens that remain if the prompt is not inserted: the context of the first drafts."""
BRANCHED: tuple[Form, ...] = ("parallel", "hierarchical")
"""The paper's forms with several branches."""


class WithoutOutputs(TrieDrafter):
    """Learns no generated token; drafts from the prompt alone."""

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Counts nothing; ``propose`` skips what was generated."""


def by_updating(lengths: Lengths, known: Known) -> Labelled:
    """Table 3: updating the trie with parts left out, for Forerun's default and for the paper's form."""
    scored_all = (form_config("hierarchical", lengths), lengths.decoding)
    found: Labelled = {}
    for form, (config, budget) in {"default": (TrieConfig(), None), "hierarchical": scored_all}.items():
        for update, variant in _updates(config, budget, known).items():
            found[f"{form}: {update}"] = {"form": form, "update": update}, variant
    return found


def _updates(config: TrieConfig, budget: int | None, known: Known) -> dict[str, Variant]:
    """The variants of one configuration; without a budget, what pays is scored."""

    def variant(config: TrieConfig, texts: Sequence[Tokens], drafter: type[TrieDrafter] = TrieDrafter) -> Variant:
        def make() -> TrieDrafter:
            return warmed(drafter(config), texts)

        return Variant(make) if budget is None else Variant(make, budget, planned=False)

    return {
        "all": variant(config, known.answers),
        "without prompt": variant(replace(config, prompt_capacity=CONTEXT), known.answers),
        "without output": variant(config, (), WithoutOutputs),
        "pruned": variant(replace(config, capacity=PRUNED), known.answers),
        "without eliminating": variant(config, known.texts),
    }


def by_capacity(capacities: Sequence[int], texts: Sequence[Tokens], times: dict[int, Times]) -> Labelled:
    """Table 4: Forerun's default by the bytes of its trie.

    Args:
        capacities: in bytes.
        texts: texts that the trie has seen, oldest first.
        times: receives the times of drafts and updates for each capacity.
    """
    found: Labelled = {}
    for capacity in capacities:
        config = TrieConfig(capacity=capacity)
        held = warmed(TrieDrafter(config), texts)
        label = {"capacity": capacity, "held": held.trie.tokens(NAMESPACE), "bytes": held.nbytes}
        found[f"{capacity >> 10} KiB"] = label, _clocked(config, texts, times.setdefault(capacity, Times()))
    return found


def _clocked(config: TrieConfig, texts: Sequence[Tokens], times: Times) -> Variant:
    return Variant(lambda: Clocked(warmed(TrieDrafter(config), texts), times))


def by_lengths(decodings: Sequence[int], branches: Sequence[int], branch: int, answers: Sequence[Tokens]) -> Labelled:
    """Figures 4 and 5: every method by decoding length, and the paper's forms also by branch length.

    Args:
        decodings: the most drafted tokens per step.
        branches: tokens of a branch, including its context.
        branch: the merged form's branch length.
        answers: answers that tries know.
    """
    found: Labelled = {}
    for decoding in decodings:
        lines = {"LLMA": llma(decoding)}
        for form in BRANCHED:
            for length in branches:
                lines[f"{form}, branch {length}"] = published(form, Lengths(decoding, length), answers)
        lines["merged"] = published("merged", Lengths(decoding, branch), answers)
        lines["default (planned)"] = replace(default(answers), budget=decoding)
        for line, variant in lines.items():
            found[f"{line}, {decoding}"] = {"line": line, "decoding": decoding}, variant
    return found


def by_warmth(counts: Sequence[int], lengths: Lengths, answers: Sequence[Tokens]) -> Labelled:
    """Figure 7: by the number of answers that the trie knows."""
    found: Labelled = {}
    for count in counts:
        known = answers[:count]
        for line, variant in (
            ("default", default(known)), ("hierarchical", published("hierarchical", lengths, known))
        ):  # fmt: skip
            found[f"{line}, {count}"] = {"line": line, "warm": count}, variant
    return found
