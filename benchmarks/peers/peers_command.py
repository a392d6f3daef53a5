"""``python -m benchmarks peers``: plain decoding and prompts beside llama.cpp and OpenVINO, on the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch

from benchmarks.peers.model_files import FORMATS, SHAPES, UNQUANTISED, ModelFiles
from benchmarks.peers.peer_libraries import LIBRARIES, PeerLibrary, PeerSubject
from benchmarks.peers.process import Peer, PeerError, check_python
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import ListOptions, PeerPython, list_option, names_of, numbers_of
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report
from benchmarks.reporting.turns import journal_of
from forerun.bench.contestants import Bench
from forerun.bench.disturbance import BUSY
from forerun.bench.journal import Journal
from forerun.bench.machine import Row
from forerun.bench.report import pivot
from forerun.bench.rounds import Contestant, Series, Tokens, measure
from forerun.cli.options import Out, OutputOptions, Resume, Rounds, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.decoding.recipes import build
from forerun.models.forward.architecture import STORED
from forerun.models.loading.load import load

FORERUN, LLAMA, OPENVINO = "forerun", "llama.cpp", "openvino"


@dataclass(frozen=True)
class PeersOptions(ListOptions, OutputOptions):
    """Forerun without drafts beside llama.cpp and OpenVINO, which read the same weights, in turns.

    llama.cpp is that of llama-cpp-python; it writes a file per format and reads it, as Forerun does. OpenVINO has
    bfloat16 only. For --peer-python, in another environment: CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
    openvino-genai safetensors. Prompts are random tokens. Writes JSON, Markdown and plots.
    """

    model: Annotated[
        str,
        option("--model", "-m", panel="Model", help=f"A model's folder, or of random weights: {', '.join(SHAPES)}."),
    ] = "qwen3-0.6b"
    formats: Annotated[str, list_option("Model", f"Of {', '.join(FORMATS)}.")] = ",".join(FORMATS)
    prompt_tokens: Annotated[str, list_option("Text", "Lengths of prompts.")] = "128"
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per prompt.", min=2)] = 48
    rounds: Rounds = 5
    peer_python: PeerPython = None
    files: Annotated[Path, option(panel="Output", help="Where the GGUF files are kept.")] = Path("runs/files")
    files_only: Annotated[bool, option("--files-only", panel="Output", help="Write the GGUF files; no speed.")] = False
    out: Out = Path("runs/peers")
    resume: Resume = False

    kinds, lengths = names_of("formats", FORMATS), numbers_of("prompt_tokens", int, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_python(self.peer_python)

    @property
    def python(self) -> str:
        return str(self.peer_python or sys.executable)

    @property
    def positions(self) -> int:
        return max(self.lengths) + self.max_new_tokens


def run(options: PeersOptions) -> None:
    plots.check()
    console, kinds = stderr(), options.kinds
    files = ModelFiles(options.model, options.files, options.python, console.print)
    made = {kind: files.find(kind) for kind in kinds}
    if options.files_only:
        return
    journal = journal_of(options, "peers", str(files.find(UNQUANTISED)), ", ".join(kinds), "cpu")
    title = f"{files.folder.name} in Forerun and other engines ({date.today().isoformat()})"
    report = Report.of(title, options, "peers", model=files.folder.name, peer_python=None, files=None)
    rows, said = list[Row](), dict[str, None]()
    for kind, file in made.items():
        with contestants(options, kind, file) as (found, notes), progress_bar(console, kind) as progress:
            said |= dict.fromkeys(notes)
            for some in measured(found, kind, options, journal, progress):
                rows += some
                add_tables(report, rows, [*said])
                report.save()
    report.end()


@contextmanager
def contestants(options: PeersOptions, kind: str, file: Path) -> Iterator[tuple[dict[str, Contestant], list[str]]]:
    """Yield the contestants over a file, and what the other engines say about themselves."""
    model, tokenizer = load(str(file), UNQUANTISED if kind == UNQUANTISED else STORED)
    model.generation_config.eos_token_id = None  # each output has the same length
    found, notes = {FORERUN: Bench(model, ["none"]).forerun(lambda setup: build("none", setup))}, list[str]()
    dtype = UNQUANTISED if kind == UNQUANTISED else "float16"
    given = {"threads": torch.get_num_threads(), "folder": str(file), "positions": options.positions, "dtype": dtype}
    with ExitStack() as stack:
        peers = {LLAMA: lambda: Peer("benchmarks.peers.llamacpp_python", given, options.python)}
        if kind == UNQUANTISED:
            subject = PeerSubject(model, tokenizer, file, options.positions)
            peers[OPENVINO] = lambda: openvino(subject, file.parent / "openvino", options.python)
        for name, make in peers.items():
            try:
                peer = stack.enter_context(make())
            except PeerError as error:
                notes.append(f"{name} is not measured: {error}")
                continue
            found[name] = peer.contestant()
            notes.append(peer.said)
        yield found, notes


def openvino(subject: PeerSubject, folder: Path, python: str) -> Peer:
    kind: PeerLibrary = next(kind for kind in LIBRARIES if OPENVINO in kind.variants)
    if missing := kind.missing(python):
        raise PeerError(f"not installed ({missing})")
    if not folder.is_dir():
        folder.mkdir()
        kind.prepare(subject, folder)
    options = {"folder": str(folder), "threads": torch.get_num_threads(), **kind.options(subject)}
    return Peer(kind.module, options, python)


def measured(
    found: Mapping[str, Contestant], kind: str, options: PeersOptions, journal: Journal,
    progress: Callable[[int, int], None],
) -> Iterator[list[Row]]:  # fmt: skip
    lengths = sorted(options.lengths)
    for done, length in enumerate(lengths):
        progress(done, len(lengths))
        rows = [[prompt(length)]]
        *_, series = measure(found, f"{kind}, {length}", rows, options.max_new_tokens, options.rounds, journal)
        yield [row_of(one, kind, length) for one in series]


def prompt(length: int) -> Tokens:
    """Return seeded random tokens that every vocabulary has."""
    return [int(token) for token in np.random.default_rng(0).integers(100, 4000, length)]


def row_of(one: Series, kind: str, length: int) -> Row:
    """Return the medians of a contestant's rounds over a prompt."""
    runs = [run for run in one.runs[0] if run.first is not None]
    first = median(run.first for run in runs if run.first is not None)
    speeds = sorted((run.tokens - 1) / (run.seconds - run.first) for run in runs if run.first is not None)
    return {
        "weights": kind, "prompt": length, "contestant": one.contestant, "tokens_per_second": median(speeds),
        "slowest": speeds[0], "fastest": speeds[-1], "first_token_ms": 1000 * first,
        "prompt_tokens_per_second": length / first, "others": max((run.others or 0.0 for run in runs), default=0.0),
    }  # fmt: skip


def add_tables(report: Report, rows: Sequence[Row], said: Sequence[str]) -> None:
    """Add the tables and plots of all rows so far; ``said`` is what the other engines say about themselves."""
    shortest = min(row["prompt"] for row in rows)
    decoding = [row for row in rows if row["prompt"] == shortest]
    notes = [f"{line}\n" for line in said]
    if (most := max(row["others"] for row in rows)) > BUSY:
        notes.append(f"**The machine was busy**: other processes used up to {most:.0%} of its processors' time.\n")
    heading = f"Decoding after {shortest:,} tokens, in tokens per second"
    report.add("decoding", heading, decoding, decoding_table(decoding), *notes)
    frame = Frame(heading, "weights", "tokens per second")
    report.bars("decoding", frame, *plots.grouped(decoding, lambda row: str(row["weights"]), "tokens_per_second"))
    named = [row | {"": f"{row['weights']}, {row['contestant']}", "at": f"{row['prompt']:,} tokens"} for row in rows]
    table = pivot(named, "", "at", lambda r: f"{r['prompt_tokens_per_second']:,.0f} ({r['first_token_ms']:,.0f} ms)")
    report.add("prompts", "Prefill in tokens per second, and the time to the first token", rows, table)
    if len({row["prompt"] for row in rows}) > 1:
        frame = Frame("Prefill", "prompt tokens", "tokens per second", log=True)
        report.lines("prompts", frame, plots.by(named, "", "prompt", "prompt_tokens_per_second"))


def decoding_table(rows: Sequence[Row]) -> str:
    """Format medians with the slowest and fastest round, and Forerun's ratio to llama.cpp."""
    speeds = {(row["weights"], row["contestant"]): row["tokens_per_second"] for row in rows}
    both = {kind: speeds[kind, FORERUN] / speed for (kind, name), speed in speeds.items() if name == LLAMA}
    ratios = [{"weights": kind, "contestant": f"{FORERUN} / {LLAMA}", "ratio": ratio} for kind, ratio in both.items()]
    return pivot([*rows, *ratios], "weights", "contestant", _cell)


def _cell(row: Row) -> str:
    if "ratio" in row:
        return f"{row['ratio']:.2f}"
    return f"{row['tokens_per_second']:.1f} ({row['slowest']:.1f} to {row['fastest']:.1f})"
