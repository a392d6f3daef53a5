"""Needles: facts hidden in a long text, asked for one by one. Shows what eviction loses and lossless drafting keeps.

The text is prefilled once. A sparse cache *alone* decodes without verification (TriForce, figure 1, right).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from benchmarks.long_context.long_bench import PLAIN, LongBench, Prefilled, Tokens, prefill, sampled, summarise
from benchmarks.long_context.texts import SAMPLE, Texts
from benchmarks.training import tasks
from forerun.bench.machine import Row
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import SPARSE
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.models.forward.prefill import read_prompt
from forerun.models.forward.scorer import Scorer

TOKENS_A_FACT = 100  # the least tokens of text per hidden fact
FACT_TOKENS = 30  # approximate tokens of a fact and its question


@dataclass(frozen=True)
class NeedleQuestion:
    """A question after the text, and its answer."""

    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True)
class Haystack:
    """A text with facts in it, and the questions about them."""

    text: Tokens
    questions: Sequence[NeedleQuestion]


def build(texts: Texts, index: int, context: int, count: int) -> Haystack:
    """Make a haystack of about ``context`` tokens; raise ValueError if ``count`` facts need more room."""
    if context < TOKENS_A_FACT * count:
        most = context // TOKENS_A_FACT
        raise ValueError(f"{count} needles do not fit into a context of {context} tokens; at most {most} do")
    sample = texts.chars(index, SAMPLE)
    chars = int((context - FACT_TOKENS * count) * len(sample) / len(texts.encode(sample)))
    text, asked = tasks.haystack(Random(f"needles/{index}"), texts.material(index), chars, count)
    questions = [NeedleQuestion(texts.encode(task.prompt), texts.encode(task.answer)) for task in asked]
    return Haystack(texts.encode(text), questions)


def read_text(engine: Engine, haystack: Haystack, room: int) -> Prefilled:
    """Prefill the text without questions, with room for ``room`` tokens after it."""
    whole = prefill(engine, [*haystack.text, *haystack.questions[0].prompt[:1]], room)
    return Prefilled(haystack.text, whole.cache, whole.read, len(haystack.text))


class UnverifiedDecoder:
    """The target over a sparse view of ``full``, which holds the text, without verification.

    The view is made, and chooses chunks, after each question.
    """

    def __init__(self, scorer: Scorer, name: str, settings: LongContextConfig, full: FullCache, text: Tokens) -> None:
        self._scorer, self._full, self._text = scorer, full, text
        self._make = SPARSE[name](settings)

    @torch.inference_mode()
    def generate(self, question: Tokens, new_tokens: int) -> tuple[Tokens, float]:
        """Return the greedy tokens, and the seconds per token after the first."""
        self._full.truncate(len(self._text))
        read_prompt(self._scorer, self._full, np.array([*self._text, *question[:-1]]))
        cache = self._make(self._scorer, self._full)
        cache.sync()
        tokens, seconds = [question[-1]], []
        for _ in range(new_tokens):
            begin = time.perf_counter()
            block = Block(np.array(tokens[-1:]), DraftTree.empty(), cache.length)
            logits = self._scorer.score([block], [cache])[0]
            cache.commit(block, [])
            tokens.append(int(logits[0].argmax()))
            seconds.append(time.perf_counter() - begin)
        return tokens[1:], float(np.mean(seconds[1:] or seconds))


def run(
    bench: LongBench, haystack: Haystack, prefilled: Prefilled, lossless: Sequence[str], settings: LongContextConfig,
    tokens: int,
) -> list[Row]:  # fmt: skip
    """Return the accuracy and seconds per token of plain decoding, lossless drafters and every sparse cache alone.
    ``tokens`` are generated per question, and should begin with the answer."""
    prompts, held = [[*haystack.text, *question.prompt] for question in haystack.questions], len(haystack.text)
    rows = [Prefilled(prompt, prefilled.cache, prefilled.read, held) for prompt in prompts]
    series = bench.run([[row] for row in rows], lossless, settings, sampled(0.0, tokens))
    found = []
    for one, row in zip(series, summarise(series), strict=True):
        texts = [rounds[0].texts[0] for rounds in one.runs]
        name = "plain" if one.contestant == PLAIN else one.contestant
        found.append(_row(name, True, haystack, texts, row["seconds_per_token"]))
    for name in SPARSE:
        alone = UnverifiedDecoder(bench.engine.target, name, settings, prefilled.cache, haystack.text)
        made = [alone.generate(question.prompt, tokens) for question in haystack.questions]
        seconds = float(np.median([seconds for _, seconds in made]))
        found.append(_row(f"{name} alone", False, haystack, [text for text, _ in made], seconds))
    return found


def _row(name: str, lossless: bool, haystack: Haystack, texts: Sequence[Tokens], seconds: float) -> Row:
    answers = [question.answer for question in haystack.questions]
    right = [text[: len(answer)] == answer for text, answer in zip(texts, answers, strict=True)]
    return {
        "contestant": name, "lossless": lossless, "context": len(haystack.text), "needles": len(right),
        "accuracy": sum(right) / len(right), "seconds_per_token": round(seconds, 6),
    }  # fmt: skip
