"""Options of ``python -m benchmarks offload``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from benchmarks.long_context.analyse_options import Contexts, Temperatures, Yarn
from benchmarks.reporting.options import Text, numbers
from forerun.cli.memory_options import MemoryOptions
from forerun.cli.options import _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, LongOptions, Model, Trust
from forerun.cli.options import _option as option


@dataclass(frozen=True)
class OffloadOptions(MemoryOptions, LongOptions):
    """Decoding with keys and values that are not on the device, compared with plain autoregression over the same ones.

    By default nothing of them stays but two layers, and on a CPU they come at a twentieth of the memory's bandwidth,
    which is measured. Each prompt is read once. Writes JSON, Markdown and a plot.
    """

    ALONE: ClassVar[tuple[str, ...]] = ("simulate_bandwidth",)

    model: Model = "bundled"
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    yarn: Yarn = None
    text: Text = None
    contexts: Contexts = "16000"
    temperatures: Temperatures = "0"
    drafters: Annotated[
        str, option("--drafters", panel=_MODEL, help="Names of recipes. Commas between.", metavar="LIST")
    ] = "trie,retrieval,triforce-trie,auto"
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=2)] = 64
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/offload")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        numbers("--contexts", self.contexts, int, 64)
        numbers("--temperatures", self.temperatures, float, 0.0)
        self.sizes()
