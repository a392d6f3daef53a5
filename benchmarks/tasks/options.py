"""Options of ``python -m benchmarks tasks``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.reporting.options import numbers
from forerun.cli.options import _DRAFTER, _MODEL, _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, Model, Trust
from forerun.cli.options import _option as option

_OTHERS = "Compared with"
DRAFTERS = ("none", "auto", "lookup", "jacobi", "trie")
"""Those that are measured unless others are named."""
FROM_TASKS = ("task", "books", "maths", "code")
"""Options that a file of prompts replaces."""
PROMPTS = 4
"""Default number of prompts per task."""


@dataclass(frozen=True)
class TaskOptions:
    """Compare Forerun's drafters with transformers' greedy, prompt lookup and assisted generation, on any model.

    Models with a chat template answer questions (maths, code, rag, summary, edit, table). Others continue texts
    (copy, json, rag, code, maths, prose). Contestants take turns in one process; medians count. Every drafter runs
    cold, the trie also warm. Writes JSON, Markdown and plots.
    """

    model: Model = "bundled"
    drafter: Annotated[
        list[str] | None,
        option("--drafter", "-d", panel=_MODEL, help=f"{_DRAFTER} May be repeated; default: {', '.join(DRAFTERS)}."),
    ] = None
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    task: Annotated[
        list[str] | None, option("--task", "-k", panel=_TEXT, help="One of those above; may be repeated; default: all.")
    ] = None
    prompts_file: Annotated[
        Path | None,
        option("--prompts-file", panel=_TEXT, help="JSON lines of {task, prompt} or {task, messages}, for --task."),
    ] = None
    raw: Annotated[bool, option("--raw", panel=_TEXT, help="Leave the chat template out.")] = False
    books: Annotated[Path | None, option("--books", panel=_TEXT, help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option("--maths", panel=_TEXT, help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[
        Path | None, option("--code", panel=_TEXT, help="JSON lines of {prompt} with functions to complete.")
    ] = None
    prompts: Annotated[
        int | None, option("--prompts", panel=_TEXT, help=f"Per task; default {PROMPTS}, or all of a file.", min=1)
    ] = None
    warm_prompts: Annotated[int, option("--warm-prompts", panel=_TEXT, help="Answered before when warm.", min=0)] = 20
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 5
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=1)] = 160
    batch: Annotated[
        str | None, option("--batch", panel=_TEXT, help="Measure batches of so many rows, too.", metavar="LIST")
    ] = None
    peers: Annotated[bool, option("--peers", panel=_OTHERS, help="openvino-genai and llama.cpp as well.")] = False
    gguf: Annotated[
        Path | None, option("--gguf", panel=_OTHERS, help="The GGUF file that the model came from, for the peers.")
    ] = None
    skip: Annotated[
        list[str] | None,
        option("--skip", panel=_OTHERS, help="A contestant, as the tables name it, to leave out; may be repeated."),
    ] = None
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/bench")
    resume: Annotated[
        bool, option("--resume", panel=_OUTPUT, help="Go on with the journal in --out: what is in it is not run again.")
    ] = False
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        if self.prompts_file is not None and (given := [f"--{name}" for name in FROM_TASKS if getattr(self, name)]):
            raise ValueError(f"--prompts-file has tasks of its own; leave out {', '.join(given)}")
        if self.gguf is not None and not self.peers:
            raise ValueError("--gguf is for the peers; add --peers")
        if self.gguf is not None and not self.gguf.is_file():
            raise ValueError(f"--gguf is {self.gguf}; there is no such file")
        self.batches()

    def batches(self) -> list[int]:
        """Batch sizes, ascending; empty if batches are not measured."""
        return [] if self.batch is None else sorted(set(numbers("--batch", self.batch, int, 2)))
