"""The Lookahead paper's methods as contestants, built from Forerun's public parts.

The published forms draft up to the decoding length, and all drafts are scored (section 4.2). Forerun's default merges
branches by probability and scores what pays. Every trie is warm, as in the paper's experiments: it knows the answers to
other prompts of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from benchmarks.papers.lookahead_trie import Form, LookaheadTrieConfig, LookaheadTrieSource
from benchmarks.tasks.task_bench import TaskBench, WrongSource
from forerun.bench.rounds import PLAIN, Contestant, Tokens
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Setup
from forerun.decoding.source import Source
from forerun.decoding.sources.lookup import Lookup, LookupConfig
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import BUDGET

T = TypeVar("T", TrieSource, LookaheadTrieSource)

FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Lengths:
    """The paper's two lengths.

    Attributes:
        decoding: the most drafted tokens scored per step (L_d).
        branch: tokens of a branch, including its context (L_b).
    """

    decoding: int = 16
    branch: int = 12


@dataclass(frozen=True)
class Method:
    """A way to draft.

    Attributes:
        make: makes the source of drafts, with what it remembers, or a level.
        budget: the most nodes of a tree.
        pruned: whether only what pays is scored; otherwise all drafts are scored, as in the paper.
    """

    make: Callable[[Setup], Source]
    budget: int = BUDGET
    pruned: bool = True


class MethodBench(TaskBench):
    """The contestants of ``python -m benchmarks tasks``, and methods on the same engine."""

    def contestant(self, method: Method) -> Contestant:
        """Greedy generation with a fresh drafter in each turn, which knows nothing of other turns."""
        return self.forerun(method.make, method.budget, method.pruned)

    def answers(self, method: Method, prompts: Sequence[Tokens], max_new_tokens: int) -> list[Tokens]:
        """The target's answers to the prompts, one after another with one drafter; drafts do not change them."""
        self.contestant(method).prepare()
        return [text for prompt in prompts for text in self.generate([prompt], max_new_tokens)[0]]


def warmed(source: T, texts: Sequence[Tokens]) -> T:
    """The source after learning the texts as if they had been generated."""
    source.warm("default", texts)
    return source


def plain() -> Method:
    """No drafts."""
    return Method(lambda setup: setup.over(Planner()))


def published(form: Form, lengths: Lengths, texts: Sequence[Tokens]) -> Method:
    """A published form of the trie with the paper's lengths; drafts are filled to the decoding length, and scored."""
    config = LookaheadTrieConfig(
        form=form,
        branch_length=lengths.branch,
        max_prefix=min(LookaheadTrieConfig.max_prefix, lengths.branch - 1),
        min_matches=max(LookaheadTrieConfig.min_matches, lengths.decoding),
    )
    return Method(lambda setup: warmed(LookaheadTrieSource(config), texts), lengths.decoding, pruned=False)


def default(texts: Sequence[Tokens]) -> Method:
    """Forerun's own trie: merged by probability; only nodes that pay are scored."""
    return Method(lambda setup: warmed(TrieSource(), texts))


def methods(lengths: Lengths, answers: Sequence[Tokens]) -> dict[str, Method]:
    """Table 2 without ``transformers``: prompt lookup, the forms, Forerun's trie, and drafts that are never accepted.

    Args:
        lengths: of the published forms, and the most drafts of the other methods that score all of them.
        answers: answers to other prompts of the task, which the tries know.
    """
    most, lookup = lengths.decoding, LookupConfig(branch_length=lengths.decoding)
    return {
        PLAIN: plain(),
        "forerun lookup (LLMA)": Method(lambda setup: Lookup(lookup), most, pruned=False),
        **{f"forerun {form}": published(form, lengths, answers) for form in FORMS},
        "forerun merged": Method(lambda setup: warmed(TrieSource(), answers), most, pruned=False),
        "forerun trie, the default": default(answers),
        "forerun, wrong drafts, all scored": Method(lambda setup: WrongSource(), most, pruned=False),
    }
