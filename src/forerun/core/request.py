"""One row of a batch: its tokens, how the next one is chosen, and when it ends."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import format_tb
from typing import Literal

import numpy as np
import torch

from forerun.core.sampling import Sampler
from forerun.core.stats import Stats
from forerun.core.tree import IntArray

FinishReason = Literal["eos", "stop", "length", "error"]
Stopping = Callable[[torch.Tensor], bool]

_ids = itertools.count()


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model's own distribution: before temperature, cuts, penalties and grammars.

    Logits are normalised in float64, so equal logits give equal bits whatever shared the pass. ``top`` has the
    likeliest tokens at its position with their log-probabilities, likeliest first; ties by lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PrefixBreak:
    """Where a prompt diverges from the cached one with the longest common prefix, ``position`` tokens long: the cached
    prompt continues with ``kept``, this one with ``given``."""

    position: int
    kept: IntArray
    given: IntArray


class Request:
    """A prompt and its continuation. Rows of a batch share only the forward pass.

    Args:
        prompt: token ids, at least one.
        eos_token_ids: end the sequence, and are part of it.
        stopping: called with the ids ``[1, t]`` after every token; true ends the sequence.
        namespace: requests draft only from earlier outputs of their namespace.
        drafts_from: another namespace to draft from and add the output to, where users agreed to share outputs;
            prefixes are still shared inside ``namespace``.
        budget: maximum nodes of a draft, if below the engine's; 0 hides the request from drafters. Changes no output.
        padding: ids before the prompt that only logits processors and ``stopping`` see.
        prediction: token ids of an expected answer to draft from, private to this request.
        top_logprobs: number of likeliest tokens to keep per position; None keeps no log-probabilities.

    Raises ValueError for an empty prompt, no room to generate, or a negative budget.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        sampler: Sampler | None = None,
        stopping: Stopping | None = None,
        namespace: str = "default",
        drafts_from: str | None = None,
        budget: int | None = None,
        padding: Sequence[int] = (),
        prediction: Sequence[int] = (),
        top_logprobs: int | None = None,
    ) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty; at least one token is needed")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if budget is not None and budget < 0:
            raise ValueError(f"budget is {budget}; it must be 0 or more")
        self.id = next(_ids)
        self.prompt_length = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.sampler = sampler or Sampler()
        self.stopping = stopping
        self.namespace = namespace
        self.drafts_from = namespace if drafts_from is None else drafts_from
        self.budget = budget
        self.prediction = np.array(prediction, np.int64)
        self.cached_tokens = 0
        """Prompt tokens whose prefill was reused."""
        self.turns: Sequence[int] = ()
        """Positions where messages or their parts start, and later prompts are likely to diverge."""
        self.wants_prefix_break = False
        """Whether to report ``prefix_break``."""
        self.prefix_break: PrefixBreak | None = None
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.stats = Stats()
        self.top_logprobs = top_logprobs
        self.logprobs: list[Logprob] = []
        """One per generated token, if kept."""
        self._padding = len(padding)
        self._buffer = np.empty(len(padding) + len(prompt) + max_new_tokens, np.int64)
        self._end = len(padding) + len(prompt)
        self._buffer[: self._end] = [*padding, *prompt]
        self._ids = torch.from_numpy(self._buffer)

    def __len__(self) -> int:
        return self._end - self._padding

    @property
    def tokens(self) -> IntArray:
        """Prompt and generated tokens, int64 ``[len(self)]``; a view."""
        return self._buffer[self._padding : self._end]

    @property
    def prompt(self) -> IntArray:
        """The prompt, int64 ``[prompt_length]``; a view."""
        return self.tokens[: self.prompt_length]

    @property
    def generated(self) -> IntArray:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.max_new_tokens - (len(self) - self.prompt_length)

    @property
    def max_draft_depth(self) -> int:
        """Depth of the deepest node that fits: a step adds one token after the accepted drafts."""
        return self.remaining - 1

    @property
    def seed(self) -> int | None:
        """The seed of a sampled request; None for a greedy one."""
        return None if self.sampler.method == "greedy" else self.sampler.seed

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token for logits ``[V]``. Where a grammar allows only one, nothing is masked."""
        constraint, processor = self.sampler.constraint, self.sampler.processor
        if constraint is not None and processor is None:
            token = constraint.certain(self._ids[: self._end])
            if token is not None and float(logits[token]) > -math.inf:
                return token
        return self.sampler.choose(self.scores(logits), len(self))

    def scores(self, logits: torch.Tensor, after: Sequence[int] = ()) -> torch.Tensor:
        """Return processed scores ``[V]`` for the token after the sequence and ``after``."""
        end = self._end + len(after)
        self._buffer[self._end : end] = after
        return self.sampler.scores(self._ids[:end], logits)

    @property
    def drafts(self) -> bool:
        """Whether the request has drafts."""
        return self.budget != 0

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that the sampler's constraint forces."""
        constraint = self.sampler.constraint
        return [] if constraint is None else constraint.forced(self._ids[: self._end], most)

    def keep_logprobs(self, tokens: Sequence[int], logits: torch.Tensor, path: Sequence[int]) -> None:
        """Keep committed tokens' log-probabilities, by a tree's logits ``[n + 1, V]``."""
        assert self.top_logprobs is not None
        scored = [logits[row] for _, row in zip(tokens, (0, *(node + 1 for node in path)), strict=False)]
        if logits.device.type != "cpu":
            scored = list(torch.stack(scored).cpu())  # one transfer; not yet run on a GPU
        for token, own in zip(tokens, scored, strict=False):
            self.logprobs.append(logprob_of(own, token, self.top_logprobs))

    def fork(self) -> Request:
        """Return a copy for speculative tokens, in the same buffer: this request later overwrites what the copy
        appends. It never calls ``stopping``; under rejection sampling its noise is independent."""
        fork = copy.copy(self)
        fork.sampler = self.sampler.inner()
        fork.stopping = None
        fork.stats = Stats()
        return fork

    def append(self, token: int) -> bool:
        """Commit a token; return whether it ends the sequence."""
        self._buffer[self._end] = token
        self._end += 1
        if token in self.eos_token_ids:
            self.finish_reason = "eos"
        elif self._complete() or (self.stopping is not None and self.stopping(self._ids[None, : self._end])):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def take(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> None:
        """Commit tokens, and a finish reason, that another process chose."""
        end = self._end + len(tokens)
        self._buffer[self._end : end] = tokens
        self._end, self.finish_reason = end, finish_reason

    def _complete(self) -> bool:
        constraint = self.sampler.constraint
        return constraint is not None and constraint.complete(self._ids[: self._end])

    def fail(self, error: Exception) -> None:
        """End the request with an error. The traceback becomes a note, since its frames keep all rows' caches alive."""
        error.add_note(f"It arose in:\n{''.join(format_tb(error.__traceback__))}")
        self.finish_reason, self.error = "error", error.with_traceback(None)


def logprob_of(logits: torch.Tensor, token: int, top: int) -> Logprob:
    """Return a token's log-probability from logits ``[V]``, and the ``top`` likeliest tokens."""
    logprobs = torch.log_softmax(logits.to(torch.float64, copy=True), -1)
    best: list[tuple[int, float]] = []
    if top:
        values = logprobs.numpy()
        among = np.flatnonzero(values >= float(logprobs.topk(min(top, len(values))).values[-1]))  # with all ties
        among = among[np.argsort(-values[among], kind="stable")[:top]]
        best = list(zip(among.tolist(), values[among].tolist(), strict=True))
    return Logprob(token, float(logprobs[token]), tuple(best))
