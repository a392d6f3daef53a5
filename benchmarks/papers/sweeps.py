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
    merged,
    published,
    warmed,
)
from benchmarks.papers.lookahead_trie import Form, LookaheadTrieSource
from benchmarks.papers.timed_trie import TimedTrie, Times
from benchmarks.papers.variants import Variant
from forerun.bench.machine import Row
from forerun.bench.rounds import Tokens
from forerun.core.request import Request
from forerun.decoding.sources.trie_source import TrieSource, _Text
from forerun.trie.trie import TextUpdate, TrieConfig

Labelled = dict[str, tuple[Row, Variant]]
"""Variants by name, with labels for their rows."""
PRUNED_BYTES, PRUNED_TOKENS = 1 << 16, 600
"""Size of a pruned trie: the least that Forerun's takes, and about as many tokens for the paper's."""
CONTEXT = 4
"""Prompt tokens that remain if the prompt is not inserted: the context of the first drafts."""
BRANCHED: tuple[Form, ...] = ("parallel", "hierarchical")
"""The paper's forms with several branches."""


class WithoutOutputs(TrieSource):
    """Learns no generated token; drafts from the prompt alone."""

    def _update(self, text: _Text, request: Request, budget: int = 0) -> TextUpdate:
        """All that was generated counts as a draft."""
        update, generated = super()._update(text, request, budget), request.tokens[request.prompt_length :]
        return update._replace(new=(), lists=(), pending=generated, untaught=0)


def by_updating(lengths: Lengths, known: Known) -> Labelled:
    """Table 3: updating the trie with parts left out, for Forerun's default and for the paper's form."""
    labelled: Labelled = {}
    for form, updates in {"default": _default_updates(known), "hierarchical": _form_updates(lengths, known)}.items():
        for update, variant in updates.items():
            labelled[f"{form}: {update}"] = {"form": form, "update": update}, variant
    return labelled


def _default_updates(known: Known) -> dict[str, Variant]:
    """Forerun's default; what pays is scored."""
    config = TrieConfig()
    return {
        "all": default(known.answers),
        "without prompt": default(known.answers, replace(config, prompt_capacity=CONTEXT)),
        "without output": Variant(lambda setup: WithoutOutputs(config)),
        "pruned": default(known.answers, replace(config, capacity=PRUNED_BYTES)),
        "without eliminating": default(known.texts),
    }


def _form_updates(lengths: Lengths, known: Known) -> dict[str, Variant]:
    """The paper's hierarchical form; all drafts are scored."""

    def variant(texts: Sequence[Tokens], **changed: Any) -> Variant:
        config = replace(form_config("hierarchical", lengths), **changed)
        return Variant(lambda setup: warmed(LookaheadTrieSource(config), texts), lengths.decoding, planned=False)

    return {
        "all": variant(known.answers),
        "without prompt": variant(known.answers, prompt_tokens=CONTEXT),
        "without output": variant((), learns_outputs=False),
        "pruned": variant(known.answers, capacity=PRUNED_TOKENS),
        "without eliminating": variant(known.texts),
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
        held = warmed(TrieSource(config), texts)
        label = {"capacity": capacity, "held": held.trie.tokens(NAMESPACE), "bytes": held.trie.nbytes}
        found[f"{capacity >> 10} KiB"] = label, _clocked(config, texts, times.setdefault(capacity, Times()))
    return found


def _clocked(config: TrieConfig, texts: Sequence[Tokens], times: Times) -> Variant:
    return Variant(lambda setup: warmed(TimedTrie(times, config), texts))


def by_lengths(decodings: Sequence[int], branches: Sequence[int], answers: Sequence[Tokens]) -> Labelled:
    """Figures 4 and 5: every method by decoding length, and the paper's forms also by branch length.

    Args:
        decodings: the most drafted tokens per step.
        branches: tokens of a branch, including its context.
        answers: answers that tries know.
    """
    found: Labelled = {}
    for decoding in decodings:
        lines = {"LLMA": llma(decoding)}
        for form in BRANCHED:
            for length in branches:
                lines[f"{form}, branch {length}"] = published(form, Lengths(decoding, length), answers)
        lines["merged"] = merged(decoding, answers)
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
