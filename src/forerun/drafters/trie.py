"""Lookahead's drafter: what continued the last tokens before, as a tree (sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.drafters.base import Drafter
from forerun.index.trie import Trie, TrieConfig


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

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """Learn from token ids as if they had been generated in ``namespace``; see ``Trie.warm``."""
        self.trie.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """Bytes in use for the texts of all namespaces."""
        return self.trie.kept

    def warm_up(self) -> None:
        """Compile, or load, what drafting runs, so that no user's answer waits for it."""
        self.trie.warm_up()

    def spell(self, tokenizer: Tokenizer) -> None:
        """See ``Trie.spell``."""
        self.trie.spell(tokenizer)

    def begin(self, request: Request) -> None:
        """Index the prompt, for this request alone."""
        self.trie.begin(request.id, request.drafts_from, request.prompt, request.max_new_tokens)

    def propose(self, request: Request, budget: int) -> DraftTree:
        """The likeliest branches, merged, at most ``budget`` nodes."""
        draft = self.trie.retrieve(request.id, budget, request.max_draft_depth, self._pending(request))
        return DraftTree(draft.tokens, draft.parents, probability=draft.probability, origins=draft.origins)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Index what was committed."""
        self.trie.extend(request.id, self._pending(request))

    def _pending(self, request: Request) -> IntArray:
        """The end of a text that the trie does not have."""
        return request.tokens[self.trie.length(request.id) :]

    def finish(self, request: Request) -> None:
        """Free the prompt's index; what was generated stays."""
        self.trie.finish(request.id)
