"""The Lookahead paper's methods, built from Forerun's public parts.

The published forms draft up to the decoding length, and all drafts are scored (section 4.2). Forerun's default merges
branches by probability and scores what pays. Every trie is warm, as in the paper's experiments: it knows the answers to
other prompts of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from benchmarks.papers.lookahead_decoding import JacobiConfig, fitted_jacobi
from benchmarks.papers.lookahead_trie import Form, LookaheadTrieConfig, LookaheadTrieSource
from benchmarks.papers.variants import Variant
from benchmarks.tasks.task_bench import WrongSource
from forerun.bench.rounds import PLAIN, Tokens
from forerun.decoding.planner import Planner
from forerun.decoding.sources.lookup import Lookup, LookupConfig
from forerun.decoding.sources.trie_source import TrieSource
from forerun.trie.trie import TrieConfig

T = TypeVar("T", TrieSource, LookaheadTrieSource)

NAMESPACE = "default"
FORMS: tuple[Form, ...] = ("single", "parallel", "hierarchical")


@dataclass(frozen=True)
class Lengths:
    """The paper's two lengths.

    Attributes:
        decoding: the most drafted tokens scored per step (L_d).
        branch: tokens of a branch, including its context (L_b).
    """

    decoding: int
    branch: int


@dataclass(frozen=True)
class Known:
    """What a trie has seen of a task: other prompts, and the target's answers to them."""

    prompts: Sequence[Tokens] = ()
    answers: Sequence[Tokens] = ()

    @property
    def texts(self) -> list[Tokens]:
        """Prompts and answers in turn, as seen by a trie that does not eliminate prompts."""
        return list(chain.from_iterable(zip(self.prompts, self.answers, strict=True)))


def warmed(source: T, texts: Sequence[Tokens]) -> T:
    """The source after learning the texts as if they had been generated."""
    source.warm(NAMESPACE, texts)
    return source


def plain() -> Variant:
    """No drafts."""
    return Variant(lambda setup: setup.over(Planner()))


def llma(length: int) -> Variant:
    """A chain that continues the latest match in the text; all of it is scored."""
    return Variant(lambda setup: Lookup(LookupConfig(branch_length=length)), length, planned=False)


def published(form: Form, lengths: Lengths, texts: Sequence[Tokens]) -> Variant:
    """A published form of the trie with the paper's lengths; all drafts are scored."""
    config = form_config(form, lengths)
    return Variant(lambda setup: warmed(LookaheadTrieSource(config), texts), lengths.decoding, planned=False)


def form_config(form: Form, lengths: Lengths) -> LookaheadTrieConfig:
    """The paper's trie: contexts shorter than a branch, and drafts filled to the decoding length."""
    return LookaheadTrieConfig(
        form=form,
        branch_length=lengths.branch,
        max_prefix=min(LookaheadTrieConfig.max_prefix, lengths.branch - 1),
        min_matches=max(LookaheadTrieConfig.min_matches, lengths.decoding),
    )


def merged(decoding: int, texts: Sequence[Tokens]) -> Variant:
    """Forerun's own trie, up to a decoding length; all drafts are scored."""
    return Variant(lambda setup: warmed(TrieSource(), texts), decoding, planned=False)


def default(texts: Sequence[Tokens], config: TrieConfig | None = None) -> Variant:
    """Forerun's own trie: merged by probability; only nodes that pay are scored."""
    return Variant(lambda setup: warmed(TrieSource(config), texts))


def methods(lengths: Lengths, known: Known) -> dict[str, Variant]:
    """Table 2 without ``transformers``: the baselines, the forms, the default, and drafts that never hit."""
    return {
        PLAIN: plain(),
        "forerun lookup (LLMA)": llma(lengths.decoding),
        "forerun jacobi (LookaheadDecoding)": Variant(fitted_jacobi, JacobiConfig().nodes, planned=False),
        **{f"forerun {form}": published(form, lengths, known.answers) for form in FORMS},
        "forerun merged": merged(lengths.decoding, known.answers),
        "forerun trie, the default": default(known.answers),
        "forerun, wrong drafts, all scored": Variant(lambda setup: WrongSource(), lengths.decoding, planned=False),
    }
