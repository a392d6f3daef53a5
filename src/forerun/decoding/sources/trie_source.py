"""Lookahead's drafter: a tree of what continued the last tokens before (sections 4.2 and 4.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.core.request import Request
from forerun.core.sampling import MASK64, Sampler, mixed
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source, Wants
from forerun.trie import recycled
from forerun.trie.arrays import Int32Array
from forerun.trie.compilation import Compilation, compiled_before
from forerun.trie.logistic_mixer import STEEPEST
from forerun.trie.recycled import Float32Array, RecycledRows, RowsToKeep, joined
from forerun.trie.tables import LISTED
from forerun.trie.trie import SamplingNoise, TextUpdate, Trie, TrieConfig

log = logging.getLogger(__name__)

TOKENS_A_READ = 8
"""Tokens indexed per token that a model prefills. Indexing one costs 3 us."""

LEARN_TOKENS = 32
"""Index lazily, all requests in one call: at the next draft, or when one lacks 32 tokens at a look-up of its suffix."""

NO_NODES = Limit(0)
NOTHING_BEFORE = np.array([-1])
"""Stands before a request's first token; see ``RecycledRows``."""


@dataclass(slots=True, eq=False)
class _Text(RowState):
    """A request's tokens that are not indexed yet.

    Attributes:
        begun: whether the trie has the request; false while code is being compiled.
        taught: length of the request at the last step with a draft.
        asked: whether the step under way proposes.
        lists: by proposing step since the last draft, the best tokens of its rows.
    """

    source: TrieSource
    request: Request
    begun: bool = False
    ended: bool = False
    taught: int = 0
    asked: bool = False
    lists: list[RowsToKeep] = field(default_factory=list)

    def close(self) -> None:
        self.source.close(self)


class TrieSource(Source):
    """Drafts from the request's prompt and from all outputs of its namespace.

    Steps without a draft cost little more than plain ones: their tokens are only noted, and neither the weights of
    evidence nor the best tokens of logits are updated.

    Args:
        config, trie: of a new trie, or one to use instead, shared or loaded from a file; ValueError for both.
        waits: whether to wait for compilation; else drafting starts when it is done.
        lists: makes the model's static lists; see ``models.forward.static_lists``.
    """

    wants = Wants(best=LISTED)
    follows = False

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
        """Index token ids as if they had been generated in ``namespace``."""
        self.trie.warm(namespace, sequences)

    def warm_up(self) -> None:
        """Set the model's static lists, and load the trie's machine code, or let other processes compile it while this
        one waits or generates without drafts."""
        if self._lists is not None:
            self.trie.set_static_lists(self._lists())
        if not compiled_before():
            self._code = Compilation()
            if not self._waits:
                log.info("compiling the trie, once; generating without drafts meanwhile")
                return
            log.info("compiling the trie, once")
            self._code.wait()
        self._load_code()

    def _load_code(self) -> None:
        self._code = None
        best_of_rows(torch.zeros(1, LISTED))
        self.trie.warm_up()

    def _ready(self) -> bool:
        """Return whether machine code is loaded; once it is, index all requests that started before."""
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
        return not self._ready() or self.trie.catch_up(row.request.id, TOKENS_A_READ * tokens)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        """Draft the likeliest branches, merged, after indexing what all rows committed."""
        if not self._ready():
            return [DraftTree.empty()] * len(rows)
        updates = []
        for row, limit in zip(rows, limits, strict=True):
            text: _Text = row.states[self]
            text.asked = True
            updates.append(self._update(text, row.request, limit))
        return [DraftTree.unchecked(*draft) for draft in self.trie.step(updates)]

    def promise(self, rows: Sequence[Row]) -> list[int]:
        if not self._ready():
            return [0] * len(rows)
        texts: list[_Text] = [row.states[self] for row in rows]
        if any(self._missing(text) >= LEARN_TOKENS for text in texts):
            self.trie.step([self._update(text, text.request) for text in self._live if self._missing(text)])
        return self.trie.known_suffixes([(row.request.id, row.request.tokens) for row in rows])

    def _missing(self, text: _Text) -> int:
        return len(text.request) - self.trie.length(text.request.id)

    def _update(self, text: _Text, request: Request, limit: Limit = NO_NODES) -> TextUpdate:
        """Return what is to be indexed of a request. Tokens that a fork has beyond it are drafts."""
        number, tokens = request.id, request.tokens
        known, end = self.trie.length(number), len(text.request)
        lists, text.lists = joined(text.lists), []
        untaught, depth = end - max(known, text.taught), request.max_draft_depth
        return TextUpdate(number, tokens[known:end], lists, tokens[end:], limit.nodes, depth, untaught, limit.least)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            text: _Text = row.states[self]
            if text.asked and outcome.verdict.tokens:
                self._recycle(text, outcome)
                text.taught, text.asked = len(text.request), False

    def _recycle(self, noted: _Text, outcome: Outcome) -> None:
        """Note the best tokens of the scored rows, to store after the step's tokens are indexed: otherwise the mixer
        would judge lists made from the answer. From a device, lists come with the step's transfer; replays have
        none."""
        if outcome.best is None and (not outcome.logits.is_cpu or not outcome.logits.shape[0]):
            return
        request = noted.request
        tree, text, end = outcome.tree, request.tokens, len(request) - len(outcome.verdict.tokens)
        last, before = text[end - 1 : end], text[end - 2 : end - 1] if end > 1 else NOTHING_BEFORE
        if len(tree):
            last = np.concatenate((last, tree.tokens))
            before = np.concatenate((before, last[tree.parents + 1]))
        best = outcome.best or best_of_rows(outcome.logits)
        rows = RecycledRows(before, last, *best)
        noted.lists.append(RowsToKeep(np.full(len(last), len(request)), rows))

    def close(self, text: _Text) -> None:
        """Free a request's index once the step under way has ended."""
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
    """Return the noise of coupled sampling. At a temperature above all log-odds, it would hide what the mixer predicts,
    and may be infinite. Rejection sampling needs drafts that are independent of its noise."""
    if sampler.method != "coupled" or sampler.temperature > STEEPEST:
        return None
    return SamplingNoise(mixed(sampler.seed & MASK64), sampler.temperature)


def best_of_rows(logits: torch.Tensor) -> tuple[Int32Array, Float32Array]:
    """Return the best tokens of rows of CPU logits ``[n, V]``, best first, and their logits, ``[n, LISTED]`` each."""
    tokens, scores = np.empty((len(logits), LISTED), np.int32), np.empty((len(logits), LISTED), np.float32)
    recycled.best_of_rows(logits.float().contiguous().numpy(), tokens, scores)
    return tokens, scores
