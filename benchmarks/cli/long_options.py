"""Options of the commands that measure long contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from benchmarks.capacity.shapes import SHAPES
from forerun.cli.options import _LONG, _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, LongOptions, Model, Trust
from forerun.cli.options import _option as option

_SIMULATION = "Simulation"
N = TypeVar("N", int, float)

Text = Annotated[
    list[Path] | None,
    option(
        "--text", panel=_TEXT, help="A text file or a folder of .txt and .md files; may be repeated. Else invented."
    ),
]
Yarn = Annotated[
    float | None,
    option("--yarn", panel=_MODEL, metavar="FACTOR", help="So many times the model's positions, by YaRN."),
]
Prompts = Annotated[int, option("--prompts", panel=_TEXT, help="For each context.", min=1)]
Needles = Annotated[int, option("--needles", panel=_TEXT, help="Facts asked from one text.", min=1)]
TRIFORCE_PARTS = ("temperatures", "budgets", "contexts", "batches", "needles")
CACHES = ("low-rank", "retrieval", "streaming", "h2o", "topk")
ANALYSE_PARTS = ("acceptance", "budgets", "chunks", "recovery", "trees", "divergence")


def numbers(name: str, text: str, kind: Callable[[str], N], least: N) -> list[N]:
    """The numbers of a comma-separated list.

    Raises:
        ValueError: with the option's name, for anything else or a number below ``least``.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be numbers with commas between them") from None
    if min(found) < least:
        raise ValueError(f"{name} is {text!r}; no number may be below {least}")
    return found


def names(name: str, text: str, known: tuple[str, ...]) -> list[str]:
    """The names of a comma-separated list.

    Raises:
        ValueError: with the option's name, for an unknown name.
    """
    found = [part.strip() for part in text.split(",")]
    if unknown := [part for part in found if part not in known]:
        raise ValueError(f"{name} has {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return found


def plain(options: Any) -> dict[str, Any]:
    """Options as plain values, for JSON."""
    return {name: _plain(value) for name, value in asdict(options).items()}


def check_yarn(factor: float | None) -> None:
    """Refuse a factor that does not stretch.

    Raises:
        ValueError: if it is not above 1.
    """
    if factor is not None and not factor > 1:
        raise ValueError(f"--yarn is {factor:g}; it must be above 1")


def check_positions(length: int, more: int, limit: int | None) -> None:
    """Check that a model can take the longest text and what follows it, before anything is read.

    Raises:
        ValueError: if it cannot; says what to do.
    """
    if limit is not None and length + more > limit:
        raise ValueError(
            f"a context of {length:,} tokens and {more:,} that follow need {length + more:,} positions, and the model "
            f"has {limit:,}; give a shorter context, or --yarn {math.ceil((length + more) / limit)} if the model was "
            "not stretched yet"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _list(flag: str, panel: str, help: str) -> object:  # noqa: A002
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


Contexts = Annotated[str, _list("--contexts", _TEXT, "Prompt tokens.")]
Temperatures = Annotated[str, _list("--temperatures", _TEXT, "0 is greedy.")]


@dataclass(frozen=True)
class TriforceOptions(LongOptions):
    """Decoding after long prompts: TriForce and its baselines compared with plain autoregression over the same cache.

    Measures speed-up and acceptance rate by temperature, by context (with the limit set by measured costs) and in
    batches, and the needles that eviction alone loses. Each prompt is read once. Writes JSON, Markdown and plots.
    """

    model: Model = "bundled"
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    yarn: Yarn = None
    parts: Annotated[str, _list("--parts", _TEXT, f"Of {', '.join(TRIFORCE_PARTS)}.")] = ",".join(TRIFORCE_PARTS)
    text: Text = None
    contexts: Contexts = "4000,16000"
    temperatures: Temperatures = "0,0.2,0.4,0.6,0.8,1.0,1.2"
    drafters: Annotated[str | None, _list("--drafters", _MODEL, "Default: all that can be built.")] = None
    prompts: Prompts = 1
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=2)] = 128
    budgets: Annotated[str, _list("--budgets", _LONG, "Cache budgets, to compare.")] = "256,1024,4096"
    batches: Annotated[str, _list("--batches", _TEXT, "Rows that are decoded together.")] = "2,6,10"
    batch_context: Annotated[
        int | None,
        option("--batch-context", panel=_TEXT, help="Tokens of each row of a batch; by default the rows are ragged and "
               "share the longest context's.", min=16),
    ] = None  # fmt: skip
    batch_budgets: Annotated[str, _list("--batch-budgets", _LONG, "Cache budget of a row in a batch.")] = "256,1024"
    batch_temperatures: Annotated[str, _list("--batch-temperatures", _TEXT, "Of batches.")] = "0,0.6"
    needles: Needles = 10
    needle_tokens: Annotated[int, option("--needle-tokens", panel=_TEXT, help="Generated for each.", min=2)] = 48
    simulate_acceptance: Annotated[
        float | None,
        option("--simulate-acceptance", panel=_SIMULATION, help="Random weights; a sparse cache's drafts are accepted "
               "with this probability.", min=0, max=1),
    ] = None  # fmt: skip
    simulate_small_acceptance: Annotated[
        float, option("--simulate-small-acceptance", panel=_SIMULATION, help="The small model's drafts.", min=0, max=1)
    ] = 0.45
    shape: Annotated[
        str, option("--shape", panel=_SIMULATION, metavar="NAME|SIZES", help=f"{', '.join(SHAPES)}, or "
                    "layers,hidden,intermediate,heads,kv_heads,vocabulary.")
    ] = "llama-2-7b"  # fmt: skip
    draft_shape: Annotated[
        str, option("--draft-shape", panel=_SIMULATION, metavar="NAME|SIZES", help="Of the small model.")
    ] = "llama-68m"
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/triforce")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        wanted = names("--parts", self.parts, TRIFORCE_PARTS)
        check_yarn(self.yarn)
        numbers("--contexts", self.contexts, int, 16)
        numbers("--temperatures", self.temperatures, float, 0.0)
        numbers("--batches", self.batches, int, 1)
        numbers("--budgets", self.budgets, int, self.chunk)
        numbers("--batch-budgets", self.batch_budgets, int, self.chunk)
        numbers("--batch-temperatures", self.batch_temperatures, float, 0.0)
        if self.simulate_acceptance is not None:
            if self.yarn is not None:
                raise ValueError("--simulate-acceptance has positions enough; leave --yarn out")
            if "needles" in wanted and self.parts != ",".join(TRIFORCE_PARTS):
                raise ValueError("--parts has needles, which random weights cannot find; leave them out")
            if self.text is not None or self.model != "bundled" or self.draft_model is not None:
                raise ValueError("--simulate-acceptance has random weights and texts: give --shape and --draft-shape, "
                                 "not --model, --draft-model or --text")  # fmt: skip


@dataclass(frozen=True)
class AnalyseOptions(LongOptions):
    """How well a model predicts itself over sparse caches, and why: acceptance, divergence, attention, trees.

    At every position the sparse cache has read the true text. Writes JSON, Markdown and plots.
    """

    model: Model = "bundled"
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    yarn: Yarn = None
    parts: Annotated[str, _list("--parts", _TEXT, f"Of {', '.join(ANALYSE_PARTS)}.")] = ",".join(ANALYSE_PARTS)
    text: Text = None
    contexts: Contexts = "2000,4000,16000"
    temperatures: Temperatures = "0,0.6,1.0"
    budgets: Annotated[str, _list("--budgets", _LONG, "Of the sparse caches, to compare.")] = "64,256,1024,4096"
    chunks: Annotated[str, _list("--chunks", _LONG, "Chunk sizes, to compare at --cache-budget.")] = (
        "1,2,4,8,16,32,64,128"
    )
    caches: Annotated[str, _list("--caches", _LONG, f"To compare, of {', '.join(CACHES)}; h2o and topk are slow.")] = (
        ",".join(CACHES)
    )
    nodes: Annotated[str, _list("--nodes", _LONG, "Sizes of draft trees.")] = "4,8,16,32,64"
    prompts: Prompts = 1
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=2)] = 256
    needles: Needles = 10
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/analyse")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        names("--parts", self.parts, ANALYSE_PARTS)
        names("--caches", self.caches, CACHES)
        check_yarn(self.yarn)
        numbers("--contexts", self.contexts, int, 16)
        numbers("--temperatures", self.temperatures, float, 0.0)
        numbers("--budgets", self.budgets, int, self.chunk)
        numbers("--chunks", self.chunks, int, 1)
        numbers("--nodes", self.nodes, int, 1)
        if max(numbers("--chunks", self.chunks, int, 1)) > self.cache_budget:
            raise ValueError(f"--chunks is {self.chunks!r}; none may exceed --cache-budget, {self.cache_budget}")
