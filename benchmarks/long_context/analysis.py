"""How well the target predicts itself over a sparse cache, compared token by token with the full cache.

At each position the sparse cache has read the true text (teacher forcing), as generated plainly. The greedy acceptance
rate is the share of positions where both agree. Above temperature 0 it is the mean of sum(min(p, q)), the chance that
rejection sampling accepts (TriForce, table 1 and figures 2a, 3b, 6a, 6b).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from benchmarks.long_context.bytes_read import Meter, Reading
from benchmarks.long_context.long_bench import Prefilled
from benchmarks.long_context.needles import Haystack
from benchmarks.reporting.progress import progress_lines
from forerun.bench.machine import Row
from forerun.cli.terminal import say
from forerun.core.block import Block
from forerun.core.sampling import Salt, gumbel
from forerun.core.tree import DraftTree
from forerun.decoding.level import CacheFactory
from forerun.kv.cache import Cache
from forerun.models.forward.prefill import counting, read_prompt
from forerun.models.forward.scorer import Scorer

SEED = 0
"""Of the samples."""
Caches = dict[str, Cache]
Makers = Mapping[str, CacheFactory]
"""What makes each sparse cache of the target, by its name."""


class Follower:
    """Reads a text with the target over its full cache, and over every sparse one.

    Args:
        target: the model.
        prompt: already read.
        makers: of the sparse caches. Caches of their own read the prompt here, once; views of the full cache do so
            later.
    """

    def __init__(self, target: Scorer, prompt: Prefilled, makers: Makers) -> None:
        target.keep_queries(0)
        self._target = target
        self._prompt = prompt
        self._makers = makers
        self._base: Caches = {}
        prompt.rewind()
        for name, make in makers.items():
            cache = make(target, prompt.cache)
            if cache.source is None:
                on_read = counting(prompt.held, progress_lines(f"{name} reads"))
                read_prompt(target, cache, np.array(prompt.tokens[: prompt.held]), on_read=on_read)
                self._base[name] = cache
        self.readings: dict[str, Reading] = {}
        """Bytes that a token read through each sparse cache in the last continuation."""

    @torch.inference_mode()
    def acceptance(self, new_tokens: int, temperature: float = 0.0, suffix: Sequence[int] = ()) -> dict[str, float]:
        """Each sparse cache's acceptance rate over ``new_tokens`` tokens that the target generates.

        Args:
            new_tokens: tokens to generate.
            temperature: 0 is greedy.
            suffix: tokens read between the prompt and the generated ones.
        """
        full, tokens = self._prompt.cache, [*self._prompt.tokens, *suffix]
        caches = self._rewind(np.array(tokens[:-1]))
        meters = {name: Meter(cache) for name, cache in caches.items()}
        shares: dict[str, list[float]] = {name: [] for name in self._makers}
        show = progress_lines("generated")
        for done in range(new_tokens):
            show(done, new_tokens)
            block = Block(np.array(tokens[-1:]), DraftTree.empty(), full.length)
            drafts = self._draft(block, meters)
            logits = self._target.score([block], [full])[0][0]
            full.commit(block, [])
            for name, draft in drafts.items():
                shares[name].append(overlap(logits, draft, temperature))
                caches[name].verified([-1], 1, round(shares[name][-1]))
            tokens.append(_choose(logits, temperature, len(tokens)))
        self.readings = {name: meter.reading for name, meter in meters.items()}
        return {name: float(np.mean(found)) for name, found in shares.items()}

    def _rewind(self, text: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Caches:
        """Fresh sparse caches, and the full one, at the end of ``text``."""
        full = self._prompt.cache
        self._prompt.rewind()  # views come before the last pass, which leaves the queries that they choose by
        caches = {
            name: copy.deepcopy(self._base[name]) if name in self._base else make(self._target, full)
            for name, make in self._makers.items()
        }
        full.truncate(min(full.length, len(text) - 1))
        read_prompt(self._target, full, text)
        for name in self._base:
            read_prompt(self._target, caches[name], text)
        return caches

    def _draft(self, block: Block, meters: Mapping[str, Meter]) -> dict[str, torch.Tensor]:
        """The logits ``[V]`` over each sparse cache, from one pass."""
        for meter in meters.values():
            meter.cache.sync()
        logits = self._target.score([block] * len(meters), list(meters.values()))
        for meter in meters.values():
            if meter.cache.source is None:
                meter.commit(block, [])
        return {name: rows[0] for name, rows in zip(meters, logits, strict=True)}


def overlap(target: torch.Tensor, draft: torch.Tensor, temperature: float) -> float:
    """The chance that a draft from logits ``[V]`` is accepted by the target; a draft may have a smaller vocabulary."""
    if temperature == 0:
        return float(target.argmax() == draft.argmax())
    p, q = ((logits.double() / temperature).softmax(-1) for logits in (target, draft))
    return float(torch.minimum(p[: len(q)], q[: len(p)]).sum())


def _choose(logits: torch.Tensor, temperature: float, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    noise = gumbel(SEED, position, len(logits), Salt.TARGET, logits.device)
    return int((logits.double() / temperature + noise).argmax())


def on_prose(
    target: Scorer, prompts: Sequence[Prefilled], makers: Makers, temperatures: Sequence[float], new_tokens: int
) -> Iterator[list[Row]]:
    """After each prompt, one row per sparse cache and temperature: the acceptance rate over the prompts so far, and the
    bytes that a token read."""
    found: dict[tuple[str, float], list[float]] = {}
    for place, prompt in enumerate(prompts, 1):
        follower = Follower(target, prompt, makers)
        for temperature in temperatures:
            say(f"  prompt {place} of {len(prompts)}, {len(prompt.tokens):,} tokens, T {temperature:g}")
            for name, share in follower.acceptance(new_tokens, temperature).items():
                found.setdefault((name, temperature), []).append(share)
        yield [
            _row("prose", name, temperature, len(prompt.tokens), new_tokens * len(shares), float(np.mean(shares)))
            | follower.readings[name].columns()
            for (name, temperature), shares in found.items()
        ]


def on_needles(target: Scorer, text: Prefilled, haystack: Haystack, makers: Makers) -> list[Row]:
    """One row per sparse cache: the greedy acceptance rate over the answers' tokens."""
    follower = Follower(target, text, makers)
    found: dict[str, list[float]] = {name: [] for name in makers}
    lengths = [len(question.answer) for question in haystack.questions]
    for number, question in enumerate(haystack.questions, 1):
        say(f"  needle {number} of {len(lengths)}")
        for name, share in follower.acceptance(len(question.answer), suffix=question.prompt).items():
            found[name].append(share)
    return [
        _row("needles", name, 0.0, len(haystack.text), sum(lengths), float(np.average(shares, weights=lengths)))
        | follower.readings[name].columns()
        for name, shares in found.items()
    ]


def _row(task: str, cache: str, temperature: float, context: int, positions: int, acceptance: float) -> Row:
    return {
        "task": task,
        "reader": cache,
        "temperature": temperature,
        "context": context,
        "positions": positions,
        "acceptance": round(acceptance, 4),
    }
