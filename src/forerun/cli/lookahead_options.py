"""Options of ``forerun bench lookahead``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from forerun.cli.long_options import names, numbers
from forerun.cli.options import _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, Model, Trust
from forerun.cli.options import _option as option

PARTS = ("methods", "updating", "capacity", "memory", "accuracy", "lengths", "passes", "warmup", "batches")
_LENGTHS = "Lengths and sizes"
QUICK: dict[str, int | str] = {
    "prompts": 1,
    "warm_prompts": 2,
    "questions": 2,
    "rounds": 1,
    "max_new_tokens": 24,
    "decoding_lengths": "4,16",
    "branch_lengths": "8",
    "capacities": "64,1024",
    "other_tokens": 2000,
    "warm_counts": "0,2",
    "batches": "1,2",
    "contexts": "64",
}
"""The values of ``--quick``."""


def _list(flag: str, panel: str, help: str) -> object:  # noqa: A002
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


@dataclass(frozen=True)
class LookaheadOptions:
    """The Lookahead paper's tables 2 to 6 and 12 and figures 1 and 4 to 7, on any model and this machine.

    Parts: methods by task, compared with transformers; the effect of updating the trie; its capacity; peak memory;
    accuracy in bfloat16; decoding and branch lengths; passes; warm-up; batches. Greedy; contestants take turns in one
    process; medians count. Writes JSON, Markdown and plots after each part.
    """

    model: Model = "bundled"
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    parts: Annotated[str, _list("--parts", _TEXT, f"Of {', '.join(PARTS)}.")] = ",".join(PARTS)
    tasks: Annotated[str | None, _list("--tasks", _TEXT, "Those of forerun bench; default: all.")] = None
    focus: Annotated[str, option("--focus", panel=_TEXT, help="The task of all parts but the first two.")] = "rag"
    raw: Annotated[bool, option("--raw", panel=_TEXT, help="Leave the chat template out.")] = False
    books: Annotated[Path | None, option("--books", panel=_TEXT, help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option("--maths", panel=_TEXT, help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[
        Path | None, option("--code", panel=_TEXT, help="JSON lines of {prompt} with functions to complete.")
    ] = None
    prompts: Annotated[int, option("--prompts", panel=_TEXT, help="Per task.", min=1)] = 4
    warm_prompts: Annotated[int, option("--warm-prompts", panel=_TEXT, help="Answered before, per task.", min=0)] = 20
    questions: Annotated[int, option("--questions", panel=_TEXT, help="Of each kind, for accuracy.", min=1)] = 20
    rounds: Annotated[int, option("--rounds", panel=_TEXT, help="Times each is measured.", min=1)] = 3
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=2)] = 160
    decoding_length: Annotated[
        int, option("--decoding-length", panel=_LENGTHS, help="Drafted tokens of a step, in the paper's forms.", min=1)
    ] = 16
    branch_length: Annotated[
        int, option("--branch-length", panel=_LENGTHS, help="Tokens of a branch, context included.", min=2, max=256)
    ] = 12
    decoding_lengths: Annotated[str, _list("--decoding-lengths", _LENGTHS, "To compare.")] = "2,4,8,16,32,64,128"
    branch_lengths: Annotated[str, _list("--branch-lengths", _LENGTHS, "To compare.")] = "8,24"
    capacities: Annotated[str, _list("--capacities", _LENGTHS, "Of the trie, in KiB.")] = "64,256,1024,4096,16384"
    other_tokens: Annotated[
        int, option("--other-tokens", panel=_LENGTHS, help="Of code that a trie saw first, for its capacity.", min=0)
    ] = 200_000
    warm_counts: Annotated[str, _list("--warm-counts", _LENGTHS, "Answers that a trie knows, at most all.")] = (
        "0,1,2,5,10,20"
    )
    batches: Annotated[str, _list("--batches", _LENGTHS, "Rows together.")] = "1,2,4,8"
    contexts: Annotated[str, _list("--contexts", _LENGTHS, "Tokens in the cache, for passes alone.")] = "128,1024"
    quick: Annotated[
        bool, option("--quick", panel=_TEXT, help="The least of all that is not given: a look in a minute or two.")
    ] = False
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/lookahead")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        names("--parts", self.parts, PARTS)
        numbers("--decoding-lengths", self.decoding_lengths, int, 1)
        if max(numbers("--branch-lengths", self.branch_lengths, int, 2)) > 256:
            raise ValueError(f"--branch-lengths is {self.branch_lengths!r}; none may exceed 256")
        least, most = 64, 1 << 26
        if max(numbers("--capacities", self.capacities, int, least)) > most:
            raise ValueError(f"--capacities is {self.capacities!r}; none may exceed {most:,} KiB")
        numbers("--batches", self.batches, int, 1)
        numbers("--contexts", self.contexts, int, 0)
        numbers("--warm-counts", self.warm_counts, int, 0)

    def chosen(self) -> LookaheadOptions:
        """The options; with ``quick``, those not given take the smallest values."""
        if not self.quick:
            return self
        return replace(self, **{n: value for n, value in QUICK.items() if getattr(self, n) == _default(n)})  # type: ignore[arg-type]


def _default(name: str) -> object:
    return next(field.default for field in fields(LookaheadOptions) if field.name == name)
