"""``python -m benchmarks activations``: what quantised activations change of a model's distributions.

A GGUF file is loaded dequantised to float32, as stored with float32 activations, and as stored with int8 ones;
llama.cpp loads it, too. All are compared with the first, position by position.
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
from benchmarks.reporting.common_options import ListOptions, PeerPython, list_option, names_of
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.bench.report import pivot
from forerun.cli.options import OutputOptions, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.models.forward.architecture import STORED, STORED_BY_FLOATS
from forerun.models.loading.load import load

CONTESTANTS = {"float32": STORED_BY_FLOATS, "int8": STORED}  # by activations
LLAMA = "llama.cpp"
Reader = Callable[[torch.Tensor], torch.Tensor]
"""Returns log-probabilities after each position of ids but the last, float64 ``[n - 1, V]``."""
WINDOW = 512  # tokens of a piece; the model sees none before it
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

    model: Annotated[list[str] | None, option("--model", "-m", panel="Model", help="GGUF; may be repeated.")] = None
    activations: Annotated[str, list_option("Model", "Of int8, float32.")] = "float32,int8"
    peer_python: PeerPython = None
    text: Annotated[list[str] | None, option(panel="Text", help="A file; may be repeated. Else three texts.")] = None
    tokens: Annotated[int, option(panel="Text", help="Of each text.", min=2)] = 3500
    out: Annotated[Path, option(panel="Output", help="Folder for the files.")] = Path("runs/activations")

    types = names_of("activations", CONTESTANTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("give --model, a GGUF file")
        check_python(self.peer_python)


def texts(files: Sequence[str] | None) -> dict[str, str]:
    """Return texts by name: the files', or some of this checkout."""
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
    """Run the model; see ``Reader``."""
    return model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)


def read_by(peer: Peer, scratch: Path, ids: torch.Tensor) -> torch.Tensor:
    """Run another engine, which writes its logits to a file; see ``Reader``."""
    peer.call("logits", ids=ids[0].tolist(), file=str(scratch))
    return torch.from_numpy(np.load(scratch))[:-1].double().log_softmax(-1)


def compare(
    exact: Reader, others: Mapping[str, Reader], pieces: Sequence[torch.Tensor], step: Callable[[], None] = lambda: None
) -> list[Row]:
    """Return a row for each contestant: its divergence from ``exact`` over pieces of ids ``[1, n]``, in nats a token.
    ``step`` is called after each piece."""
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
    rows = []
    for name in others:
        nats = np.concatenate(found[name])
        perplexity, exact_perplexity = (float(np.exp(losses[each] / len(nats))) for each in (name, ""))
        rows.append({
            "who": name, "tokens": len(nats), "divergence": float(nats.mean()),
            "highest": float(np.quantile(nats, 0.99)), "same": f"{100 * same[name] / len(nats):.1f} %",
            "perplexity": perplexity, "exact_perplexity": exact_perplexity,
        })  # fmt: skip
    return rows


def run(options: ActivationsOptions) -> None:
    names, title = [Path(file).name for file in options.model or ()], "What quantised activations change"
    title = f"{title} ({date.today().isoformat()})"
    report = Report.of(title, options, "activations", model=names, peer_python=None)
    rows, said = list[Row](), dict[str, None]()
    for file in options.model or ():
        rows += [{"file": Path(file).stem} | row for row in of_file(file, options, said)]
        notes = [f"{line}\n" for line in said]
        heading = "Divergence from float32, in nats a token"
        report.add("divergence", heading, rows, divergences(rows), *notes, listing(rows, COLUMNS))
        report.save()
    report.end()


def of_file(file: str, options: ActivationsOptions, said: dict[str, None]) -> list[Row]:
    """Return a file's rows, by text; add what llama.cpp says about itself to ``said``."""
    exact, tokenizer = load(file, "float32", device="cpu")
    others: dict[str, Reader] = {
        CONTESTANTS[each]: partial(log_probabilities, load(file, STORED, activations=each)[0]) for each in options.types
    }
    ids = {name: tokenizer(text)["input_ids"] for name, text in texts(options.text).items()}
    pieces = {name: [*windows(each, options.tokens)] for name, each in ids.items()}
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
    """Return the mean divergence over all tokens by file and contestant, and llama.cpp's ratio to Forerun's."""
    sums = {(row["file"], row["who"]): [0.0, 0] for row in rows}
    for row in rows:
        total = sums[row["file"], row["who"]]
        total[0], total[1] = total[0] + row["tokens"] * row["divergence"], total[1] + row["tokens"]
    cells = [{"file": file, "weights": who, "cell": f"{nats / n:.2e}"} for (file, who), (nats, n) in sums.items()]
    for (file, who), (nats, _) in sums.items():
        if who == LLAMA and (file, STORED) in sums:
            ratio = f"{nats / sums[file, STORED][0]:.2f}"
            cells.append({"file": file, "weights": f"{LLAMA} / {STORED}", "cell": ratio})
    return pivot(cells, "file", "weights", lambda row: row["cell"])
