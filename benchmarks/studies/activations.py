"""``python -m benchmarks activations``: what quantised activations change of a model's distributions.

A GGUF file is loaded three times: dequantised to float32, as stored with float32 activations, and as stored with
activations of eight bits. Each reads the same texts; the last two are compared with the first, token by token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.reporting.study_report import Report, deliver, listing
from forerun.bench.machine import Row, plain_values
from forerun.cli.options import OutputOptions, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.models.forward.architecture import STORED, STORED_BY_FLOATS
from forerun.models.loading.load import load

CONTESTANTS = {STORED_BY_FLOATS: "float32", STORED: "int8"}
"""``activations`` of the contestants, by name."""
WINDOW = 512
"""Tokens of a piece; the model sees none before it."""
COLUMNS = {
    "text": "text", "who": "weights", "tokens": "tokens", "divergence": "KL to float32", "highest": "99th percentile",
    "same": "same best token", "perplexity": "perplexity", "exact_perplexity": "that of float32",
}  # fmt: skip


@dataclass(frozen=True)
class ActivationsOptions(OutputOptions):
    """Divergence of a GGUF model's distributions, as stored, from those of the same weights in float32.

    Writes JSON and Markdown.
    """

    model: Annotated[str, option("--model", "-m", panel="Model", help="A GGUF file.", metavar="FILE")] = ""
    text: Annotated[
        list[str] | None,
        option("--text", panel="Text", help="A file to read; may be repeated. Else code, documentation and JSON."),
    ] = None
    tokens: Annotated[int, option(panel="Text", help="Of each text.", min=2)] = 3500
    out: Annotated[Path, option(panel="Output", help="Folder for the files.")] = Path("runs/activations")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("give --model, a GGUF file")


def texts(files: Sequence[str] | None) -> dict[str, str]:
    """Return texts by name: the files', or some that every checkout has."""
    if files:
        return {Path(file).name: Path(file).read_text("utf-8") for file in files}
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    listed = [{"page": page.name, "lines": page.read_text("utf-8").splitlines()} for page in pages]
    return {
        "code": Path(argparse.__file__).read_text("utf-8"),
        "documentation": "\n".join(page.read_text("utf-8") for page in pages),
        "JSON": json.dumps(listed, indent=1),
    }


def windows(ids: Sequence[int], count: int) -> Iterator[torch.Tensor]:
    """Yield the first ``count`` tokens in pieces ``[1, n]``."""
    for first in range(0, min(count, len(ids)) - 1, WINDOW):
        piece = ids[first : min(count, first + WINDOW)]
        if len(piece) > 1:
            yield torch.tensor([piece])


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return those of every token after each position but the last, float64 ``[n - 1, V]``."""
    return model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)


def compare(
    exact: PreTrainedModel, others: Mapping[str, PreTrainedModel], pieces: Sequence[torch.Tensor],
    step: Callable[[], None] = lambda: None,
) -> list[Row]:  # fmt: skip
    """Return a row for each of ``others``: its divergence from ``exact`` over all pieces, in nats a token."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in others}
    same, losses = dict.fromkeys(others, 0), dict.fromkeys(["", *others], 0.0)
    for ids in pieces:
        right, places = log_probabilities(exact, ids), ids[0, 1:, None]
        losses[""] -= float(right.gather(1, places).sum())
        for name, model in others.items():
            theirs = log_probabilities(model, ids)
            found[name].append((right.exp() * (right - theirs)).sum(-1).numpy())
            same[name] += int((right.argmax(-1) == theirs.argmax(-1)).sum())
            losses[name] -= float(theirs.gather(1, places).sum())
        step()
    return [_row(name, np.concatenate(found[name]), same[name], losses) for name in others]


def _row(name: str, divergences: np.ndarray, same: int, losses: Mapping[str, float]) -> Row:
    count = len(divergences)
    return {
        "who": name,
        "tokens": count,
        "divergence": float(divergences.mean()),
        "highest": float(np.quantile(divergences, 0.99)),
        "same": f"{100 * same / count:.1f} %",
        "perplexity": float(np.exp(losses[name] / count)),
        "exact_perplexity": float(np.exp(losses[""] / count)),
    }


def run(options: ActivationsOptions) -> None:
    """Measure, print the table, and write JSON and Markdown."""
    exact, tokenizer = load(options.model, "float32", device="cpu")
    others = {
        name: load(options.model, STORED, activations=activations)[0] for name, activations in CONTESTANTS.items()
    }
    pieces = {
        name: [*windows(tokenizer(text)["input_ids"], options.tokens)] for name, text in texts(options.text).items()
    }
    rows, total, done = list[Row](), sum(map(len, pieces.values())), 0
    with progress_bar(stderr(), "reading") as progress:
        for name, some in pieces.items():

            def step() -> None:
                nonlocal done
                done += 1
                progress(done, total)

            rows += [{"text": name} | row for row in compare(exact, others, some, step)]
    report = Report("What quantised activations change", plain_values(options))
    report.add("divergence", "Divergence from float32, in nats a token", rows, listing(rows, COLUMNS))
    deliver(report, options.out, "activations", options.json)
