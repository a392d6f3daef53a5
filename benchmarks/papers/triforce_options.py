"""Options of ``python -m benchmarks papers triforce``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.capacity.shapes import SHAPES
from benchmarks.long_context.analyse_options import Contexts, Needles, Prompts, Temperatures, Yarn
from benchmarks.reporting.options import Text, check_yarn, list_option, names, numbers
from forerun.cli.options import _LONG, _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, LongOptions, Model, Trust
from forerun.cli.options import _option as option

_SIMULATION = "Simulation"
TRIFORCE_PARTS = ("temperatures", "budgets", "contexts", "batches", "needles")


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
    parts: Annotated[str, list_option("--parts", _TEXT, f"Of {', '.join(TRIFORCE_PARTS)}.")] = ",".join(TRIFORCE_PARTS)
    text: Text = None
    contexts: Contexts = "4000,16000"
    temperatures: Temperatures = "0,0.2,0.4,0.6,0.8,1.0,1.2"
    drafters: Annotated[str | None, list_option("--drafters", _MODEL, "Default: all that can be built.")] = None
    prompts: Prompts = 1
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=2)] = 128
    budgets: Annotated[str, list_option("--budgets", _LONG, "Cache budgets, to compare.")] = "256,1024,4096"
    batches: Annotated[str, list_option("--batches", _TEXT, "Rows that are decoded together.")] = "2,6,10"
    batch_context: Annotated[
        int | None,
        option("--batch-context", panel=_TEXT, help="Tokens of each row of a batch; by default the rows are ragged and "
               "share the longest context's.", min=16),
    ] = None  # fmt: skip
    batch_budgets: Annotated[str, list_option("--batch-budgets", _LONG, "Cache budget of a row in a batch.")] = (
        "256,1024"
    )
    batch_temperatures: Annotated[str, list_option("--batch-temperatures", _TEXT, "Of batches.")] = "0,0.6"
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
