"""Options of the commands that measure: ``forerun bench``, ``bench never-slower`` and ``demo``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from forerun.cli.options import (
    Colour,
    DrafterName,
    Drafters,
    KVDtype,
    LongOptions,
    MaxNewTokens,
    ModelOptions,
    Out,
    OutputOptions,
    Raw,
    Resume,
    Rounds,
    Skip,
    option,
)

BENCH_DRAFTERS = ("auto", "trie", "lookup")
TextKind = StrEnum("TextKind", "tasks novel random")
DemoKind = StrEnum("DemoKind", "rag code json maths prose")


@dataclass(frozen=True)
class BenchOptions(OutputOptions, LongOptions, ModelOptions):
    """Compare drafters with transformers' greedy decoding and prompt lookup, on any model and your own prompts.

    Contestants take turns in one process; results are medians, with the spread of the rounds. Plain Forerun (none)
    always takes part, and every drafter's output is compared with its output. The default drafters are auto, trie and
    lookup. Writes JSON, Markdown and, with matplotlib, a plot. Exit status 1 if an output differs although the model's
    passes are exact to the bit.
    """

    drafter: Drafters = None
    kv_dtype: KVDtype = "auto"
    prompts_file: Annotated[
        Path | None, option(panel="Text", help="JSON lines of {task, prompt} or {task, messages}; default: the demo's.")
    ] = None
    raw: Raw = False
    prompts: Annotated[int | None, option(panel="Text", help="Per task; default: all.", min=1)] = None
    warm_prompts: Annotated[int, option(panel="Text", help="Of the rest, answered before by a warm trie.", min=0)] = 20
    rounds: Rounds = 5
    max_new_tokens: MaxNewTokens = 160
    skip: Skip = None
    out: Out = Path("runs/bench")
    resume: Resume = False


@dataclass(frozen=True)
class NeverSlowerOptions(OutputOptions, LongOptions, ModelOptions):
    """Measure whether a drafter is ever slower than plain decoding, over batches, contexts, temperatures and texts.

    Each cell of the table is measured several times, with other prompts and seeds; --texts 1 prefills long prompts
    once. Exit status 1 if a median is under 0.97, a single run under 0.93, or a median under 0.95 of the best other
    drafter's. Plain decoding runs before and after each drafter; if the two differ, the drafter runs again. Writes
    JSON, Markdown and, with matplotlib, a plot.
    """

    drafter: DrafterName = "auto"
    against: Annotated[
        list[str] | None, option(panel="Model", help="Others to compare with; may be repeated; by default all.")
    ] = None
    yarn: Annotated[float | None, option(panel="Model", metavar="FACTOR", help="On the model's positions.")] = None
    batch: Annotated[
        list[int] | None, option(panel="Text", help="Rows; may be repeated. Default: 1, 4, 16.", min=1)
    ] = None
    context: Annotated[
        list[int] | None, option(panel="Text", help="Tokens of a prompt; may be repeated. Default: 100, 2000.", min=2)
    ] = None
    temperature: Annotated[
        list[float] | None,
        option("--temperature", "-t", panel="Text", help="0 is greedy; may be repeated. Default: 0, 0.8, 1.", min=0.0),
    ] = None
    kind: Annotated[
        list[TextKind] | None, option("--kind", "-k", panel="Text", help="May be repeated. Default: all.")
    ] = None
    prompts_file: Annotated[
        Path | None, option(panel="Text", help="The tasks: JSON lines as for forerun bench; default: the demo's.")
    ] = None
    text: Annotated[
        Path | None, option(panel="Text", help="The novel; default: the demo's prompts.", exists=True, dir_okay=False)
    ] = None
    raw: Raw = False
    draws: Annotated[int, option(panel="Text", help="Of each cell.", min=1)] = 5
    texts: Annotated[
        int | None, option(panel="Text", help="Prompts that the draws share in turn; default: one each.", min=1)
    ] = None
    max_new_tokens: MaxNewTokens = 64
    out: Out = Path("runs/never-slower")
    resume: Resume = False


@dataclass(frozen=True)
class DemoOptions(OutputOptions):
    """Decode one prompt of each kind without drafts and with ``auto``: equal outputs, timed side by side."""

    kind: Annotated[
        list[DemoKind] | None, option("--kind", "-k", panel="Text", help="May be repeated. Default: all.")
    ] = None
    max_new_tokens: Annotated[
        int | None, option("--max-new-tokens", "-n", panel="Text", help="Most tokens for each.", min=1)
    ] = None
    repeats: Annotated[int, option(panel="Text", help="Runs; the medians count.", min=1)] = 3
    warm: Annotated[
        bool,
        option("--warm", panel="Text", help="Draft from earlier runs, too; else each starts with an empty index."),
    ] = False
    color: Colour = None
