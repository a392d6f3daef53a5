"""The tokenizer of both models: byte-level BPE, so decoding is lossless; 4,096 tokens, one token per digit. Training is
deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.training import tasks
from benchmarks.training.tasks import EOS, Material

VOCABULARY = 4096


def sample(material: Material, seed: int = 0, synthetic: int = 3000) -> Iterator[str]:
    """Yield the texts for learning the merges: every third paragraph, all code and maths, some tasks."""
    yield from material.prose[::3]
    yield from material.code
    yield from (question + answer for question, answer in material.maths)
    rng = Random(seed)
    for i in range(synthetic):
        task = tasks.make(("rag", "table", "needle")[i % 3], rng)
        yield task.prompt + task.answer


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    given = {"special_tokens": [EOS], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, **given)
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS, model_max_length=131072,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load(folder: Path) -> PreTrainedTokenizerFast:
    return wrap(Tokenizer.from_file(str(folder / "tokenizer.json")))
