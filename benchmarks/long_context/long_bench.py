"""Decoding after a long prompt: every contestant continues from one prefilled cache, in turns with plain decoding.

A prompt is prefilled once; before each run the cache is cut back to it, and the drafter is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.reporting.turns import in_turns
from forerun.bench.machine import Row
from forerun.bench.rounds import sampling
from forerun.cli.terminal import PrefillBar, say, stderr
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.stats import Stats
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.kv.offloaded import CopyEngine
from forerun.models.forward.prefill import read_prompt

PLAIN = "none"  # the baseline: plain decoding

Tokens = list[int]
RequestMaker = Callable[[Engine, Tokens, str], Request]
"""Makes a fresh request from the engine, the prompt and the contestant's name."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose first tokens are in ``cache``, perhaps with others after them.

    Attributes:
        read: pairs of tokens and seconds of prefill, ascending; empty if the cache was filled otherwise.
        keep: the prompt's tokens that stay in the cache; None for all but the last.
        queries: of the last prefill pass, by layer. A sparse cache chooses by them before the first token.
    """

    tokens: Tokens
    cache: FullCache
    read: Sequence[tuple[int, float]] = ()
    keep: int | None = None
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def rewind(self) -> None:
        self.cache.truncate(self.held)
        self.cache.queries = dict(self.queries)

    @property
    def held(self) -> int:
        return len(self.tokens) - 1 if self.keep is None else self.keep

    @property
    def seconds(self) -> float | None:
        """Seconds of prefill, if there was one."""
        if not self.read:
            return None
        done, seconds = zip((0, 0.0), *self.read, strict=True)
        return float(np.interp(self.held, done, seconds))


def prefill(engine: Engine, tokens: Tokens, room: int) -> Prefilled:
    """Prefill a prompt, with room for ``room`` tokens after it; keep its last queries."""
    engine.target.keep_queries(0)
    read: list[tuple[int, float]] = []
    begin = time.perf_counter()
    bar = PrefillBar(stderr())

    def on_read(done: int, total: int) -> None:
        read.append((done, time.perf_counter() - begin))
        bar(done, total)

    with closing(bar):
        cache = engine.prefill(tokens, room, on_read)
    return Prefilled(tokens, cache, read, queries=cache.queries)


def shortened(engine: Engine, prompt: Prefilled, length: int) -> Prefilled:
    """Return the first ``length`` tokens of a prompt; the last of them are prefilled again, for their queries."""
    if length == len(prompt.tokens):
        return prompt
    cut = Prefilled(prompt.tokens[:length], prompt.cache, prompt.read)
    cut.cache.truncate(max(0, cut.held - engine.prefill_block))
    read_prompt(engine.target, cut.cache, np.array(cut.tokens[: cut.held]), engine.prefill_block)
    return replace(cut, queries=cut.cache.queries)


@dataclass(frozen=True)
class LongRun:
    """One continuation of a row or a batch. ``first_seconds`` are from the prefill to the first token,
    ``decode_seconds`` those after it, in which all rows together ``decoded`` tokens."""

    texts: list[Tokens]
    first_seconds: float
    decode_seconds: float
    decoded: int
    stats: list[Stats]

    @property
    def tokens_per_second(self) -> float:
        return self.decoded / self.decode_seconds


@dataclass
class LongSeries:
    """A contestant's runs, ``runs[prompt][round]``; a prompt is a row or a batch of rows."""

    contestant: str
    runs: list[list[LongRun]] = field(default_factory=list)
    prefill_seconds: list[float | None] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over all prompts, in the median round."""
        return 1 / median(self._seconds_per_token())

    def speed_ups(self, plain: LongSeries) -> list[float]:
        """Return the speed-up over plain decoding in each round."""
        return [base / mine for mine, base in zip(self._seconds_per_token(), plain._seconds_per_token(), strict=True)]

    def _seconds_per_token(self) -> list[float]:
        """Return the seconds per token of each round; prompts are weighted by the tokens of their first run."""
        weights = [rounds[0].decoded for rounds in self.runs]
        return [
            sum(weight * run.decode_seconds / run.decoded for weight, run in zip(weights, turn, strict=True))
            / sum(weights)
            for turn in zip(*self.runs, strict=True)
        ]

    @property
    def first_seconds(self) -> float | None:
        """Seconds to the first token, prefill included: the mean over prompts; None without a prefill."""
        known = [prefill for prefill in self.prefill_seconds if prefill is not None]
        if len(known) < len(self.prefill_seconds):
            return None
        own = [median(run.first_seconds for run in rounds) for rounds in self.runs]
        return float(np.mean(known) + np.mean(own))

    @property
    def stats(self) -> list[Stats]:
        return [stats for rounds in self.runs for run in rounds for stats in run.stats]

    @property
    def texts(self) -> list[Tokens]:
        return [text for rounds in self.runs for run in rounds for text in run.texts]


def combine(parts: Sequence[Sequence[LongSeries]]) -> list[LongSeries]:
    found = []
    for same in zip(*parts, strict=True):
        runs, seconds = (
            [rounds for one in same for rounds in one.runs],
            [s for one in same for s in one.prefill_seconds],
        )
        found.append(LongSeries(same[0].contestant, runs, seconds))
    return found


class LongBench:
    """Continues prefilled prompts with drafters by name; replaces the engine's drafter."""

    def __init__(self, engine: Engine, rounds: int) -> None:
        self.engine = engine
        self.rounds = rounds
        self._warm: set[str] = set()

    def run(
        self, prompts: Sequence[Sequence[Prefilled]], contestants: Sequence[str], settings: LongContextConfig,
        make: RequestMaker,
    ) -> list[LongSeries]:  # fmt: skip
        """Measure plain decoding and the named drafters after each prompt, which is a row or a batch of rows."""
        names = [PLAIN, *(name for name in contestants if name != PLAIN)]
        found = {name: LongSeries(name) for name in names}
        for rows in prompts:
            known = [row.seconds for row in rows if row.seconds is not None]
            for name in names:  # once untimed, so that compiling and allocating do not count as decoding
                if name not in self._warm:
                    self._warm.add(name)
                    self._once(rows, name, settings, make)
            works = {name: partial(self._once, rows, name, settings, make) for name in names}
            for name, runs in in_turns(works, self.rounds).items():
                found[name].runs.append(runs)
                found[name].prefill_seconds.append(sum(known) if len(known) == len(rows) else None)
        return list(found.values())

    def _once(self, rows: Sequence[Prefilled], name: str, settings: LongContextConfig, make: RequestMaker) -> LongRun:
        self.engine.set_drafter(name, settings)
        for row in rows:
            row.rewind()
        requests = [make(self.engine, row.tokens, name) for row in rows]
        begin = time.perf_counter()
        commits = self.engine.run(requests, caches=[row.cache for row in rows])
        first = sum(len(next(commits).tokens) for _ in rows)  # every row is in the first step
        middle = time.perf_counter()
        for _ in commits:
            pass
        end = time.perf_counter()
        texts = [request.generated.tolist() for request in requests]
        decoded = sum(map(len, texts)) - first
        if not decoded:
            raise ValueError(f"{name} has all tokens from its first step, which is not timed; raise --max-new-tokens")
        run = LongRun(texts, middle - begin, end - middle, decoded, [request.stats for request in requests])
        accepted = acceptance(run.stats)
        share = "" if accepted is None else f", {accepted:.3f} of tested drafts accepted"
        say(f"  {name}: {decoded} tokens in {end - middle:.2f} s, {run.tokens_per_second:.1f} a second{share}")
        return run


def sampled(temperature: float, new_tokens: int) -> RequestMaker:
    """Make requests of a fixed length: greedy at temperature 0, else samples of the full distribution."""

    def make(engine: Engine, tokens: Tokens, contestant: str) -> Request:
        request = engine.requests(tokens, max_new_tokens=new_tokens, **sampling(temperature, seed=0))[0]
        request.eos_token_ids = frozenset()
        return request

    return make


def acceptance(stats: Iterable[Stats | None]) -> float | None:
    """Return accepted by tested drafts (those after a rejected one are not tested); None without drafts."""
    known = [one for one in stats if one is not None]
    accepted = sum(sum(one.accepted) for one in known)
    tested = accepted + sum(a < d for one in known for a, d in zip(one.accepted, one.drafted, strict=True))
    return accepted / tested if tested else None


def summarise(series: Sequence[LongSeries], **labels: Any) -> list[Row]:
    """Return a row for each contestant; ``labels`` are added to every row."""
    plain = next(one for one in series if one.contestant == PLAIN)
    return [labels | _row(one, plain) for one in series]


def _row(one: LongSeries, plain: LongSeries) -> Row:
    ups, stats = one.speed_ups(plain), one.stats
    same = [mine == theirs for mine, theirs in zip(one.texts, plain.texts, strict=True)]
    return {
        "contestant": one.contestant, "tokens_per_second": round(one.tokens_per_second, 2),
        "speed_up": round(one.tokens_per_second / plain.tokens_per_second, 3), "slowest": round(min(ups), 3),
        "fastest": round(max(ups), 3), "acceptance": _rounded(acceptance(stats)),
        "middle_acceptance": _rounded(acceptance(each.middle for each in stats)),
        "tokens_per_step": round(sum(each.tokens for each in stats) / sum(each.steps for each in stats), 3),
        "seconds_per_token": round(len(one.runs[0][0].texts) / one.tokens_per_second, 6),
        "time_to_first_token": _rounded(one.first_seconds), "same_output": sum(same) / len(same),
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class Traffic:
    """A maker of requests that counts the bytes of offloaded keys and values that each contestant's runs bring in."""

    def __init__(self, copy_engine: CopyEngine, make: RequestMaker) -> None:
        self._copy_engine, self._make = copy_engine, make
        self._begun: list[tuple[str, int]] = []

    def __call__(self, engine: Engine, tokens: Tokens, contestant: str) -> Request:
        self._begun.append((contestant, self._copy_engine.fetched))
        return self._make(engine, tokens, contestant)

    def fetched(self, contestant: str) -> float:
        """Return the median bytes of its runs."""
        marks = [*self._begun, ("", self._copy_engine.fetched)]
        return median(after - before for (name, before), (_, after) in pairwise(marks) if name == contestant)
