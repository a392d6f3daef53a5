"""Lookahead's drafter: what continued the last tokens before, as a tree (sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.sampling import MASK64, Sampler, mixed
from forerun.core.transfers import elsewhere
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.trie import recycled
from forerun.trie.arrays import Int32Array
from forerun.trie.logistic_mixer import STEEPEST
from forerun.trie.recycled import Float32Array, RecycledRows
from forerun.trie.tables import LISTED
from forerun.trie.trie import SamplingNoise, TextUpdate, Trie, TrieConfig

TOKENS_A_READ = 8
"""Tokens that are indexed where a model reads one. Indexing one takes 3 us."""

LEARN_TOKENS = 32
"""Index lazily: at the next draft, or when 32 tokens are missing of a text whose suffix is looked for, those of all
texts in one call. So a step without drafts seldom pays for one."""

NOTHING_BEFORE = np.array([-1])
"""What stands before a text's first token; see ``RecycledRows``."""


@dataclass(slots=True)
class _Text:
    """What is not learned yet of a request's text.

    Attributes:
        request: the request.
        taught: its length at the last step that a draft was asked for.
        asked: whether one is asked for in the step under way.
        rows: for each such step since ``learn``, the text's length behind it, and the best tokens of its rows.
    """

    request: Request
    taught: int = 0
    asked: bool = False
    rows: list[tuple[int, RecycledRows]] = field(default_factory=list)


class TrieDrafter(Drafter):
    """Drafts from the request's prompt and from all that was generated in its namespace.

    Where no draft is asked for, because drafts do not pay, the text is only written down: neither what evidence is
    worth nor the best tokens of the model's logits are learned. So such a step costs little more than a plain one.

    Args:
        config: of the trie that is made here.
        trie: one to use instead, shared or loaded from a file; it brings its own configuration.

    Raises:
        ValueError: if both are given.
    """

    best_tokens = LISTED

    def __init__(self, config: TrieConfig | None = None, trie: Trie | None = None) -> None:
        if config is not None and trie is not None:
            raise ValueError("config and trie are both given; a trie brings its own configuration")
        self.trie = trie or Trie(config)
        self._texts: dict[int, _Text] = {}  # by request

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        self.trie.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """Bytes in use for the texts of all namespaces."""
        return self.trie.kept

    def warm_up(self) -> None:
        best_of_rows(torch.zeros(1, LISTED))
        self.trie.warm_up()

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.trie.set_static_lists(runtime.static_lists(target))

    def spell(self, tokenizer: Tokenizer) -> None:
        self.trie.spell(tokenizer)

    def begin(self, request: Request) -> None:
        """Index the prompt, for this request alone."""
        noise = _noise_of(request.sampler)
        self.trie.begin(
            request.id, request.drafts_from, request.prompt, request.max_new_tokens, request.prediction, noise
        )
        self._texts[request.id] = _Text(request)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Index a piece of the prompt: ``TOKENS_A_READ`` where a model reads one token."""
        return self.trie.catch_up(request.id, TOKENS_A_READ * tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft the likeliest branches, merged. The texts of all rows are learned first."""
        for request in context.rows:
            self._texts[request.id].asked = True
        drafts = self.trie.step([self._update(request, budget) for request, budget in context])
        return [DraftTree.unchecked(*draft) for draft in drafts]

    def known_suffixes(self, requests: Sequence[Request]) -> list[int]:
        texts = [(request.id, request.tokens) for request in requests]
        if any(self._missing(request) >= LEARN_TOKENS for request in requests):
            self.trie.step([self._update(text.request) for text in self._texts.values() if self._missing(text.request)])
        return self.trie.known_suffixes(texts)

    def _missing(self, request: Request) -> int:
        """How many tokens of its text are not learned yet: none while its prompt is read."""
        return len(self._texts[request.id].request) - self.trie.length(request.id)

    def _update(self, request: Request, budget: int = 0) -> TextUpdate:
        """What is not learned yet of a request's text: each step's lists are kept once its tokens are learned. What a
        fork has beyond the text is a draft."""
        number, tokens, text = request.id, request.tokens, self._texts[request.id]
        known, end = self.trie.length(number), len(text.request)
        lists, text.rows = [(length - known, rows) for length, rows in text.rows], []
        untaught, depth = end - max(known, text.taught), request.max_draft_depth
        return TextUpdate(number, tokens[known:end], lists, tokens[end:], budget, depth, untaught)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Note what was committed, to be learned before the next draft at the latest."""
        text = self._texts[request.id]
        if text.asked:
            self._recycle(text, request, outcome)
            text.taught, text.asked = len(request), False

    def _recycle(self, noted: _Text, request: Request, outcome: Outcome) -> None:
        """Note the best tokens of the scored rows.

        They are kept once the step's tokens are learned. Otherwise the mixer would judge lists made from the answer.
        Where texts are replayed there are no logits.
        """
        if outcome.best is None and not outcome.logits.shape[0]:
            return
        tree, text, end = outcome.tree, request.tokens, len(request) - len(outcome.verdict.tokens)
        last, before = text[end - 1 : end], text[end - 2 : end - 1] if end > 1 else NOTHING_BEFORE
        if len(tree):
            last = np.concatenate((last, tree.tokens))
            before = np.concatenate((before, last[tree.parents + 1]))
        best = outcome.best or best_of_rows(outcome.logits)
        noted.rows.append((len(request), RecycledRows(before, last, *best)))

    def learn(self, request: Request) -> None:
        """Learn all of a request's text now."""
        self.trie.step([self._update(request)])

    def finish(self, request: Request) -> None:
        """Free the prompt's index; what was generated stays."""
        self.trie.lock.when_free(lambda: self._finish(request))

    def _finish(self, request: Request) -> None:
        try:
            if request.id in self._texts and self._missing(request):
                self.learn(request)
        finally:
            self._texts.pop(request.id, None)
            self.trie.finish(request.id)


def _noise_of(sampler: Sampler) -> SamplingNoise | None:
    """The noise of coupled sampling. That of rejection sampling no draft may know: the test needs drafts that are
    independent of it. Times a temperature above all log-odds it would hide what the mixer knows, and may be infinite.
    """
    if sampler.method != "coupled" or sampler.temperature > STEEPEST:
        return None
    return SamplingNoise(mixed(sampler.seed & MASK64), sampler.temperature)


def best_of_rows(logits: torch.Tensor) -> tuple[Int32Array, Float32Array]:
    """The best tokens of each row of logits ``[n, V]`` and their logits, best first; ``[n, LISTED]`` each."""
    if elsewhere(logits):
        values, indices = logits.float().topk(min(LISTED, logits.shape[-1]))
        both = torch.cat((indices.int(), values.view(torch.int32)), 1).cpu().numpy()  # one transfer
        count = both.shape[1] // 2
        return both[:, :count].copy(), both[:, count:].copy().view(np.float32)
    tokens, scores = np.empty((len(logits), LISTED), np.int32), np.empty((len(logits), LISTED), np.float32)
    recycled.best_of_rows(logits.float().contiguous().numpy(), tokens, scores)
    return tokens, scores
