"""``python -m benchmarks evaluate-bundled``: the bundled models on held-out texts and tasks, greedy, float32.

An answer is exact if it equals the expected one, up to and with the end-of-text token. Tasks are seeded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.training import corpus, material, tasks
from benchmarks.training.corpus import Corpus
from benchmarks.training.tasks import Material, Task
from forerun.cli.options import DebugOptions
from forerun.reference import bundled

SEED = 90_210  # training draws its tasks from other seeds
WINDOW = 512
TEXT_SPANS = 0.4  # share of the copying rows whose spans are text; the others are random tokens
READ_BLOCK = 1024  # tokens of a long text in one pass
TOKENS_A_FACT = 400  # the least tokens of text per hidden fact


@dataclass(frozen=True)
class Evaluator:
    """A model, its test material, and the number of examples per figure."""

    model: PreTrainedModel
    data: Corpus
    examples: int

    def answer(self, prompt: str, max_new_tokens: int) -> list[int]:
        ids, length = torch.tensor([self.data.encode(prompt)]), {"max_new_tokens": max_new_tokens}
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        return [int(token) for token in made[0, ids.shape[1] :]]

    def exact(self, task: Task) -> bool:
        expected = [*self.data.encode(task.answer), self.data.eos]
        return self.answer(task.prompt, len(expected)) == expected

    @torch.inference_mode()
    def needles(self, size: int) -> float:
        """Return the share of facts that are recalled exactly from texts of about ``size`` tokens.

        Greedy decoding recalls a fact exactly if it predicts each of its tokens. One text hides all facts and is read
        once.
        """
        sample = " ".join(tasks.filler(Random(SEED), self.data.material, 100_000))
        chars = int(size * len(sample) / len(self.data.encode(sample)))
        each = max(1, min(self.examples, size // TOKENS_A_FACT))
        found: list[bool] = []
        while len(found) < self.examples:
            text, asked = tasks.haystack(Random(f"{SEED}/{size}/{len(found)}"), self.data.material, chars, each)
            ids, cache = self.data.encode(text), DynamicCache()
            for start in range(0, len(ids), READ_BLOCK):
                self._logits(ids[start : start + READ_BLOCK], cache)
            found += [self._recalled(task, cache) for task in asked]
        return sum(found) / len(found)

    def _recalled(self, task: Task, cache: DynamicCache) -> bool:
        prompt, answer = self.data.encode(task.prompt), [*self.data.encode(task.answer), self.data.eos]
        logits = self._logits(prompt + answer[:-1], cache)
        cache.crop(-len(logits))
        return bool((logits[len(prompt) - 1 :].argmax(-1) == torch.tensor(answer)).all())

    def _logits(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Return the logits after each of the tokens, and add these to the cache."""
        return self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]

    @torch.inference_mode()
    def predictions(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits for every token but the first, ``[n - 1, V]``."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()

    def loss(self, kind: str) -> float:
        """Return the mean loss in nats per token on rows of a kind."""
        rows = [corpus.row(self.data, kind, WINDOW, Random(f"{SEED}/{i}")).tokens for i in range(self.examples)]
        return sum(float(cross_entropy(self.predictions(row), torch.tensor(row[1:]))) for row in rows) / len(rows)

    def copying(self) -> float:
        """Return the share of correct tokens in repeated spans, from a span's third token on."""
        right = total = 0
        for i in range(self.examples):
            row = corpus.spans(self.data, WINDOW, Random(f"{SEED}/{i}"), TEXT_SPANS)
            hits = self.predictions(row.tokens).argmax(-1) == torch.tensor(row.tokens[1:])
            counted = torch.tensor(row.weights[1:]) > 0
            right += int((hits & counted).sum())
            total += int(counted.sum())
        return right / total


def evaluate_one(model: PreTrainedModel, data: Corpus, examples: int, sizes: list[int]) -> dict[str, float]:
    it = Evaluator(model, data, examples)
    figures = {f"loss {kind}": it.loss(kind) for kind in ("prose", "code", "maths") if getattr(data.material, kind)}
    figures["copy accuracy"] = it.copying()
    for size in sizes:
        figures[f"needle {size}"] = it.needles(size)
    for kind in ("table", "rag", "quote"):
        drawn = [tasks.KINDS[kind](Random(f"{SEED}/{i}"), data.material) for i in range(examples)]
        figures[f"{kind} exact"] = sum(map(it.exact, drawn)) / examples
    return figures


def agreement(target: Evaluator, draft: Evaluator, new_tokens: int = 128) -> dict[str, float]:
    """Return by kind the share of the target's greedy tokens that the draft would also choose."""
    shares = {}
    for kind in tasks.KINDS:
        if kind in ("prose", "code", "maths") and not getattr(target.data.material, kind):
            continue
        same = total = 0
        for i in range(target.examples):
            prompt = tasks.make(kind, Random(f"{SEED}/{i}"), target.data.material).prompt
            made = target.answer(prompt, new_tokens)
            choices = draft.predictions(target.data.encode(prompt) + made)[-len(made) :].argmax(-1)
            same += int((choices == torch.tensor(made)).sum())
            total += len(made)
        shares[kind] = same / total
    return shares


def evaluate(target: Path, draft: Path, texts: Material, examples: int, sizes: list[int]) -> dict[str, Any]:
    data = corpus.build(texts, AutoTokenizer.from_pretrained(target))
    pair = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (target, draft)]
    return {
        "examples": examples,
        "target": evaluate_one(pair[0], data, examples, sizes),
        "draft": evaluate_one(pair[1], data, examples, sizes),
        "agreement": agreement(Evaluator(pair[0], data, examples), Evaluator(pair[1], data, examples)),
    }


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(DebugOptions):
    """Evaluate a target and a draft on held-out texts and tasks."""

    books: Annotated[Path | None, typer.Option(help="A folder of .txt books not trained on.")] = None
    maths: Annotated[Path | None, typer.Option(help="JSON lines given to training; the held-out part.")] = None
    target: Annotated[Path | None, typer.Option(help="The target's folder; the bundled one by default.")] = None
    draft: Annotated[Path | None, typer.Option(help="The draft's folder; the bundled one by default.")] = None
    examples: Annotated[int, typer.Option(help="Examples of each task.")] = 20
    sizes: Annotated[str, typer.Option(help="Context lengths of needle tasks, in tokens.")] = "1024,4096,16384,32768"
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False


def run(options: EvaluateOptions) -> None:
    torch.set_num_threads(options.threads)
    texts = material.read_held_out(options.books, options.maths)
    wanted = [int(size) for size in options.sizes.split(",")]
    target, draft = options.target or bundled("target"), options.draft or bundled("draft")
    figures = evaluate(target, draft, texts, options.examples, wanted)
    if options.as_json:
        typer.echo(json.dumps(figures))
    else:
        Console().print(figures)
