"""The training mix: rows of equal length, each of one kind, with a weight for every token's loss.

A batch is a pure function of (material, stage, seed, step). Positions may have gaps, so that short rows show distances
of up to 131,072 tokens. With such positions, give the model an attention mask of ones: without one, transformers takes
every jump for the border of a packed sequence and masks across it.

Row kinds are those of ``tasks.KINDS`` and 'spans': a segment of text or of random tokens, and random pieces of it; only
the pieces have a loss. Without them a small model does not learn to copy.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.training import crowding, tasks
from benchmarks.training.crowding import Source
from benchmarks.training.recipe import Stage
from benchmarks.training.tasks import EOS, Material, Task

PROMPT_WEIGHT = 0.1  # prompts of invented tasks are unpredictable
ANSWER_WEIGHT = 4.0  # answers are short, and what the model should learn
SPAN_WEIGHT = 2.0
JOINT_WEIGHT = 12.0  # where an answer goes to its next source or closes: if wrong, the rest is too
TEXT_SPANS = 0.8
POSITIONS = 131_072
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_STREAMS = ("prose", "code")
_ENCODE_CHUNK = 2000


@dataclass(frozen=True)
class Batch:
    """Rows for one step: tokens, weights and positions ``[rows, length]``, the kind of each row, and a mask for
    transformers: ``[rows, length]``, all ones, or ``[rows, 1, length, length]``, added to the attention logits."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    kinds: tuple[str, ...]


@dataclass
class Row:
    """A row's token ids, the weights of their losses, and the places that queries have to find."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: list[int], weight: float) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)


@dataclass(frozen=True)
class Corpus:
    """The source of batches: the texts, two streams of their token ids, and the tokenizer."""

    material: Material
    streams: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerFast

    @property
    def eos(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(EOS))

    @cached_property
    def closers(self) -> frozenset[int]:
        return self._tokens(lambda text: bool(set(text) & set(",}]")))

    @cached_property
    def openers(self) -> frozenset[int]:
        """Tokens before a sentence or a value; a digit follows a separate space token."""
        return self._tokens(lambda text: text == " " or text.endswith((".", ":", '"')))

    def _tokens(self, fits: Callable[[str], bool]) -> frozenset[int]:
        size = len(self.tokenizer)
        return frozenset(i for i in range(size) if fits(self.tokenizer.decode([i])))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def build(material: Material, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """Encode the books and the code once; files of code are separated by the end-of-text token."""
    streams = {
        "prose": _stream(tokenizer, [text + "\n\n" for text in material.prose]),
        "code": _stream(tokenizer, [text + EOS for text in material.code]),
    }
    return Corpus(material, streams, tokenizer)


def _stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for i in range(0, len(texts), _ENCODE_CHUNK):
        some = texts[i : i + _ENCODE_CHUNK]
        for encoding in tokenizer.backend_tokenizer.encode_batch(some, add_special_tokens=False):
            ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int32)


def batch(corpus: Corpus, stage: Stage, seed: int, step: int) -> Batch:
    rng = Random(f"{seed}/{step}")
    kinds = tuple(rng.choices(list(stage.mix), list(stage.mix.values()), k=stage.rows))
    rows = [row(corpus, kind, stage.length, rng) for kind in kinds]
    generator = np.random.default_rng(rng.getrandbits(64))
    places = [gapped_positions(generator, stage.length, share=stage.gaps) for _ in rows]
    mask = torch.ones(len(rows), stage.length, dtype=torch.int64)
    if stage.crowd != 1:
        biases = [crowding.bias(len(row), row.sources, *crowding.draw(rng, len(row), stage.crowd)) for row in rows]
        mask = torch.stack(biases)[:, None]
    return Batch(
        torch.tensor([row.tokens for row in rows]), torch.tensor([row.weights for row in rows]),
        torch.from_numpy(np.stack(places)), mask, kinds,
    )  # fmt: skip


def gapped_positions(rng: np.random.Generator, length: int, share: float) -> IntArray:
    """Return `length` ascending positions; a `share` of the calls has gaps, half the rest starts at 0."""
    if rng.random() >= share:
        start = 0 if rng.random() < 0.5 else int(rng.integers(0, POSITIONS - length + 1))
        return np.arange(start, start + length)
    span = int(math.exp(rng.uniform(math.log(length), math.log(POSITIONS))))
    places = rng.integers(1, length, size=int(rng.integers(1, 9)))
    leaps = np.zeros(length, dtype=np.int64)
    np.add.at(leaps, places, (rng.dirichlet(np.ones(len(places))) * (span - length)).astype(np.int64))
    start = int(rng.integers(0, POSITIONS - span + 1))
    return np.arange(start, start + length) + np.cumsum(leaps)


def row(corpus: Corpus, kind: str, length: int, rng: Random) -> Row:
    if kind == "spans":
        return spans(corpus, length, rng)
    if kind in _STREAMS:
        return Row(window(corpus, kind, length, rng), [1.0] * length)
    return _packed(corpus, kind, length, rng)


def window(corpus: Corpus, kind: str, length: int, rng: Random) -> list[int]:
    stream = corpus.streams[kind]
    start = rng.randrange(max(1, len(stream) - length))
    return [int(token) for token in stream[start : start + length].tolist()]


def _packed(corpus: Corpus, kind: str, length: int, rng: Random) -> Row:
    """Fill a row with tasks of one kind, each ended by the end-of-text token, and the rest with prose."""
    packed = Row()
    packed.add([corpus.eos] if rng.random() < 0.5 else [], 0.0)
    in_prompt, in_answer = (1.0, 1.0) if kind == "maths" else (PROMPT_WEIGHT, ANSWER_WEIGHT)
    for _ in range(2 + length // 64):
        task = _task(corpus, kind, length, rng)
        prompt, answer = corpus.encode(task.prompt), [*corpus.encode(task.answer), corpus.eos]
        begin, middle = len(packed), len(packed) + len(prompt)
        if middle + len(answer) > length:
            continue
        packed.add(prompt, in_prompt)
        packed.add(answer, in_answer)
        if kind in ("table", "rag"):
            for i in range(middle, len(packed)):
                if packed.tokens[i] in corpus.closers or packed.tokens[i - 1] in corpus.openers:
                    packed.weights[i] = JOINT_WEIGHT
        for first, last in _places(corpus, task):
            packed.sources.append(Source(middle - 1, len(packed), begin + first, begin + last))
    packed.add(window(corpus, "prose", length - len(packed), rng), 1.0)
    return packed


def _task(corpus: Corpus, kind: str, length: int, rng: Random) -> Task:
    if kind == "needle":
        return tasks.needle(rng, corpus.material, int(length * 3 * rng.uniform(0.2, 0.85)))
    if kind == "rag":
        return tasks.rag(rng, corpus.material, rng.randint(2, max(3, length // 90)))
    return tasks.make(kind, rng, corpus.material)


def _places(corpus: Corpus, task: Task) -> list[tuple[int, int]]:
    """Return each source's place in the prompt: (first token, last token + 1)."""
    offsets = corpus.tokenizer.backend_tokenizer.encode(task.prompt, add_special_tokens=False).offsets
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    places = []
    for source in task.sources:
        at = task.prompt.index(source)
        places.append((bisect_right(ends, at), bisect_left(starts, at + len(source))))
    return places


def spans(corpus: Corpus, length: int, rng: Random, text: float = TEXT_SPANS) -> Row:
    """Return a segment and random pieces of it, whose loss starts at their third token; a share ``text`` of the
    segments is text."""
    size = int(length * rng.uniform(0.25, 0.6))
    made = Row(_segment(corpus, size, rng, text), [0.0] * size)
    while len(made) < length:
        piece = min(rng.randint(8, min(96, size)), length - len(made))
        start = rng.randrange(size - piece + 1)
        made.sources.append(Source(len(made), len(made) + piece, start, start + piece + 1))
        made.add(made.tokens[start : start + min(2, piece)], 0.0)
        made.add(made.tokens[start + 2 : start + piece], SPAN_WEIGHT)
    return made


def _segment(corpus: Corpus, size: int, rng: Random, text: float) -> list[int]:
    """Return text in a share ``text`` of the calls, else random tokens, which are easier to copy."""
    streams = [name for name in _STREAMS if len(corpus.streams[name]) > size]
    if rng.random() < text and streams:
        return window(corpus, rng.choice(streams), size, rng)
    vocabulary = len(corpus.tokenizer)
    return [rng.randrange(1, vocabulary) for _ in range(size)]
