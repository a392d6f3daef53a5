"""Options of ``python -m benchmarks passes``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from benchmarks.reporting.options import names, numbers
from forerun.cli.options import _MODEL, _OUTPUT, _TEXT, Debug, Device, Dtype, Json, Model, Trust
from forerun.cli.options import _option as option

DTYPES = get_args(Dtype)


@dataclass(frozen=True)
class PassesOptions:
    """Time of passes over 1 to 64 tokens, compared with the model's own call and the machine's bandwidth.

    Also measures how fast prompts are read. All take turns in one process; medians count. Writes JSON, Markdown and a
    plot.
    """

    model: Model = "bundled"
    dtypes: Annotated[
        str,
        option("--dtypes", panel=_MODEL, help=f"Of {', '.join(DTYPES)}. Commas between.", metavar="LIST"),
    ] = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    passes: Annotated[
        str, option("--passes", panel=_TEXT, help="Tokens of the passes. Commas between.", metavar="LIST")
    ] = "1,2,4,8,16,32,64"
    context: Annotated[int, option("--context", panel=_TEXT, help="Tokens in the cache.", min=0)] = 512
    prompt_tokens: Annotated[
        str, option("--prompt-tokens", panel=_TEXT, help="Lengths of prompts to read, or 0.", metavar="LIST")
    ] = "512,2048"
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 7
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/passes")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        names("--dtypes", self.dtypes, DTYPES)
        numbers("--passes", self.passes, int, 1)
        numbers("--prompt-tokens", self.prompt_tokens, int, 0)
