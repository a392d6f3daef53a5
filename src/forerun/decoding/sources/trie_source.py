"""Lookahead's drafter: what continued the last tokens before, as a tree (sections 4.2 and 4.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.core.request import Request
from forerun.core.sampling import MASK64, Sampler, mixed
from forerun.core.transfers import elsewhere
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source, Wants
from forerun.trie import recycled
from forerun.trie.arrays import Int32Array
from forerun.trie.compilation import Compilation, compiled_before
from forerun.trie.logistic_mixer import STEEPEST
from forerun.trie.recycled import Float32Array, RecycledRows
from forerun.trie.tables import LISTED
from forerun.trie.trie import SamplingNoise, TextUpdate, Trie, TrieConfig

log = logging.getLogger(__name__)

TOKENS_A_READ = 8
"""Tokens that are indexed where a model reads one. Indexing one takes 3 us."""

LEARN_TOKENS = 32
"""Index lazily: at the next draft, or when 32 tokens are missing of a text whose suffix is looked for, those of all
texts in one call. So a step without drafts seldom pays for one."""

NOTHING_BEFORE = np.array([-1])
"""What stands before a text's first token; see ``RecycledRows``."""


@dataclass(slots=True, eq=False)
class _Text(RowState):
    """What is not learned yet of a request's text.

    Attributes:
        source: that it is of.
        request: the request.
        begun: whether the trie knows it: not while its code is being compiled.
        ended: whether its row has ended.
        taught: its length at the last step that a draft was asked for.
        asked: whether one is asked for in the step under way.
        rows: for each such step since ``learn``, the text's length after it, and the best tokens of its rows.
    """

    source: TrieSource
    request: Request
    begun: bool = False
    ended: bool = False
    taught: int = 0
    asked: bool = False
    rows: list[tuple[int, RecycledRows]] = field(default_factory=list)

    def close(self) -> None:
        """Free the prompt's index; what was generated stays."""
        self.source.close(self)


class TrieSource(Source):
    """Drafts from the request's prompt and from all that was generated in its namespace.

    Where no draft is asked for, because drafts do not pay, the text is only written down: neither what evidence is
    worth nor the best tokens of the model's logits are learned. So such a step costs little more than a plain one.

    Args:
        config: of the trie that is made here.
        trie: one to use instead, shared or loaded from a file; it brings its own configuration.
        waits: whether to wait for machine code where there is none; else nothing is drafted until it is there.
        lists: makes the model's static lists; see ``models.forward.static_lists``.

    Raises:
        ValueError: if both are given.
    """

    wants = Wants(best=LISTED)

    def __init__(
        self, config: TrieConfig | None = None, trie: Trie | None = None, waits: bool = True,
        lists: Callable[[], RecycledRows] | None = None,
    ) -> None:  # fmt: skip
        if config is not None and trie is not None:
            raise ValueError("config and trie are both given; a trie brings its own configuration")
        self.trie = trie or Trie(config)
        self._live: dict[_Text, None] = {}
        self._waits, self._lists = waits, lists
        self._code: Compilation | None = None  # under way

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """Learn from token ids as if they had been generated in ``namespace``."""
        self.trie.warm(namespace, sequences)

    def warm_up(self) -> None:
        """Get the model's static lists, and load the trie's machine code. Where there is none, processes compile it,
        while this one waits or, if it does not wait for code, generates without drafts."""
        if self._lists is not None:
            self.trie.set_static_lists(self._lists())
        if not compiled_before():
            self._code = Compilation()
            if not self._waits:
                log.info("drafting is being compiled, once; texts are generated without drafts meanwhile")
                return
            log.info("drafting is being compiled, once")
            self._code.wait()
        self._load_code()

    def _load_code(self) -> None:
        self._code = None
        best_of_rows(torch.zeros(1, LISTED))
        self.trie.warm_up()

    def _ready(self) -> bool:
        """Whether there is machine code. Once there is, requests that began before it are indexed, ended ones too."""
        if self._code is None:
            return True
        if self._code.running:
            return False
        self._load_code()
        for text in list(self._live):
            self._begin(text)
            if text.ended:
                self.close(text)
        return True

    def open(self, row: Row) -> _Text:
        """Index the prompt, for this request alone."""
        text = _Text(self, row.request)
        if self._ready():
            self._begin(text)
        self._live[text] = None
        return text

    def _begin(self, text: _Text) -> None:
        request, noise = text.request, _noise_of(text.request.sampler)
        self.trie.begin(
            request.id, request.drafts_from, request.prompt, request.max_new_tokens, request.prediction, noise
        )
        text.begun = True

    def read(self, row: Row, tokens: int) -> bool:
        """Index a piece of the prompt: ``TOKENS_A_READ`` where a model reads one token."""
        return not self._ready() or self.trie.catch_up(row.request.id, TOKENS_A_READ * tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        """Draft the likeliest branches, merged. The texts of all rows are learned first."""
        if not self._ready():
            return [DraftTree.empty()] * len(rows)
        updates = []
        for row, limit in zip(rows, limits, strict=True):
            text: _Text = row.states[self]
            text.asked = True
            updates.append(self._update(text, row.request, limit.nodes))
        return [DraftTree.unchecked(*draft) for draft in self.trie.step(updates)]

    def promise(self, rows: Sequence[Row]) -> list[int]:
        if not self._ready():
            return [0] * len(rows)
        texts: list[_Text] = [row.states[self] for row in rows]
        if any(self._missing(text) >= LEARN_TOKENS for text in texts):
            self.trie.step([self._update(text, text.request) for text in self._live if self._missing(text)])
        return self.trie.known_suffixes([(row.request.id, row.request.tokens) for row in rows])

    def _missing(self, text: _Text) -> int:
        """How many tokens of a text are not learned yet: none while its prompt is read."""
        return len(text.request) - self.trie.length(text.request.id)

    def _update(self, text: _Text, request: Request, budget: int = 0) -> TextUpdate:
        """What is not learned yet of a request's text: each step's lists are kept once its tokens are learned. What a
        fork has beyond the text is a draft."""
        number, tokens = request.id, request.tokens
        known, end = self.trie.length(number), len(text.request)
        lists, text.rows = [(length - known, rows) for length, rows in text.rows], []
        untaught, depth = end - max(known, text.taught), request.max_draft_depth
        return TextUpdate(number, tokens[known:end], lists, tokens[end:], budget, depth, untaught)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        """Note what was committed, to be learned before the next draft at the latest."""
        for row, outcome in zip(rows, outcomes, strict=True):
            text: _Text = row.states[self]
            if text.asked and outcome.verdict.tokens:
                self._recycle(text, outcome)
                text.taught, text.asked = len(text.request), False

    def _recycle(self, noted: _Text, outcome: Outcome) -> None:
        """Note the best tokens of the scored rows.

        They are kept once the step's tokens are learned. Otherwise the mixer would judge lists made from the answer.
        Where texts are replayed there are no logits. Elsewhere than on a CPU they come with the step's transfer, or not
        at all.
        """
        if outcome.best is None and (elsewhere(outcome.logits) or not outcome.logits.shape[0]):
            return
        request = noted.request
        tree, text, end = outcome.tree, request.tokens, len(request) - len(outcome.verdict.tokens)
        last, before = text[end - 1 : end], text[end - 2 : end - 1] if end > 1 else NOTHING_BEFORE
        if len(tree):
            last = np.concatenate((last, tree.tokens))
            before = np.concatenate((before, last[tree.parents + 1]))
        best = outcome.best or best_of_rows(outcome.logits)
        noted.rows.append((len(request), RecycledRows(before, last, *best)))

    def close(self, text: _Text) -> None:
        """Free a text's index, once the step under way has ended."""
        text.ended = True
        if text.begun:
            self.trie.lock.when_free(lambda: self._close(text))

    def _close(self, text: _Text) -> None:
        try:
            if text in self._live and self._missing(text):
                self.trie.step([self._update(text, text.request)])
        finally:
            self._live.pop(text, None)
            self.trie.finish(text.request.id)


def _noise_of(sampler: Sampler) -> SamplingNoise | None:
    """The noise of coupled sampling. That of rejection sampling no draft may know: the test needs drafts that are
    independent of it. Times a temperature above all log-odds it would hide what the mixer knows, and may be infinite.
    """
    if sampler.method != "coupled" or sampler.temperature > STEEPEST:
        return None
    return SamplingNoise(mixed(sampler.seed & MASK64), sampler.temperature)


def best_of_rows(logits: torch.Tensor) -> tuple[Int32Array, Float32Array]:
    """The best tokens of each row of logits ``[n, V]`` on a CPU, and their logits, best first; ``[n, LISTED]`` each."""
    tokens, scores = np.empty((len(logits), LISTED), np.int32), np.empty((len(logits), LISTED), np.float32)
    recycled.best_of_rows(logits.float().contiguous().numpy(), tokens, scores)
    return tokens, scores
