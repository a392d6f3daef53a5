"""What a row's next token may be, where not every token may come: a grammar's side of a sampler."""

from __future__ import annotations

from typing import Protocol

import torch


class Constraint(Protocol):
    """Tokens that may follow a text.

    All answers depend on the ids alone, never on earlier calls. So a constraint may be asked about any text in any
    order: about drafts, branches of a tree, and forks of a request.

    Ids are those of ``Request``: padding, prompt and generated tokens, int64 ``[t]``.
    """

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[V]`` with -inf for each token that may not follow; a new tensor.

        Raises:
            RuntimeError: if no token may follow, or the ids themselves are not allowed.
        """
        ...

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        """Tokens that follow for certain, because no other may: no more than ``most``, and none where it is not known.
        It never fails."""
        ...

    def certain(self, ids: torch.Tensor) -> int | None:
        """The one token that may follow, if it is known without work; else None. It never fails."""
        ...

    def complete(self, ids: torch.Tensor) -> bool:
        """Whether the text is whole, so that nothing may follow.

        Raises:
            RuntimeError: if the ids are not allowed.
        """
        ...

    def on_trial(self) -> Constraint:
        """The same for drafts, which may be wrong: it allows all tokens where this one would raise an error."""
        ...
