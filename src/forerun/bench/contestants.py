"""Forerun and ``transformers`` as contestants over one target.

A drafter is *cold* if it has only the prompt, and *warm* if it has indexed its answers to other prompts of the task.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from forerun.bench.disturbance import fastest
from forerun.bench.journal import Journal
from forerun.bench.rounds import (
    BASELINE,
    PLAIN,
    UNTIMED_TOKENS,
    Contestant,
    PromptSet,
    Rows,
    Run,
    Series,
    Tokens,
    measure,
)
from forerun.core.long_context import LongContextConfig
from forerun.decoding.level import Level
from forerun.decoding.recipes import DRAFTERS, Recipe, Setup, build, trie_of
from forerun.decoding.source import Source
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import BUDGET, Engine
from forerun.engine.result import ends

PROMPT_LOOKUP, LOOKUP_TOKENS = "transformers prompt lookup", 10
"""The contestant's name, and its draft length in the documentation of transformers."""
ASSISTED = "transformers assisted"

Generate = Callable[[Rows, int, BaseStreamer | None], tuple[list[Tokens], int]]
"""Returns generated tokens and the number of passes, for rows, a number of new tokens, and a streamer for one row."""

Makers = Mapping[str, Callable[[], Contestant]]


class Bench:
    """Contestants over one target; raises ValueError with the name of one that cannot be built. ``drafters`` are names
    from ``forerun.decoding.recipes``; each runs cold, tries also warm. ``settings``: of those for long contexts;
    transformers' assisted generation uses their small model. ``skip``: names to leave out; see ``check_skip``."""

    recipes: Mapping[str, Recipe] = DRAFTERS
    sampling: Mapping[str, Any] = MappingProxyType({"do_sample": False})

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[str],
        settings: LongContextConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        skip: Sequence[str] = (),
        kv_dtype: str = "auto",
    ) -> None:
        self.model = model
        self._threads = torch.get_num_threads()
        self.settings = settings or LongContextConfig()
        self.drafters = list(dict.fromkeys(drafters))
        self.skip = list(skip)
        self.engine = Engine(model, "none", tokenizer=tokenizer, kv_dtype=kv_dtype)
        for name in self.drafters:
            try:
                self.engine.set_drafter(self._drafter(name), self.settings)
            except ValueError as error:
                raise ValueError(f"contestant {name}: {error}") from error

    def run(self, prompts: PromptSet, rounds: int, journal: Journal | None = None) -> Iterator[list[Series]]:
        """Continue each prompt with every contestant, and yield all results so far after each round."""
        groups, contestants = [[prompt] for prompt in prompts.prompts], self._built(self.makers(prompts))
        return measure(contestants, prompts.task, groups, prompts.max_new_tokens, rounds, journal, prompts.warm_prompts)

    def check_skip(self, sets: Sequence[PromptSet]) -> None:
        """Raise ValueError if ``skip`` has an unknown contestant, or one that the others are compared with."""
        known = dict.fromkeys(name for makers in self._all_makers(sets) for name in makers)
        allowed = [name for name in known if name not in self._kept()]
        if unknown := [name for name in self.skip if name not in allowed]:
            raise ValueError(f"--skip has {', '.join(map(repr, unknown))}; known are {', '.join(map(repr, allowed))}")

    def _all_makers(self, sets: Sequence[PromptSet]) -> list[Makers]:
        return [self.makers(prompts) for prompts in sets]

    def _kept(self) -> Sequence[str]:
        return (BASELINE, PLAIN)

    @property
    def refused(self) -> dict[str, str]:
        """Contestants that transformers refuses to run with these models, with the reason."""
        if self.model._is_stateful:
            return dict.fromkeys((PROMPT_LOOKUP, ASSISTED), "transformers has neither for models with recurrent layers")
        if isinstance(draft := self.settings.draft_model, PreTrainedModel):
            sizes = [int(model.config.get_text_config().vocab_size) for model in (self.model, draft)]
            if sizes[0] != sizes[1]:
                return {ASSISTED: f"transformers wants equal vocabularies, and these have {sizes[0]} and {sizes[1]}"}
        return {}

    def makers(self, prompts: PromptSet) -> Makers:
        """Return what builds each contestant for these prompts."""
        makers = self.baselines()
        if isinstance(self.settings.draft_model, PreTrainedModel):
            makers[ASSISTED] = partial(self.transformers, assistant_model=self.settings.draft_model)
        for name in self.drafters:
            makers[f"forerun {name}"] = partial(self.forerun, self._drafter(name))
            if prompts.warm_prompts and name.startswith("trie"):
                makers[f"forerun {name}, warm"] = partial(self._warm, name, prompts)
        return makers

    def baselines(self) -> dict[str, Callable[[], Contestant]]:
        """Return the makers of ``transformers``' contestants without a small model."""
        lookup = partial(self.transformers, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        return {BASELINE: self.transformers, PROMPT_LOOKUP: lookup}

    def _built(self, makers: Makers) -> dict[str, Contestant]:
        """Build contestants that are neither skipped nor refused; only these answer the warm prompts."""
        return {name: make() for name, make in makers.items() if name not in {*self.skip, *self.refused}}

    def _drafter(self, name: str) -> Callable[[Setup], Level]:
        return lambda setup: build(name, setup, self.recipes)

    def transformers(self, **options: Any) -> Contestant:
        """Make a contestant of ``model.generate`` with these options."""

        def generate(rows: Rows, max_new_tokens: int, streamer: BaseStreamer | None) -> tuple[list[Tokens], int]:
            ids, mask = padded(rows, self.model)
            pad = (ends(self.model.generation_config) or [0])[0]
            more = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad, **options}
            with counting_passes(self.model) as passes:
                out = self.model.generate(ids, attention_mask=mask, streamer=streamer, **more)
            return [until_end(row, self.model) for row in out[:, ids.shape[1] :].tolist()], len(passes)

        return Contestant(timed(generate), lambda: torch.set_num_threads(self.threads_of_transformers))

    @cached_property
    def threads_of_transformers(self) -> int:
        """The thread count of its fastest plain decoding: all cores can be slower, next to a busy process."""
        ids = torch.zeros((1, 8), dtype=torch.long, device=self.model.device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        length = {"min_new_tokens": UNTIMED_TOKENS, "max_new_tokens": UNTIMED_TOKENS}

        def seconds(threads: int) -> float:
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            self.model.generate(ids, **length, **options)
            return time.perf_counter() - begin

        try:
            return fastest(list(range(self._threads, 0, -max(1, self._threads // 4))), seconds)
        finally:
            torch.set_num_threads(self._threads)

    def forerun(self, make: Callable[[Setup], Source], budget: int = BUDGET, pruned: bool = True) -> Contestant:
        """Return an engine with a new drafter from ``make`` in each round; ``pruned`` scores only nodes that pay."""

        def prepare() -> None:
            torch.set_num_threads(self._threads)
            self.engine.budget, self.engine.prune_drafts = budget, pruned
            self.engine.set_drafter(make, self.settings)

        return Contestant(timed(self.generate), prepare)

    def _warm(self, name: str, prompts: PromptSet) -> Contestant:
        self.forerun(self._drafter(name)).prepare()
        for prompt in prompts.warm_prompts:
            self.generate([prompt], prompts.max_new_tokens)
        warm = trie_of(self.engine.level)

        def rewarmed(setup: Setup) -> Level:
            level = build(name, setup, self.recipes)
            for source in level.planner.sources:
                if isinstance(source, TrieSource):
                    source.trie = copy.deepcopy(warm)
            return level

        return self.forerun(rewarmed)

    def generate(
        self, rows: Rows, max_new_tokens: int, streamer: BaseStreamer | None = None
    ) -> tuple[list[Tokens], int]:
        more = {"max_new_tokens": max_new_tokens, **self.sampling}
        result = self.engine.generate(list(rows), streamer=streamer, **more)
        return result.generated, max(stats.steps for stats in result.stats)


def padded(rows: Rows, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask ``[B, t]``, padded on the left, for ``model.generate``."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    return ids, mask


def until_end(row: Tokens, model: PreTrainedModel) -> Tokens:
    """Cut the padding after a row's end token."""
    last = ends(model.generation_config)
    at = next((i for i, token in enumerate(row) if token in last), len(row) - 1)
    return [int(token) for token in row[: at + 1]]


class FirstToken(BaseStreamer):  # type: ignore[misc]
    """Records when the first generated token arrives; before it comes the prompt."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt and self.at is None:
            self.at = time.perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing."""


def timed(generate: Generate) -> Callable[[Rows, int], Run]:
    """Make a timed run of ``generate``; the time to the first token is known for one row."""

    def run(rows: Rows, max_new_tokens: int) -> Run:
        first = FirstToken()
        begin = time.perf_counter()
        texts, passes = generate(rows, max_new_tokens, first if len(rows) == 1 else None)
        seconds = time.perf_counter() - begin
        return Run(texts, seconds, passes, first=None if first.at is None else first.at - begin)

    return run


@contextmanager
def counting_passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield a list that grows by one with each forward pass."""
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()
