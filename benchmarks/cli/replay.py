"""``forerun replay``: measures drafts on recorded answers, without a model."""

from __future__ import annotations

import json

from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.replay import replay_files
from forerun.cli.options import ReplayOptions
from forerun.cli.terminal import stderr, stdout, working
from forerun.drafting.recipes import build_drafter


def run(options: ReplayOptions) -> None:
    """Replay, and print the figures."""
    if not options.tokenizer.is_file():
        raise ValueError(f"--tokenizer is {options.tokenizer}; there is no such file (a tokenizer.json)")
    tokenizer = Tokenizer.from_file(str(options.tokenizer))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    drafter = build_drafter(options.drafter)
    drafter.spell(tokenizer)
    with working(stderr(), f"replaying {options.file}"):
        summary = replay_files(options.file, encode, drafter, options.budget, options.warm or [])
    if options.json:
        print(json.dumps({"drafter": options.drafter, "budget": options.budget, **summary}))
        return
    table = Table(show_header=False, box=None)
    for name, value in summary.items():
        shown = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, shown)
    stdout().print(table)
