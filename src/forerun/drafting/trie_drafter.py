"""Lookahead's drafter: what continued the last tokens before, as a tree (sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.trie.trie import Trie, TrieConfig

TOKENS_A_READ = 8
"""Tokens that are indexed in the time that a model reads one, or less: 3 us each."""

LEARN_TOKENS = 16
"""Index lazily: at the next draft, or after 16 tokens. So a step without drafts does not pay for a call."""


class TrieDrafter(Drafter):
    """Drafts from the request's prompt and from all that was generated in its namespace.

    Args:
        config: of the trie that is made here.
        trie: one to use instead, shared or loaded from a file; it brings its own configuration.

    Raises:
        ValueError: if both are given.
    """

    def __init__(self, config: TrieConfig | None = None, trie: Trie | None = None) -> None:
        if config is not None and trie is not None:
            raise ValueError("config and trie are both given; a trie brings its own configuration")
        self.trie = trie or Trie(config)
        self._committed: dict[int, int] = {}
        """Length of each request's text; what a request has beyond that is a draft."""

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        self.trie.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """Bytes in use for the texts of all namespaces."""
        return self.trie.kept

    def warm_up(self) -> None:
        self.trie.warm_up()

    def spell(self, tokenizer: Tokenizer) -> None:
        self.trie.spell(tokenizer)

    def begin(self, request: Request) -> None:
        """Index the prompt, for this request alone."""
        self.trie.begin(request.id, request.drafts_from, request.prompt, request.max_new_tokens, request.prediction)
        self._committed[request.id] = request.prompt_length

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Index a piece of the prompt: ``TOKENS_A_READ`` where a model reads one token."""
        return self.trie.catch_up(request.id, TOKENS_A_READ * tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft the likeliest branches, merged. The texts of all rows are learned first."""
        for request in context.rows:
            self.learn(request)
        return [self._tree(request, budget) for request, budget in context]

    def _tree(self, request: Request, budget: int) -> DraftTree:
        on_trial = request.tokens[self._committed[request.id] :]
        draft = self.trie.retrieve(request.id, budget, request.max_draft_depth, on_trial)
        return DraftTree(draft.tokens, draft.parents, probability=draft.probability, origins=draft.origins)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Note what was committed, to be learned before the next draft at the latest."""
        self._committed[request.id] = len(request)
        if len(request) - self.trie.length(request.id) >= LEARN_TOKENS:
            self.learn(request)

    def learn(self, request: Request) -> None:
        """Learn all of a request's text now."""
        known, committed = self.trie.length(request.id), self._committed[request.id]
        if known < committed:
            self.trie.extend(request.id, request.tokens[known:committed])

    def finish(self, request: Request) -> None:
        """Free the prompt's index; what was generated stays."""
        if request.id in self._committed:
            self.learn(request)
            del self._committed[request.id]
        self.trie.finish(request.id)
