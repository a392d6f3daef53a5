"""Forerun and ``transformers`` as contestants over one target.

A drafter is *cold* if it knows only the prompt. It is *warm* if it has drafted the answers to other prompts of the
task, as in a server that has run for a while.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.journal import Journal
from benchmarks.papers.recipes import build_drafter
from benchmarks.speed import BASELINE, Contestant, Job, Rows, Run, Series, Tokens, measure
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.drafting.drafter import Drafter
from forerun.engine.engine import Engine

PADDED = "transformers padded"
LOOKUP_TOKENS = 10
"""Draft length of transformers' prompt lookup, as in its documentation."""

Generate = Callable[[Rows, int], tuple[list[Tokens], int]]
"""From rows and a number of new tokens to texts and the number of passes."""

Makers = Mapping[str, Callable[[], Contestant]]
"""What builds each contestant, by its name."""


class WrongDrafter(Drafter):
    """Drafts tokens that hardly ever come, and rates them as likely: measures the cost of useless drafts."""

    def begin(self, request: Request) -> None:
        """Find a token that the prompt does not contain."""
        self._absent = int(np.setdiff1d(np.arange(len(request) + 1), request.prompt)[0])

    def propose(self, request: Request, budget: int) -> DraftTree:
        """A chain of that token, each rated as likely."""
        length = max(0, min(budget, request.max_draft_depth))
        claimed = np.full(length, 0.9).cumprod()
        return DraftTree(np.full(length, self._absent), np.arange(-1, length - 1), probability=claimed)


class Bench:
    """Contestants over one target.

    Args:
        model: the target, in the dtype to measure in.
        drafters: names from ``benchmarks.papers.recipes``; each runs cold, and those with a memory also warm.
        draft: a small model with the same tokenizer for transformers' assisted generation, or None.
        tokenizer: of the models, or None; drafters take the spelling of words from it.
        others: further contestants, by name.
        skip: names of contestants that are not measured; see ``check_skip``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[str],
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        others: Mapping[str, Contestant] | None = None,
        skip: Sequence[str] = (),
    ) -> None:
        self.settings = LongContextConfig(draft_model=draft)
        self.model = model
        self.draft = draft
        self.drafters = list(drafters)
        self.others = dict(others or {})
        self.skip = list(skip)
        self._tokenizer = tokenizer
        self._engines: dict[str, Engine] = {}
        for name in self.drafters:
            self._engine(name)
        self._wrong = Engine(model, WrongDrafter())

    def run(self, job: Job, rounds: int, journal: Journal | None = None) -> list[Series]:
        """Measure every contestant on a job.

        Args:
            job: its prompts are continued one at a time.
            rounds: turns of each contestant for each prompt.
            journal: see ``speed.measure``.
        """
        groups, contestants = [[prompt] for prompt in job.prompts], self._built(self._makers(job))
        return measure(contestants, job.task, groups, job.max_new_tokens, rounds, journal, job.warm_prompts)

    def run_batches(
        self, prompts: Sequence[Tokens], size: int, max_new_tokens: int, rounds: int, journal: Journal | None = None
    ) -> list[Series]:
        """Measure prompts in batches: padded by transformers, ragged by Forerun.

        Args:
            prompts: those after the last whole batch are not measured.
            size: of the batches.
            max_new_tokens: of each row.
            rounds: turns of each contestant.
            journal: see ``speed.measure``.
        """
        groups = in_batches(prompts, size)
        contestants = self._built(self._batch_makers())
        return measure(contestants, f"batches of {size}", groups, max_new_tokens, rounds, journal)

    def check_skip(self, jobs: Sequence[Job], batches: bool = False) -> None:
        """Refuse to skip what is in none of the jobs, nor in batches if they are measured.

        Raises:
            ValueError: if ``skip`` names no contestant, or one that the others are compared with.
        """
        makers = [self._makers(job) for job in jobs] + ([self._batch_makers()] if batches else [])
        known = dict.fromkeys(name for each in makers for name in each if name not in (BASELINE, PADDED))
        if unknown := [name for name in self.skip if name not in known]:
            raise ValueError(f"--skip has {', '.join(map(repr, unknown))}; known are {', '.join(map(repr, known))}")

    def _makers(self, job: Job) -> Makers:
        found: dict[str, Callable[[], Contestant]] = {
            BASELINE: self._transformers,
            "transformers prompt lookup": partial(self._transformers, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        }
        if self.draft is not None:
            found["transformers assisted"] = partial(self._transformers, assistant_model=self.draft)
        for name in self.drafters:
            found[f"forerun {name}"] = partial(self._forerun, name)
            if job.warm_prompts and name.startswith("trie"):
                found[f"forerun {name}, warm"] = partial(self._forerun, name, job.warm_prompts, job.max_new_tokens)
        found["forerun, wrong drafts"] = lambda: Contestant(_timed(_greedy(self._wrong)))
        return found | {name: lambda other=other: other for name, other in self.others.items()}

    def _batch_makers(self) -> Makers:
        ours = {f"forerun {name}": partial(self._forerun, name) for name in ("none", "trie")}
        return {PADDED: self._transformers, **ours}

    def _built(self, makers: Makers) -> dict[str, Contestant]:
        """Those that are not skipped; only they answer the prompts before."""
        return {name: make() for name, make in makers.items() if name not in self.skip}

    def _transformers(self, **options: Any) -> Contestant:
        def generate(rows: Rows, max_new_tokens: int) -> tuple[list[Tokens], int]:
            ids, mask = padded(rows, self.model)
            ends = end_tokens(self.model)
            more = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": (ends or [0])[0], **options}
            with _counting(self.model) as passes:
                out = self.model.generate(ids, attention_mask=mask, **more)
            return [until_end(row, self.model) for row in out[:, ids.shape[1] :].tolist()], len(passes)

        return Contestant(_timed(generate))

    def _forerun(self, name: str, warm_prompts: Sequence[Tokens] = (), max_new_tokens: int = 1) -> Contestant:
        engine = self._engine(name)
        generate = _greedy(engine)
        engine.set_drafter(build_drafter(name, self.settings))
        for prompt in warm_prompts:
            generate([prompt], max_new_tokens)
        before = engine.drafter

        def prepare() -> None:
            engine.set_drafter(copy.deepcopy(before) if warm_prompts else build_drafter(name, self.settings))

        return Contestant(_timed(generate), prepare)

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines[name] = Engine(self.model, build_drafter(name, self.settings), tokenizer=self._tokenizer)
        return self._engines[name]


def in_batches(prompts: Sequence[Tokens], size: int) -> list[Rows]:
    """Whole batches of consecutive prompts."""
    return [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]


def padded(rows: Rows, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[B, t]``, padded on the left, for ``model.generate``."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    return ids, mask


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The tokens that end the model's texts."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list) else [ends])]


def until_end(row: Tokens, model: PreTrainedModel) -> Tokens:
    """A row without the padding after its end token."""
    ends = end_tokens(model)
    at = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return [int(token) for token in row[: at + 1]]


def _greedy(engine: Engine) -> Generate:
    def generate(rows: Rows, max_new_tokens: int) -> tuple[list[Tokens], int]:
        found = engine.generate(list(rows), max_new_tokens=max_new_tokens, do_sample=False)
        return found.generated, max(stats.steps for stats in found.stats)

    return generate


def _timed(generate: Generate) -> Callable[[Rows, int], Run]:
    def run(rows: Rows, max_new_tokens: int) -> Run:
        begin = time.perf_counter()
        texts, passes = generate(rows, max_new_tokens)
        return Run(texts, time.perf_counter() - begin, passes)

    return run


@contextmanager
def _counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """A list that grows by one with each forward pass."""
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()
