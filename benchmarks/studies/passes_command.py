"""``python -m benchmarks passes``: the time of a model's passes, as tables and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from benchmarks.reporting import plots
from benchmarks.reporting.common_options import names, numbers
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report, deliver, listing
from benchmarks.studies import passes
from benchmarks.studies.passes import MATMUL, MEMORY, PassSizes
from forerun.bench.machine import Row, plain_values
from forerun.cli.options import AnyTypeModelOptions, Dtype, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.models.forward.architecture import STORED
from forerun.models.loading.load import ACTIVATION_TYPES, load

DTYPES = get_args(Dtype)
TIMES = {
    "dtype": "dtype",
    "who": "by",
    "tokens": "tokens",
    "milliseconds": "ms",
    "fastest": "fastest",
    "slowest": "slowest",
}
PASSES = TIMES | {
    "ratio_to_one_token": "ratio to one token",
    "megabytes": "weights read, MB",
    "gigabytes_per_second": "GB/s",
    "share": "of the bandwidth",
    "gigaflops": "GFLOP/s",
    "peak": "of torch's matmul",
}
PROMPTS = TIMES | {"tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class PassesOptions(OutputOptions, AnyTypeModelOptions):
    """Time of passes over 1 to 64 tokens, compared with the model's own call and the machine's bandwidth.

    Also measures how fast prompts are read. All take turns in one process; medians count. Writes JSON, Markdown and a
    plot.
    """

    dtypes: Annotated[str, option(panel="Model", help=f"Of {', '.join(DTYPES)}. Commas between.", metavar="LIST")] = (
        "auto"
    )
    activations: Annotated[
        str, option(panel="Model", help="Of stored weights: auto, int8, float32. Commas between.", metavar="LIST")
    ] = "auto"
    passes: Annotated[str, option(panel="Text", help="Tokens of the passes. Commas between.", metavar="LIST")] = (
        "1,2,4,8,16,32,64"
    )
    context: Annotated[int, option(panel="Text", help="Tokens in the cache.", min=0)] = 512
    prompt_tokens: Annotated[str, option(panel="Text", help="Lengths of prompts to read, or 0.", metavar="LIST")] = (
        "512,2048"
    )
    rounds: Rounds = 7
    out: Out = Path("runs/passes")

    def __post_init__(self) -> None:
        names("--dtypes", self.dtypes, DTYPES)
        names("--activations", self.activations, ACTIVATION_TYPES)
        numbers("--passes", self.passes, int, 1)
        numbers("--prompt-tokens", self.prompt_tokens, int, 0)


def run(options: PassesOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot."""
    plots.check()
    console = stderr()
    some: dict[str, Any] = {"device": options.device, "trust_remote_code": options.trust_remote_code}
    types = names("--activations", options.activations, ACTIVATION_TYPES)
    models = [
        load(options.model, dtype, activations=activations, **some)[0]
        for dtype in dict.fromkeys(names("--dtypes", options.dtypes, DTYPES))
        for activations in (types if dtype == STORED else ["auto"])
    ]
    sizes = PassSizes(
        passes=sorted({1, *numbers("--passes", options.passes, int, 1)}),
        context=options.context,
        prompts=[length for length in sorted(numbers("--prompt-tokens", options.prompt_tokens, int, 0)) if length],
        rounds=options.rounds,
    )
    with progress_bar(console, "measuring") as progress:
        rows = passes.measure(models, sizes, progress=progress)
    report = Report("What passes cost", plain_values(options))
    add_passes(report, rows, options.context)
    deliver(report, options.out, "passes", options.json)


def add_passes(report: Report, rows: Sequence[Row], context: int) -> None:
    """All tables and plots.

    Args:
        report: takes them.
        rows: from ``benchmarks.studies.passes``.
        context: tokens in the cache.
    """
    read = next(row for row in rows if row["who"] == MEMORY)
    passes = [_shown(row) for row in rows if row["kind"] == "pass"]
    prompts = [_shown(row) for row in rows if row["kind"] == "prompt"]
    said = f"This machine reads {read['gigabytes_per_second']:.1f} GB/s, measured in the same rounds.\n"
    heading = f"Passes after {context:,} tokens"
    peaks = [row for row in rows if row["who"] == MATMUL]
    types = {row["dtype"]: "int8" if row["dtype"] == STORED else row["dtype"] for row in peaks}
    speeds = ", ".join(f"{row['gigaflops']:.0f} GFLOP/s in {types[row['dtype']]}" for row in peaks)
    multiplies = f"Torch multiplies matrices here at {speeds}.\n"
    report.add(
        "passes", heading, [*passes, read, *peaks], said, *([multiplies] if peaks else []), listing(passes, PASSES)
    )
    frame = Frame(heading, "tokens in the pass", "milliseconds", log=True)
    report.lines("times", frame, plots.by(passes, "line", "tokens", "milliseconds", ("fastest", "slowest")))
    if prompts:
        report.add("prompts", "Reading a prompt", prompts, listing(prompts, PROMPTS))


def _shown(row: Row) -> Row:
    more = {"line": f"{row['who']}, {row['dtype']}", "megabytes": round(row["bytes_read"] / 1e6, 1)}
    shares = {"share": row["share_of_bandwidth"], "peak": row["share_of_peak"]}
    return row | more | {name: None if share is None else f"{100 * share:.0f} %" for name, share in shares.items()}
