"""``python -m benchmarks activations``: what quantised activations change of a model's distributions.

A GGUF file is loaded dequantised to float32, as stored with float32 activations, and as stored with activations of
eight bits; llama.cpp reads it, too. All get the same tokens and are compared with the first, position by position.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.peers.process import Peer, check_python
from benchmarks.reporting.common_options import ListOptions, list_option, names_of
from benchmarks.reporting.study_report import Delivery, Report, listing
from forerun.bench.machine import Row, plain_values
from forerun.bench.report import pivot
from forerun.cli.options import OutputOptions, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.models.forward.architecture import STORED, STORED_BY_FLOATS
from forerun.models.loading.load import load

CONTESTANTS = {"float32": STORED_BY_FLOATS, "int8": STORED}
"""Names of the contestants, by ``activations``."""
LLAMA = "llama.cpp"
Reader = Callable[[torch.Tensor], torch.Tensor]
"""Returns log-probabilities of every token after each position but the last, float64 ``[n - 1, V]``, given ids."""
WINDOW = 512
"""Tokens of a piece; the model sees none before it."""
COLUMNS = {
    "file": "file", "text": "text", "who": "weights", "tokens": "tokens", "divergence": "KL to float32",
    "highest": "99th percentile", "same": "same best token", "perplexity": "perplexity",
    "exact_perplexity": "that of float32",
}  # fmt: skip


@dataclass(frozen=True)
class ActivationsOptions(ListOptions, OutputOptions):
    """Divergence of a GGUF model's distributions, as stored, from those of the same weights in float32.

    Writes JSON and Markdown after each file.
    """

    model: Annotated[
        list[str] | None, option("--model", "-m", panel="Model", help="A GGUF file; may be repeated.", metavar="FILE")
    ] = None
    activations: Annotated[str, list_option("Model", "Of int8, float32.")] = "float32,int8"
    peer_python: Annotated[
        Path | None,
        option(panel="Model", help="llama.cpp as well, from the environment of this interpreter (llama-cpp-python)."),
    ] = None
    text: Annotated[
        list[str] | None,
        option("--text", panel="Text", help="A file to read; may be repeated. Else code, documentation and JSON."),
    ] = None
    tokens: Annotated[int, option(panel="Text", help="Of each text.", min=2)] = 3500
    out: Annotated[Path, option(panel="Output", help="Folder for the files.")] = Path("runs/activations")

    types = names_of("activations", CONTESTANTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("give --model, a GGUF file")
        check_python(self.peer_python)


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


def read_by(peer: Peer, scratch: Path, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of another engine, which writes its logits to a file."""
    peer.call("logits", ids=ids[0].tolist(), file=str(scratch))
    return torch.from_numpy(np.load(scratch))[:-1].double().log_softmax(-1)


def compare(
    exact: Reader, others: Mapping[str, Reader], pieces: Sequence[torch.Tensor], step: Callable[[], None] = lambda: None
) -> list[Row]:
    """One row for each contestant: its divergence from ``exact`` over all pieces, in nats a token.

    Args:
        exact: the reference.
        others: contestants by name.
        pieces: token ids ``[1, n]``, each read from its beginning.
        step: called after each piece.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in others}
    same, losses = dict.fromkeys(others, 0), dict.fromkeys(["", *others], 0.0)
    for ids in pieces:
        right, places = exact(ids), ids[0, 1:, None]
        losses[""] -= float(right.gather(1, places).sum())
        for name, read in others.items():
            theirs = read(ids)
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
    given = {"model": [Path(file).name for file in options.model or ()], "peer_python": None}
    report = Report(f"What quantised activations change ({date.today().isoformat()})", plain_values(options) | given)
    delivery = Delivery(report, options.out, "activations", options.json)
    rows, said = list[Row](), dict[str, None]()
    for file in options.model or ():
        rows += [{"file": Path(file).stem} | row for row in of_file(file, options, said)]
        notes = [f"{line}\n" for line in said]
        heading = "Divergence from float32, in nats a token"
        report.add("divergence", heading, rows, divergences(rows), *notes, listing(rows, COLUMNS))
        delivery.save()
    delivery.end()


def of_file(file: str, options: ActivationsOptions, said: dict[str, None]) -> list[Row]:
    """The rows of a file, by text; what llama.cpp says about itself is added to ``said``."""
    exact, tokenizer = load(file, "float32", device="cpu")
    others: dict[str, Reader] = {
        CONTESTANTS[each]: partial(log_probabilities, load(file, STORED, activations=each)[0]) for each in options.types
    }
    pieces = {
        name: [*windows(tokenizer(text)["input_ids"], options.tokens)] for name, text in texts(options.text).items()
    }
    rows, total, done = list[Row](), sum(map(len, pieces.values())), 0
    with ExitStack() as stack, progress_bar(stderr(), Path(file).stem) as progress:
        if options.peer_python is not None:
            given = {"threads": torch.get_num_threads(), "folder": file, "positions": WINDOW}
            peer = stack.enter_context(Peer("benchmarks.peers.llamacpp_python", given, str(options.peer_python)))
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="forerun-logits-"))) / "logits.npy"
            others[LLAMA] = partial(read_by, peer, scratch)
            said[peer.said] = None

        def step() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        for name, some in pieces.items():
            rows += [{"text": name} | row for row in compare(partial(log_probabilities, exact), others, some, step)]
    return rows


def divergences(rows: Sequence[Row]) -> str:
    """The mean divergence over all tokens, by file and contestant, and the ratio of llama.cpp's to Forerun's."""
    cells = {(row["file"], row["who"]): list[Row]() for row in rows}
    for row in rows:
        cells[row["file"], row["who"]].append(row)
    means = [
        {"file": file, "weights": who, "tokens": sum(row["tokens"] for row in some),
         "sum": sum(row["tokens"] * row["divergence"] for row in some)}
        for (file, who), some in cells.items()
    ]  # fmt: skip
    sums = {(row["file"], row["weights"]): row["sum"] for row in means}
    ratios = [
        {"file": file, "weights": f"{LLAMA} / {STORED}", "ratio": total / sums[file, STORED]}
        for (file, who), total in sums.items()
        if who == LLAMA and (file, STORED) in sums
    ]
    return pivot([*means, *ratios], "file", "weights", _divergence)


def _divergence(row: Row) -> str:
    return f"{row['ratio']:.2f}" if "ratio" in row else f"{row['sum'] / row['tokens']:.2e}"
