"""``python -m benchmarks replay``: measures drafts on recorded answers, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.papers.lookahead_trie import LookaheadTrieSource
from benchmarks.studies.replay import EagerTrie, Selection, replay
from forerun.cli.options import OutputOptions, option
from forerun.cli.terminal import stderr, stdout, working
from forerun.decoding.source import Source
from forerun.decoding.sources.lookup import Lookup
from forerun.decoding.sources.trie_source import TrieSource

SOURCES: dict[str, Callable[[], Source | None]] = {
    "none": lambda: None,
    "lookup": Lookup,
    "trie": EagerTrie,
    "lookahead-trie": LookaheadTrieSource,
}
"""What drafts without a model."""
KNOWN = f"What drafts: {', '.join(SOURCES)}."


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(OutputOptions):
    """Measure drafts without a model: how many tokens of recorded answers each step would have accepted.

    FILE has JSON lines of {prompt, answer, author}. :author=A:from=I:to=J after it selects rows I to J of author A.
    """

    file: Annotated[str, typer.Argument(metavar="FILE", help="What to replay.")]
    tokenizer: Annotated[Path, option(panel="Text", help="A tokenizer.json.")]
    drafter: Annotated[str, option("--drafter", "-d", panel="Model", help=KNOWN)] = "trie"
    budget: Annotated[int, option(panel="Model", help="Most drafted tokens per step.", min=1)] = 64
    warm: Annotated[list[str] | None, option(panel="Text", metavar="FILE", help="Seen before; may be repeated.")] = None

    def __post_init__(self) -> None:
        if self.drafter not in SOURCES:
            raise ValueError(f"--drafter is {self.drafter!r}; without a model known are {', '.join(SOURCES)}")


def run(options: ReplayOptions) -> None:
    """Replay, and print the figures."""
    if not options.tokenizer.is_file():
        raise ValueError(f"--tokenizer is {options.tokenizer}; there is no such file (a tokenizer.json)")
    tokenizer = Tokenizer.from_file(str(options.tokenizer))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    source = SOURCES[options.drafter]()
    if isinstance(source, TrieSource):
        source.trie.spell(tokenizer)
    warm = [row for each in options.warm or [] for row in Selection.parse(each).read(encode)]
    with working(stderr(), f"replaying {options.file}"):
        summary = replay(source, Selection.parse(options.file).read(encode), options.budget, warm).summary()
    if options.json:
        print(json.dumps({"drafter": options.drafter, "budget": options.budget, **summary}))
        return
    table = Table(show_header=False, box=None)
    for name, value in summary.items():
        shown = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, shown)
    stdout().print(table)
