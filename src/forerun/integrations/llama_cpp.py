"""Forerun's trie as a draft model of llama-cpp-python: ``Llama(path, draft_model=ForerunDraft())``.

Written against llama-cpp-python 0.3.36: ``Llama.generate`` calls the draft model once per step with the whole sequence,
accepts the drafted tokens that it samples itself, and adds one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from forerun.integrations.branch_drafter import BranchDrafter
from forerun.integrations.draft_settings import DraftSettings, checked_length
from forerun.integrations.row_texts import RowText

Tokens = npt.NDArray[np.intc]


class ForerunDraft(LlamaDraftModel):  # type: ignore[misc]  # the engine may be missing where types are checked
    """A draft model that proposes the trie's best branch and indexes one sequence at a time.

    A sequence that is the last one, part of its draft, and one token continues that request. Any other is a new
    request, whose prompt, all but the last token, stays private to it. ``settings`` are ``DraftSettings``; errors those
    of ``BranchDrafter``.
    """

    def __init__(self, draft_tokens: int = 10, **settings: Any) -> None:
        self._draft_tokens = checked_length("draft_tokens", draft_tokens)
        self._drafter = BranchDrafter(DraftSettings.from_values(settings))
        self._text = self._draft = np.empty(0, np.intc)

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        """Draft up to ``draft_tokens`` token ids, intc, after ``input_ids``, intc ``[n]``, the sequence with its newest
        token. Raise ValueError, and index nothing, if a token is not in [0, 2**31)."""
        text = np.array(input_ids, np.intc)
        if not len(text):
            return np.empty(0, np.intc)
        row = RowText(text, self._new(text))
        draft = np.array(self._drafter.step([row], [self._draft_tokens])[0], np.intc)
        self._text, self._draft = text, draft
        return draft

    def close(self) -> None:
        """Save the trie. This also happens at interpreter exit."""
        self._drafter.close()

    def _new(self, text: Tokens) -> int:
        """Count the new tokens since the last call; 1 for a new request."""
        new = len(text) - len(self._text)
        if not 1 <= new <= len(self._draft) + 1:
            return 1
        expected = np.concatenate([self._text, self._draft[: new - 1]])
        return new if np.array_equal(text[:-1], expected) else 1
