"""Score a prompt's tokens by generating them under a constraint, with log-probabilities and drafts as usual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from forerun.core.request import Request
from forerun.core.sampling import Constraint


class PromptConstraint:
    """Allows only the prompt's tokens, up to its end."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = list(prompt)

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(ids) >= len(self._prompt):
            return scores.clone()
        masked = torch.full_like(scores, -torch.inf)
        token = self._prompt[len(ids)]
        masked[token] = scores[token]
        return masked

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        return self._prompt[len(ids) : len(ids) + most]

    def certain(self, ids: torch.Tensor) -> int | None:
        return self._prompt[len(ids)] if len(ids) < len(self._prompt) else None

    def complete(self, ids: torch.Tensor) -> bool:
        return False

    def on_trial(self) -> Constraint:
        return self


def scoring_prompt(request: Request, prompt: Sequence[int], answer_tokens: int) -> Request:
    """Make a request for a prompt's first token generate the others and up to ``answer_tokens`` more."""
    ends, inner = request.eos_token_ids, request.stopping
    request.sampler = replace(request.sampler, constraint=PromptConstraint(prompt))
    request.eos_token_ids = frozenset()  # the prompt may contain such tokens

    def stopping(ids: torch.Tensor) -> bool:
        if ids.shape[1] <= len(prompt):
            return ids.shape[1] == len(prompt) and not answer_tokens
        return int(ids[0, -1]) in ends or (inner is not None and inner(ids))

    request.stopping = stopping
    return request
