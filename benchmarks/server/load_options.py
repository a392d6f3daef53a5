"""Options of ``python -m benchmarks server load``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.reporting.options import numbers
from forerun.cli.options import _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, Model, Trust
from forerun.cli.options import _option as option

TRANSFORMERS, DEFAULT = "transformers", "default"
_LOAD = "Load"


def _list(flag: str, panel: str, help: str) -> object:  # noqa: A002
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


@dataclass(frozen=True)
class ServingOptions:
    """Servers under load: forerun serve with and without drafts, and transformers serve with continuous batching.

    Each has a process of its own on a free port of this computer, one at a time; the clients are in this process. All
    answer the same requests; rounds take turns and medians count. Texts under load must equal the texts alone, or the
    exit status is 1. Writes JSON, Markdown and plots after each load.
    """

    model: Model = "bundled"
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    contestants: Annotated[
        str,
        _list("--contestants", _MODEL, f"Drafters of forerun serve, {DEFAULT} for its own, and {TRANSFORMERS}."),
    ] = f"none,{DEFAULT},{TRANSFORMERS}"
    concurrency: Annotated[str, _list("--concurrency", _LOAD, "Clients that wait for their answers; 0 for none.")] = (
        "1,4,16"
    )
    rates: Annotated[str, _list("--rates", _LOAD, "Requests per second that arrive by chance; 0 for none.")] = "4,16"
    requests: Annotated[int, option("--requests", panel=_LOAD, help="Of each load; four a client at least.", min=1)] = (
        32
    )
    long: Annotated[
        int, option("--long", panel=_LOAD, metavar="TOKENS", help="Read so long a prompt beside streams, too.", min=0)
    ] = 0
    rounds: Annotated[int, option("--rounds", panel=_LOAD, help="Times each is measured.", min=1)] = 3
    tasks: Annotated[str | None, _list("--tasks", _TEXT, "Those of tasks; default: all but copy.")] = None
    raw: Annotated[bool, option("--raw", panel=_TEXT, help="Leave the chat template out.")] = False
    books: Annotated[Path | None, option("--books", panel=_TEXT, help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option("--maths", panel=_TEXT, help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[
        Path | None, option("--code", panel=_TEXT, help="JSON lines of {prompt} with functions to complete.")
    ] = None
    lengths: Annotated[str, _list("--lengths", _TEXT, "Tokens of answers, at most; drawn for each request.")] = (
        "32,64,128"
    )
    temperature: Annotated[
        float, option("--temperature", "-t", panel=_TEXT, help="Of every second turn through the tasks.", min=0.0)
    ] = 0.8
    seed: Annotated[int, option("--seed", panel=_TEXT, help="Of what is drawn, and of the arrivals.")] = 0
    checks: Annotated[
        int, option("--checks", panel=_TEXT, help="Greedy texts of a round that are asked for alone, too.", min=0)
    ] = 8
    resume: Annotated[
        bool, option("--resume", panel=_OUTPUT, help="Keep the rounds that --out has; measure the others.")
    ] = False
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/serve")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        numbers("--lengths", self.lengths, int, 1)
        if not (self.clients or self.arrivals):
            raise ValueError("--concurrency and --rates are both 0; give a load")
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"--contestants is {self.contestants!r}; each may be there once")

    @property
    def clients(self) -> list[int]:
        """Of the closed loops."""
        return [each for each in numbers("--concurrency", self.concurrency, int, 0) if each]

    @property
    def arrivals(self) -> list[float]:
        """Rates of the open loops, in requests per second."""
        return [each for each in numbers("--rates", self.rates, float, 0.0) if each]

    @property
    def drafters(self) -> list[str]:
        """Names of contestants."""
        return [name.strip() for name in self.contestants.split(",")]
