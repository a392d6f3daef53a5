"""How well the target predicts itself over a sparse cache, compared token by token with the full cache.

At each position the sparse cache has read the true text (teacher forcing), as generated plainly. The greedy acceptance
rate is the share of positions where both agree. Above temperature 0 it is the mean of sum(min(p, q)), the chance that
rejection sampling accepts (TriForce, table 1 and figures 2a, 3b, 6a, 6b).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.long_context.bytes_read import Meter, Reading
from benchmarks.long_context.long_bench import Prefilled
from benchmarks.long_context.needles import Haystack
from benchmarks.long_context.rows import Row
from benchmarks.reporting.progress import Say, quietly, telling
from forerun.core.block import Block
from forerun.core.sampling import Salt, gumbel
from forerun.core.tree import DraftTree
from forerun.kv.cache import Cache
from forerun.kv.view import View
from forerun.models.forward.level import CacheFactory, counting, read
from forerun.models.forward.scorer import Scorer


@dataclass(frozen=True)
class CacheReader:
    """A cheap way to read a text: a model and a factory for its cache."""

    scorer: Scorer
    make: CacheFactory


Readers = Mapping[str, CacheReader]
Caches = dict[str, Cache]


class Follower:
    """Reads a text with the target, and in parallel with every reader.

    Args:
        target: over its full cache.
        prompt: already read.
        readers: by name. Caches of their own read the prompt here, once; views of the full cache do so later.
        say: told the progress of slow ones.
    """

    def __init__(self, target: Scorer, prompt: Prefilled, readers: Readers, say: Say = quietly) -> None:
        target.keep_queries(0)
        self._say = say
        self._target = target
        self._prompt = prompt
        self._readers = readers
        self._base: Caches = {}
        prompt.rewind()
        for name, reader in readers.items():
            cache = reader.make(reader.scorer, prompt.cache)
            if not isinstance(cache, View):
                on_read = counting(prompt.held, telling(say, f"{name} reads"))
                read(reader.scorer, cache, np.array(prompt.tokens[: prompt.held]), on_read=on_read)
                self._base[name] = cache
        self.readings: dict[str, Reading] = {}
        """Bytes that a token read through each reader's cache in the last continuation."""

    @torch.inference_mode()
    def acceptance(
        self, new_tokens: int, temperature: float = 0.0, suffix: Sequence[int] = (), seed: int = 0
    ) -> dict[str, float]:
        """Each reader's acceptance rate over ``new_tokens`` tokens that the target generates.

        Args:
            new_tokens: tokens to generate.
            temperature: 0 is greedy.
            suffix: tokens read between the prompt and the generated ones.
            seed: of the samples.
        """
        full, tokens = self._prompt.cache, [*self._prompt.tokens, *suffix]
        caches = self._rewind(np.array(tokens[:-1]))
        meters = {name: Meter(cache) for name, cache in caches.items()}
        shares: dict[str, list[float]] = {name: [] for name in self._readers}
        tell = telling(self._say, "generated")
        for done in range(new_tokens):
            tell(done, new_tokens)
            block = Block(np.array(tokens[-1:]), DraftTree.empty(), full.length)
            drafts = self._draft(block, meters)
            logits = self._target.score([block], [full])[0][0]
            full.commit(block, [])
            for name, draft in drafts.items():
                shares[name].append(overlap(logits, draft, temperature))
                view = caches[name]
                if isinstance(view, View):
                    view.verified([-1], 1, round(shares[name][-1]))
            tokens.append(_choose(logits, temperature, seed, len(tokens)))
        self.readings = {name: meter.reading for name, meter in meters.items()}
        return {name: float(np.mean(found)) for name, found in shares.items()}

    def _rewind(self, text: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Caches:
        """The full cache, and fresh caches of all readers, at the end of ``text``."""
        full = self._prompt.cache
        self._prompt.rewind()
        full.truncate(min(full.length, len(text) - 1))  # the last pass leaves the queries that views choose by
        read(self._target, full, text)
        caches = {}
        for name, reader in self._readers.items():
            base = self._base.get(name)
            caches[name] = reader.make(reader.scorer, full) if base is None else copy.deepcopy(base)
            if base is not None:
                read(reader.scorer, caches[name], text)
        return caches

    def _draft(self, block: Block, meters: Mapping[str, Meter]) -> dict[str, torch.Tensor]:
        """Each reader's logits ``[V]``; readers of one model share a pass."""
        found = {}
        for scorer in {reader.scorer for reader in self._readers.values()}:
            names = [name for name, reader in self._readers.items() if reader.scorer is scorer]
            for name in names:
                view = meters[name].cache
                if isinstance(view, View):
                    view.sync()
            logits = scorer.score([block] * len(names), [meters[name] for name in names])
            for name, row in zip(names, logits, strict=True):
                found[name] = row[0]
                if not isinstance(meters[name].cache, View):
                    meters[name].commit(block, [])
        return found


def overlap(target: torch.Tensor, draft: torch.Tensor, temperature: float) -> float:
    """The chance that a draft from logits ``[V]`` is accepted by the target; a draft may have a smaller vocabulary."""
    if temperature == 0:
        return float(target.argmax() == draft.argmax())
    p, q = ((logits.double() / temperature).softmax(-1) for logits in (target, draft))
    return float(torch.minimum(p[: len(q)], q[: len(p)]).sum())


def _choose(logits: torch.Tensor, temperature: float, seed: int, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    noise = gumbel(seed, position, len(logits), Salt.TARGET, logits.device)
    return int((logits.double() / temperature + noise).argmax())


def on_prose(
    target: Scorer,
    prompts: Sequence[Prefilled],
    readers: Readers,
    temperatures: Sequence[float],
    new_tokens: int,
    say: Say = quietly,
) -> Iterator[list[Row]]:
    """After each prompt, one row per reader and temperature: the acceptance rate over the prompts so far, the
    divergence (1 - acceptance), and the bytes that a token read."""
    found: dict[tuple[str, float], list[float]] = {}
    for place, prompt in enumerate(prompts, 1):
        follower = Follower(target, prompt, readers, say)
        for temperature in temperatures:
            say(f"  prompt {place} of {len(prompts)}, {len(prompt.tokens):,} tokens, T {temperature:g}")
            for name, share in follower.acceptance(new_tokens, temperature).items():
                found.setdefault((name, temperature), []).append(share)
        yield [
            {
                "task": "prose",
                "reader": name,
                "temperature": temperature,
                "context": len(prompt.tokens),
                "positions": new_tokens * len(shares),
                "acceptance": round(float(np.mean(shares)), 4),
                "divergence": round(1 - float(np.mean(shares)), 4),
                **follower.readings[name].columns(),
            }
            for (name, temperature), shares in found.items()
        ]


def on_needles(target: Scorer, text: Prefilled, haystack: Haystack, readers: Readers, say: Say = quietly) -> list[Row]:
    """One row per reader: the greedy acceptance rate over the answers' tokens."""
    follower = Follower(target, text, readers, say)
    found: dict[str, list[float]] = {}
    lengths = [len(question.answer) for question in haystack.questions]
    for question, length in zip(haystack.questions, lengths, strict=True):
        say(f"  needle {1 + len(next(iter(found.values()), []))} of {len(lengths)}")
        for name, share in follower.acceptance(length, suffix=question.prompt).items():
            found.setdefault(name, []).append(share)
    return [
        {
            "task": "needles",
            "reader": name,
            "temperature": 0.0,
            "context": len(haystack.text),
            "positions": sum(lengths),
            "acceptance": round(float(np.average(shares, weights=lengths)), 4),
            **follower.readings[name].columns(),
        }
        for name, shares in found.items()
    ]
