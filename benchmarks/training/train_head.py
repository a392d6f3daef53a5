"""``python -m benchmarks train-head``: train a head for a model, from texts that it wrote.

The head learns the target's distributions at the tokens of answers (``trainable_heads.py``). The same command resumes
an interrupted run. Hidden states are computed once per sequence and kept in memory.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from benchmarks.training.self_written import read_rows, write_answers, write_prompts
from benchmarks.training.trainable_heads import Kind, TrainableEagle3, TrainableHead, TrainableMtp
from benchmarks.training.training_loop import Training
from forerun.bench.prompts_file import TemplateEncoder
from forerun.cli.options import DebugOptions
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.load import load

MUON_RATE = 0.02
"""First learning rate of the layer's matrices, without a unit, as Muon's steps are orthogonal. SmolLM2's loss after 60
steps was 15.6 at half of it, 14.2 here with three times AdamW's rate, and 14.7 with AdamW alone."""


class Matrix(enum.StrEnum):
    """Whose output matrix a head has."""

    OWN = "own"
    TARGET = "target"


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DebugOptions):
    """Train a head for a model, from texts that it wrote."""

    model: Annotated[str, typer.Option(help="The target: a folder, a GGUF file, or bundled.")]
    out: Annotated[Path, typer.Option(help="The head's folder; for mtp, of the target with its head.")]
    kind: Annotated[Kind, typer.Option(help="What to train.")] = Kind.EAGLE3
    texts: Annotated[Path | None, typer.Option(help="JSON lines of {prompt}, perhaps {prompt, answer}.")] = None
    prompts: Annotated[int, typer.Option(help="Prompts that the model writes, without --texts.")] = 2000
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 for greedy.")] = 0.8
    minutes: Annotated[float, typer.Option(help="Processor minutes of training, of all threads.")] = 60.0
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    draft_vocab: Annotated[int, typer.Option(help="Tokens that it is trained on: the most frequent ones.")] = 8192
    matrix: Annotated[Matrix, typer.Option(help="EAGLE-3's output matrix: its own, or the target's.")] = Matrix.OWN
    ahead: Annotated[int, typer.Option(help="Steps of training-time test.")] = 3
    length: Annotated[int, typer.Option(help="Tokens of a prompt and answer that are used.")] = 384
    batch: Annotated[int, typer.Option(help="Answers of a step.")] = 4
    rate: Annotated[float, typer.Option(help="Learning rate at first, of the head and norms.")] = 3e-3
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer that is written first.")] = 256


@dataclass
class Example:
    """A prompt and its answer: tokens, where the answer begins, and the target's states once they are computed."""

    tokens: list[int]
    answer: int
    states: torch.Tensor | None = None
    last: torch.Tensor | None = None


class HeadTraining(Training):
    """The training of a head, ``model``, for a target that does not change."""

    largest_norm = 0.5

    def __init__(self, target: Scorer, model: TrainableHead, examples: Sequence[Example], options: HeadOptions) -> None:
        self.target, self.examples, self.options = target, examples, options
        self.head = target.model.get_output_embeddings().weight[model.known].detach().float()
        super().__init__(model, options.out, MUON_RATE, options.rate)

    @property
    def progress(self) -> float:
        return self.done.seconds / (60 * self.options.minutes)

    def rate(self) -> float:
        return min(1.0, (self.done.step + 1) / 20) * max(0.05, 1 - self.progress)

    def loss(self) -> tuple[torch.Tensor, int]:
        """Return the loss of some examples, and note how often each step of drafting is right."""
        chosen = Random(self.done.step).sample(self.examples, min(self.options.batch, len(self.examples)))
        loss, right = self.model.losses(*self._batch(chosen), self.head, self.options.ahead)
        self.recent["loss"].append(float(loss.detach()))
        for number, each in enumerate(right, 1):
            self.recent[f"right {number}"].append(each)
        return loss, sum(len(example.tokens) for example in chosen)

    def _batch(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states, embeddings, last states and the mask, padded on the right."""
        for example in examples:
            if example.states is None:
                self._look(example)
        longest, device = max(len(example.tokens) for example in examples), self.head.device
        ids = torch.zeros(len(examples), longest, dtype=torch.int64, device=device)
        mask = torch.zeros(len(examples), longest, device=device)
        for row, example in enumerate(examples):
            ids[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask[row, example.answer - 1 : len(example.tokens) - 1] = 1.0
        states, last = (
            nn.utils.rnn.pad_sequence([part.float() for part in parts], batch_first=True)
            for parts in zip(*((example.states, example.last) for example in examples), strict=True)
        )
        embeddings = functional.embedding(ids, self.target.model.get_input_embeddings().weight).float()
        return states, embeddings, last, mask

    @torch.no_grad()
    def _look(self, example: Example) -> None:
        block = Block(np.array(example.tokens, np.int64), DraftTree.empty(), 0)
        layers = (*self.model.layers, int(self.target.model.config.get_text_config(decoder=True).num_hidden_layers))
        [(_, states, _)] = self.target.score_rows([block], [self.target.adopt(FullCache())], layers)
        assert states is not None
        example.states, example.last = states.bfloat16().tensor_split([len(self.model.layers) * self.head.shape[1]], -1)


def run(options: HeadOptions) -> None:
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load(options.model, "bfloat16", device=options.device)
    target.requires_grad_(False)
    engine = Engine(target, "none", tokenizer=tokenizer)
    rows = answered(options, engine, tokenizer)
    examples = [example for row in rows if (example := encoded(row, tokenizer, options)) is not None]
    if len(examples) < 2:
        raise ValueError(f"{len(examples)} examples are long enough to learn from; at least 2 are needed")
    known = frequent(examples, options.draft_vocab, int(target.get_input_embeddings().weight.shape[0]))
    frozen, eagle31 = options.matrix is Matrix.TARGET, options.kind is Kind.EAGLE31
    mtp = options.kind is Kind.MTP
    model = TrainableMtp(target, known) if mtp else TrainableEagle3(target, known, frozen, eagle31)
    training = HeadTraining(engine.target, model.to(target.device), examples, options)
    estimate(training)
    training.fit("head")
    model.export(target, options.out)


def answered(options: HeadOptions, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return rows with answers; write missing prompts and answers beside the head."""
    rows = read_rows(options.texts) if options.texts else []
    prompts = [row["prompt"] for row in rows if "answer" not in row]
    if prompts or not options.texts:
        if not options.texts:
            prompts = write_prompts(engine, tokenizer, options.prompts, options.out / "prompts.jsonl")
        answers = write_answers(
            engine, tokenizer, prompts, options.out / "answers.jsonl",
            max_new_tokens=options.answer_tokens, temperature=options.temperature,
        )  # fmt: skip
        rows = [row for row in rows if "answer" in row]
        rows += [{"prompt": prompt, "answer": answers[prompt]} for prompt in prompts]
    return rows


def encoded(row: dict[str, str], tokenizer: PreTrainedTokenizerBase, options: HeadOptions) -> Example | None:
    """Encode a row; return None for one too short to learn from."""
    before = TemplateEncoder(tokenizer)(row["prompt"])
    tokens = [*before, *tokenizer(row["answer"], add_special_tokens=False)["input_ids"]][: options.length]
    enough = len(tokens) > len(before) + options.ahead and len(tokens) > 2 * options.ahead
    return Example(tokens, len(before)) if enough else None


def frequent(examples: Sequence[Example], count: int, vocabulary: int) -> torch.Tensor:
    """Return the most frequent tokens of answers, then those of the lowest ids; ascending, int64."""
    seen = Counter(token for example in examples for token in example.tokens[example.answer :])
    order = [token for token, _ in seen.most_common(count)]
    rest = (token for token in range(vocabulary) if token not in seen)
    order += [token for token, _ in zip(rest, range(min(count, vocabulary) - len(order)), strict=False)]
    return torch.tensor(sorted(order), dtype=torch.int64)


def estimate(training: HeadTraining) -> None:
    """Print how far the time will go, by two steps that are then undone."""
    began = training.done
    for _ in range(2):
        training.advance()
    seconds = (training.done.seconds - began.seconds) / 2
    training.done, options = began, training.options
    training.recent.clear()
    left, examples = max(0.0, 60 * options.minutes - began.seconds), training.examples
    tokens = sum(len(example.tokens) for example in examples)
    steps = int(left / seconds)
    print(
        f"{len(examples)} examples with {tokens:,} tokens; {training.model.lm_head.out_features:,} tokens known; "
        f"a step of {options.batch} examples takes {seconds:.2f} s at first; about {steps:,} steps "
        f"({steps * options.batch / len(examples):.1f} times through) in {left / 60:.0f} minutes from here",
        flush=True,
    )
