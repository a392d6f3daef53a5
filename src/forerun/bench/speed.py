"""Forerun beside ``transformers`` on the same prompts: in one process, interleaved, with medians and spread.

Every contestant continues every prompt greedily, in turn, the order rotating from round to round, so that what slows
the machine down slows all of them. A drafter is *cold* when it knows the prompt alone, and *warm* when it has drafted
the answers to other prompts of the task, as in a server that has run for a while.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.drafters.base import Drafter
from forerun.engine import Engine
from forerun.recipes import build_drafter
from forerun.request import Request
from forerun.settings import Settings
from forerun.tree import DraftTree

BASELINE = "transformers greedy"
Tokens = list[int]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """The prompts of a task, and prompts of its kind that warm drafters have drafted the answers to."""

    task: str
    prompts: Sequence[Tokens]
    warm_prompts: Sequence[Tokens]
    max_new_tokens: int


@dataclass(frozen=True)
class Run:
    """One generation: seconds from prompt to last token, and the target's forward passes."""

    tokens: Tokens
    seconds: float
    passes: int


@dataclass
class Series:
    """One contestant's runs on one task, ``runs[prompt][round]``."""

    contestant: str
    task: str
    runs: list[list[Run]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """All tokens by the sum of each prompt's median time."""
        return self._tokens() / sum(median(run.seconds for run in rounds) for rounds in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """The same with each prompt's slowest and fastest round."""
        slow, fast = (sum(pick(run.seconds for run in rounds) for rounds in self.runs) for pick in (max, min))
        return self._tokens() / slow, self._tokens() / fast

    @property
    def tokens_per_pass(self) -> float:
        """Tokens by forward passes of the target, the prefill included."""
        return self._tokens() / sum(rounds[0].passes for rounds in self.runs)

    def _tokens(self) -> int:
        return sum(len(rounds[0].tokens) for rounds in self.runs)


class WrongDrafter(Drafter):
    """Drafts what hardly ever comes, and claims that it will: what drafting costs where it does not help."""

    def begin(self, request: Request) -> None:
        """Find a token that the prompt does not hold."""
        self._absent = int(np.setdiff1d(np.arange(len(request) + 1), request.prompt)[0])

    def propose(self, request: Request, budget: int) -> DraftTree:
        """A chain of that token, each said to be likely."""
        length = max(0, min(budget, request.max_draft_depth))
        claimed = np.full(length, 0.9).cumprod()
        return DraftTree(np.full(length, self._absent), np.arange(-1, length - 1), probability=claimed)


@dataclass(frozen=True)
class Contestant:
    """A way to continue a prompt, and what it forgets and learns before each, outside of the timed part."""

    generate: Callable[[Tokens, int], Tokens]
    prepare: Callable[[], None] = lambda: None


class Bench:
    """Contestants over one target.

    Args:
        model: the target, in the dtype to measure in.
        drafters: names from ``forerun.recipes``, each run cold; those that remember run warm as well.
        draft: a small model with the same tokenizer for transformers' assisted generation, or None.
        tokenizer: of both, or None; drafters learn the spelling of words from it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[str],
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.settings = Settings(draft_model=draft)
        self.model = model
        self.draft = draft
        self.drafters = list(drafters)
        self._engines = {
            name: Engine(model, name, settings=self.settings, tokenizer=tokenizer) for name in self.drafters
        }
        self._wrong = Engine(model, WrongDrafter())

    def run(self, jobs: Sequence[Job], rounds: int, progress: Progress | None = None) -> list[Series]:
        """Measure every contestant on every job."""
        series: list[Series] = []
        for done, job in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            series += self._run_job(job, rounds)
        return series

    def _run_job(self, job: Job, rounds: int) -> list[Series]:
        contestants = self._contestants(job)
        series = {name: Series(name, job.task, [[] for _ in job.prompts]) for name in contestants}
        names = list(contestants)
        for name in names:
            contestants[name].prepare()
            contestants[name].generate(job.prompts[0], 8)
        for turn in range(rounds):
            for i, prompt in enumerate(job.prompts):
                shift = (turn + i) % len(names)
                for name in names[shift:] + names[:shift]:
                    series[name].runs[i].append(self._timed(contestants[name], prompt, job.max_new_tokens))
        return list(series.values())

    def _timed(self, contestant: Contestant, prompt: Tokens, max_new_tokens: int) -> Run:
        contestant.prepare()
        with _counting(self.model) as passes:
            begin = time.perf_counter()
            tokens = contestant.generate(prompt, max_new_tokens)
            seconds = time.perf_counter() - begin
        return Run(tokens, seconds, len(passes))

    def _contestants(self, job: Job) -> dict[str, Contestant]:
        found: dict[str, Contestant] = {
            BASELINE: self._transformers(),
            "transformers prompt lookup": self._transformers(prompt_lookup_num_tokens=10),
        }
        if self.draft is not None:
            found["transformers assisted"] = self._transformers(assistant_model=self.draft)
        for name in self.drafters:
            found[f"forerun {name}"] = self._forerun(name)
            if job.warm_prompts and name.startswith("trie"):
                found[f"forerun {name}, warm"] = self._forerun(name, job.warm_prompts, job.max_new_tokens)
        found["forerun, wrong drafts"] = Contestant(_greedy(self._wrong))
        return found

    def _transformers(self, **options: Any) -> Contestant:
        def generate(prompt: Tokens, max_new_tokens: int) -> Tokens:
            ids = torch.tensor([prompt], device=self.model.device)
            mask = torch.ones_like(ids)
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **options
            )
            return [int(token) for token in out[0, len(prompt) :].tolist()]

        return Contestant(generate)

    def _forerun(self, name: str, warm_prompts: Sequence[Tokens] = (), max_new_tokens: int = 1) -> Contestant:
        engine = self._engines[name]
        generate = _greedy(engine)
        engine.use(build_drafter(name, self.settings))
        for prompt in warm_prompts:
            generate(prompt, max_new_tokens)
        before = engine.drafter

        def prepare() -> None:
            engine.use(copy.deepcopy(before) if warm_prompts else build_drafter(name, self.settings))

        return Contestant(generate, prepare)


def _greedy(engine: Engine) -> Callable[[Tokens, int], Tokens]:
    def generate(prompt: Tokens, max_new_tokens: int) -> Tokens:
        return engine.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False).generated[0]

    return generate


@contextmanager
def _counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """A list that grows by one with each forward pass."""
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()
