"""Options of ``forerun bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from forerun.cli.options import (
    _DRAFTER,
    _MODEL,
    _OUTPUT,
    _TEXT,
    AnyDtype,
    Debug,
    Device,
    Json,
    LongOptions,
    Model,
    Trust,
)
from forerun.cli.options import _option as option

BENCH_DRAFTERS = ("auto", "trie", "lookup")
"""Those that are measured unless others are named."""


@dataclass(frozen=True)
class BenchOptions(LongOptions):
    """Compare drafters with transformers' greedy decoding and prompt lookup, on any model and your own prompts.

    Contestants take turns in one process; medians count, and the spread of the rounds is shown. Plain Forerun (none) is
    always among them, and every drafter's text is compared with its text. Writes JSON, Markdown and, with matplotlib, a
    plot. Exit status 1 if a text differs although the model's passes are exact to the bit.
    """

    model: Model = "bundled"
    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter", "-d", panel=_MODEL, help=f"{_DRAFTER} May be repeated; default: {', '.join(BENCH_DRAFTERS)}."
        ),
    ] = None
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    prompts_file: Annotated[
        Path | None,
        option(
            "--prompts-file", panel=_TEXT, help="JSON lines of {task, prompt} or {task, messages}; default: the demo's."
        ),
    ] = None
    raw: Annotated[bool, option("--raw", panel=_TEXT, help="Leave the chat template out.")] = False
    prompts: Annotated[int | None, option("--prompts", panel=_TEXT, help="Per task; default: all.", min=1)] = None
    warm_prompts: Annotated[
        int, option("--warm-prompts", panel=_TEXT, help="Of the rest, answered before by a warm trie.", min=0)
    ] = 20
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 5
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=1)] = 160
    skip: Annotated[
        list[str] | None,
        option("--skip", panel=_OUTPUT, help="A contestant, as the tables name it, to leave out; may be repeated."),
    ] = None
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/bench")
    resume: Annotated[
        bool, option("--resume", panel=_OUTPUT, help="Go on with the journal in --out: what is in it is not run again.")
    ] = False
    json: Json = False
    debug: Debug = False
