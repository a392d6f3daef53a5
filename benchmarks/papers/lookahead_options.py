"""Options of ``python -m benchmarks papers lookahead``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from benchmarks.reporting.options import names, numbers
from forerun.cli.options import _OUTPUT, _TEXT, AnyDtype, Debug, Device, Json, Model, Trust
from forerun.cli.options import _option as option

PARTS = ("methods", "updating", "capacity", "memory", "accuracy", "lengths", "passes", "warmup", "batches")
_LENGTHS = "Lengths and sizes"


@dataclass(frozen=True)
class Amounts:
    """How much is measured: the values of options that ``--quick`` makes small unless they are given."""

    prompts: int = 4
    warm_prompts: int = 20
    questions: int = 20
    rounds: int = 3
    max_new_tokens: int = 160
    decoding_lengths: str = "2,4,8,16,32,64,128"
    branch_lengths: str = "8,24"
    capacities: str = "64,256,1024,4096,16384"
    other_tokens: int = 200_000
    warm_counts: str = "0,1,2,5,10,20"
    batches: str = "1,2,4,8"
    contexts: str = "128,1024"


QUICK = Amounts(
    prompts=1,
    warm_prompts=2,
    questions=2,
    rounds=1,
    max_new_tokens=24,
    decoding_lengths="4,16",
    branch_lengths="8",
    capacities="64,1024",
    other_tokens=2000,
    warm_counts="0,2",
    batches="1,2",
    contexts="64",
)


def _list(flag: str, panel: str, help: str) -> object:  # noqa: A002
    return option(flag, panel=panel, help=f"{help} Commas between.", metavar="LIST")


def _amount(name: str, panel: str, help: str, *flags: str, **more: object) -> object:  # noqa: A002
    """An option of ``Amounts``; its help tells the value that it has if it is not given."""
    metavar = {"metavar": "LIST"} if isinstance(getattr(Amounts, name), str) else {}
    told = f"{help}{' Commas between;' if metavar else ''} default {getattr(Amounts, name)}."
    return option(f"--{name.replace('_', '-')}", *flags, panel=panel, help=told, **metavar, **more)


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
    tasks: Annotated[str | None, _list("--tasks", _TEXT, "Those of tasks; default: all.")] = None
    focus: Annotated[str, option("--focus", panel=_TEXT, help="The task of all parts but the first two.")] = "rag"
    raw: Annotated[bool, option("--raw", panel=_TEXT, help="Leave the chat template out.")] = False
    books: Annotated[Path | None, option("--books", panel=_TEXT, help="A folder of books not trained on.")] = None
    maths: Annotated[Path | None, option("--maths", panel=_TEXT, help="JSON lines of {prompt, answer}.")] = None
    code: Annotated[
        Path | None, option("--code", panel=_TEXT, help="JSON lines of {prompt} with functions to complete.")
    ] = None
    prompts: Annotated[int | None, _amount("prompts", _TEXT, "Per task;", min=1)] = None
    warm_prompts: Annotated[int | None, _amount("warm_prompts", _TEXT, "Answered before, per task;", min=0)] = None
    questions: Annotated[int | None, _amount("questions", _TEXT, "Of each kind, for accuracy;", min=1)] = None
    rounds: Annotated[int | None, _amount("rounds", _TEXT, "Times each is measured;", min=1)] = None
    max_new_tokens: Annotated[int | None, _amount("max_new_tokens", _TEXT, "Per text;", "-n", min=2)] = None
    decoding_length: Annotated[
        int, option("--decoding-length", panel=_LENGTHS, help="Drafted tokens of a step, in the paper's forms.", min=1)
    ] = 16
    branch_length: Annotated[
        int, option("--branch-length", panel=_LENGTHS, help="Tokens of a branch, context included.", min=2, max=256)
    ] = 12
    decoding_lengths: Annotated[str | None, _amount("decoding_lengths", _LENGTHS, "To compare.")] = None
    branch_lengths: Annotated[str | None, _amount("branch_lengths", _LENGTHS, "To compare.")] = None
    capacities: Annotated[str | None, _amount("capacities", _LENGTHS, "Of the trie, in KiB.")] = None
    other_tokens: Annotated[
        int | None, _amount("other_tokens", _LENGTHS, "Of code that a trie saw first, for its capacity;", min=0)
    ] = None
    warm_counts: Annotated[str | None, _amount("warm_counts", _LENGTHS, "Answers that a trie knows, at most all.")] = (
        None
    )
    batches: Annotated[str | None, _amount("batches", _LENGTHS, "Rows together.")] = None
    contexts: Annotated[str | None, _amount("contexts", _LENGTHS, "Tokens in the cache, for passes alone.")] = None
    quick: Annotated[
        bool, option("--quick", panel=_TEXT, help="The least of all that is not given: a look in a minute or two.")
    ] = False
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/lookahead")
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        names("--parts", self.parts, PARTS)
        amounts = self.amounts()
        numbers("--decoding-lengths", amounts.decoding_lengths, int, 1)
        if max(numbers("--branch-lengths", amounts.branch_lengths, int, 2)) > 256:
            raise ValueError(f"--branch-lengths is {self.branch_lengths!r}; none may exceed 256")
        least, most = 64, 1 << 26
        if max(numbers("--capacities", amounts.capacities, int, least)) > most:
            raise ValueError(f"--capacities is {self.capacities!r}; none may exceed {most:,} KiB")
        numbers("--batches", amounts.batches, int, 1)
        numbers("--contexts", amounts.contexts, int, 0)
        numbers("--warm-counts", amounts.warm_counts, int, 0)

    def amounts(self) -> Amounts:
        """What is given, and the default of the rest: with ``quick`` the smallest."""
        given = {each.name: getattr(self, each.name) for each in fields(Amounts)}
        known = {name: value for name, value in given.items() if value is not None}
        return replace(QUICK if self.quick else Amounts(), **known)
