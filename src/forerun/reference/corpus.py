"""The training mix: rows of equal length, each of one kind, with a weight for every token's loss.

A batch is a pure function of (material, stage, seed, step): a run that was interrupted sees the same batches as one
that was not. Row kinds are those of `tasks.KINDS` and 'spans': a segment of text or of random tokens, then random
pieces of it again, with the loss on the pieces only. Only rows of spans make a small model learn to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from forerun.reference import positions, tasks
from forerun.reference.recipe import Stage
from forerun.reference.tasks import EOS, Material

PROMPT_WEIGHT = 0.1  # what the prompt of an invented task says cannot be foreseen: weigh it little
ANSWER_WEIGHT = 4.0  # answers are short, and are what is wanted
SPAN_WEIGHT = 2.0
_STREAMS = ("prose", "code")
_ENCODE_CHUNK = 2000


@dataclass(frozen=True)
class Batch:
    """Rows for one step: tokens, weights and positions are [rows, length]; kinds names each row."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Everything that batches are drawn from: the texts, the same as two streams of token ids, the tokenizer."""

    material: Material
    streams: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerFast

    @property
    def eos(self) -> int:
        """The id of the end-of-text token."""
        return int(self.tokenizer.convert_tokens_to_ids(EOS))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with no special tokens added."""
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
        for encoding in tokenizer.backend_tokenizer.encode_batch(
            texts[i : i + _ENCODE_CHUNK], add_special_tokens=False
        ):
            ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int32)


def batch(corpus: Corpus, stage: Stage, seed: int, step: int) -> Batch:
    """Return the batch of one step."""
    rng = Random(f"{seed}/{step}")
    kinds = tuple(rng.choices(list(stage.mix), list(stage.mix.values()), k=stage.rows))
    rows = [row(corpus, kind, stage.length, rng) for kind in kinds]
    generator = np.random.default_rng(rng.getrandbits(64))
    places = [positions.gapped(generator, stage.length, share=stage.gaps) for _ in rows]
    return Batch(
        torch.tensor([tokens for tokens, _ in rows]),
        torch.tensor([weights for _, weights in rows]),
        torch.from_numpy(np.stack(places)),
        kinds,
    )


Row = tuple[list[int], list[float]]


def row(corpus: Corpus, kind: str, length: int, rng: Random) -> Row:
    """Return the token ids and loss weights of one row of the named kind."""
    if kind == "spans":
        return spans(corpus, length, rng)
    if kind in _STREAMS:
        return window(corpus, kind, length, rng), [1.0] * length
    return _packed(corpus, kind, length, rng)


def window(corpus: Corpus, kind: str, length: int, rng: Random) -> list[int]:
    """Return `length` consecutive tokens of a stream."""
    stream = corpus.streams[kind]
    start = rng.randrange(max(1, len(stream) - length))
    return [int(token) for token in stream[start : start + length].tolist()]


def _packed(corpus: Corpus, kind: str, length: int, rng: Random) -> Row:
    """Fill a row with tasks of one kind, each closed by the end-of-text token, then with prose where none fits."""
    tokens: list[int] = [corpus.eos] if rng.random() < 0.5 else []
    weights: list[float] = [0.0] * len(tokens)
    for _ in range(2 + length // 64):
        prompt, answer = task_tokens(corpus, kind, length, rng)
        if len(tokens) + len(prompt) + len(answer) > length:
            continue
        tokens += prompt + answer
        in_prompt, in_answer = (1.0, 1.0) if kind == "maths" else (PROMPT_WEIGHT, ANSWER_WEIGHT)
        weights += [in_prompt] * len(prompt) + [in_answer] * len(answer)
    rest = length - len(tokens)
    return tokens + window(corpus, "prose", rest, rng), weights + [1.0] * rest


def task_tokens(corpus: Corpus, kind: str, length: int, rng: Random) -> tuple[list[int], list[int]]:
    """Return the token ids of a task that suits a row of `length` tokens: (prompt, answer with end of text)."""
    if kind == "needle":
        task = tasks.needle(rng, corpus.material, int(length * 3 * rng.uniform(0.2, 0.85)))
    elif kind == "rag":
        task = tasks.rag(rng, corpus.material, rng.randint(2, max(3, length // 90)))
    else:
        task = tasks.make(kind, rng, corpus.material)
    return corpus.encode(task.prompt), [*corpus.encode(task.answer), corpus.eos]


def spans(corpus: Corpus, length: int, rng: Random) -> Row:
    """Return a segment, then random pieces of it; the loss starts at the third token of each piece."""
    size = int(length * rng.uniform(0.25, 0.6))
    segment = _segment(corpus, size, rng)
    tokens, weights = list(segment), [0.0] * size
    while len(tokens) < length:
        piece_length = rng.randint(8, min(96, size))
        start = rng.randrange(size - piece_length + 1)
        tokens += segment[start : start + piece_length]
        weights += [0.0, 0.0] + [SPAN_WEIGHT] * (piece_length - 2)
    return tokens[:length], weights[:length]


def _segment(corpus: Corpus, size: int, rng: Random) -> list[int]:
    """Return text in four cases of ten, else tokens drawn at random."""
    streams = [name for name in _STREAMS if len(corpus.streams[name]) > size]
    if rng.random() < 0.4 and streams:
        return window(corpus, rng.choice(streams), size, rng)
    vocabulary = len(corpus.tokenizer)
    return [rng.randrange(1, vocabulary) for _ in range(size)]
