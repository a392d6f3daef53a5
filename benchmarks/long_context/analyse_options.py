"""Options of ``python -m benchmarks long-context analyse``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.reporting.options import Text, check_yarn, list_option, names, numbers
from forerun.cli.options import _LONG, _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, LongOptions, Model, Trust
from forerun.cli.options import _option as option

Contexts = Annotated[str, list_option("--contexts", _TEXT, "Prompt tokens.")]
Temperatures = Annotated[str, list_option("--temperatures", _TEXT, "0 is greedy.")]
Yarn = Annotated[
    float | None,
    option("--yarn", panel=_MODEL, metavar="FACTOR", help="Factor on the model's positions, by YaRN."),
]
Prompts = Annotated[int, option("--prompts", panel=_TEXT, help="For each context.", min=1)]
Needles = Annotated[int, option("--needles", panel=_TEXT, help="Facts asked from one text.", min=1)]
CACHES = ("low-rank", "retrieval", "streaming", "h2o", "topk")
ANALYSE_PARTS = ("acceptance", "budgets", "chunks", "recovery", "trees", "divergence")


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
    parts: Annotated[str, list_option("--parts", _TEXT, f"Of {', '.join(ANALYSE_PARTS)}.")] = ",".join(ANALYSE_PARTS)
    text: Text = None
    contexts: Contexts = "2000,4000,16000"
    temperatures: Temperatures = "0,0.6,1.0"
    budgets: Annotated[str, list_option("--budgets", _LONG, "Of the sparse caches, to compare.")] = "64,256,1024,4096"
    chunks: Annotated[str, list_option("--chunks", _LONG, "Chunk sizes, to compare at --cache-budget.")] = (
        "1,2,4,8,16,32,64,128"
    )
    caches: Annotated[
        str, list_option("--caches", _LONG, f"To compare, of {', '.join(CACHES)}; h2o and topk are slow.")
    ] = ",".join(CACHES)
    nodes: Annotated[str, list_option("--nodes", _LONG, "Sizes of draft trees.")] = "4,8,16,32,64"
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
