"""``python -m benchmarks exact-texts``: how many outputs differ, in any token, between any drafter and none.

Every recipe, alone and in batches of ragged rows, greedy and at two temperatures, after prompts of 5 to 6,000 tokens.
What --out has is not run again. The last line printed is one JSON object of counts. Exit status 1 if an output differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

import forerun
from forerun.bench.journal import Journal, TurnKey, about
from forerun.bench.machine import Row
from forerun.bench.rounds import sampling
from forerun.cli.options import DebugOptions, Model
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig
from forerun.core.stats import Stats
from forerun.decoding.recipes import RECIPES, buildable
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, load, load_draft

SHORT, LONG = (5, 17, 40, 81, 133, 178, 260, 520), (1500, 6000)
"""Tokens of the prompts; only drafters for long contexts run after the long ones."""
TEMPERATURES = (0.0, 0.6, 1.0)
BATCH = (5, 133, 40, 260)
SEED = 7
FAR = ("triforce", "triforce-trie", "triforce-auto", "low-rank", "retrieval", "trie")


@dataclass(frozen=True, kw_only=True)
class ExactTextsOptions(DebugOptions):
    """How many outputs differ, in any token, between any drafter and none."""

    out: Annotated[Path, typer.Option(help="JSON lines; what is in it is not run again.")]
    model: Model = BUNDLED
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], typer.Option(help="Of the weights.")] = "bfloat16"
    text: Annotated[Path | None, typer.Option(help="Where prompts are cut from; else Python's library.")] = None
    max_new_tokens: Annotated[int, typer.Option(help="Per text.")] = 32
    cache_budget: Annotated[int, typer.Option(help="Tokens in a sparse cache.")] = 64
    prompts: Annotated[int, typer.Option(help="Of each length.")] = 1


def run(options: ExactTextsOptions) -> None:
    model, tokenizer = load(options.model, options.dtype)
    draft = load_draft("bundled-draft", model, tokenizer) if options.model == BUNDLED else None
    names = ("decoder", "encoder", "scanner", "__init__")
    files = [options.text] if options.text else [Path(json.__file__).with_name(f"{name}.py") for name in names]
    corpus = "\n".join(file.read_text() for file in files)
    journal = _journal(options, corpus, str(model.device))
    text = [int(token) for token in tokenizer(corpus)["input_ids"]]
    settings = LongContextConfig(draft_model=draft, cache_budget=options.cache_budget, paced=False, gamma2=6)
    engine = Engine(model, "none", tokenizer=tokenizer)
    say(f"{options.model} in {options.dtype}: {engine.exactness.level} {engine.exactness.reason or ''}")

    @cache
    def plain(prompt: tuple[int, ...], temperature: float) -> list[int]:
        engine.set_drafter("none")
        [output], _ = _generated(engine, [list(prompt)], temperature, options)
        return output

    def outputs(name: str, prompts: list[list[int]], temperature: float) -> list[Row]:
        """Compare a batch's outputs with a drafter with those of each prompt alone without one."""
        expected = [plain(tuple(prompt), temperature) for prompt in prompts]
        engine.set_drafter(name, settings)
        found, stats = _generated(engine, prompts, temperature, options)
        return [
            {"equal": own == right, "drafted": sum(each.drafted), "accepted": sum(each.accepted)}
            for own, each, right in zip(found, stats, expected, strict=True)
        ]

    rows: list[Row] = []
    for name in buildable(settings):
        for (turn, *what), prompts, temperature in _cells(name, text, options):
            key = TurnKey(name, turn, json.dumps(what))
            known = journal.find(key, [name])
            if known is None:
                journal.add(key, known := {name: {"texts": outputs(name, prompts, temperature)}})
            rows += [{"drafter": name, **each} for each in known[name]["texts"]]
    summary = {
        "model": options.model, "dtype": options.dtype, "exactness": engine.exactness.level,
        "forerun": forerun.__version__, "texts": len(rows), "different": sum(not row["equal"] for row in rows),
        "accepted": sum(row["accepted"] for row in rows), "drafted": sum(row["drafted"] for row in rows),
        "recipes": len({row["drafter"] for row in rows} & set(RECIPES)),
    }  # fmt: skip
    print(json.dumps(summary))
    if summary["different"]:
        raise typer.Exit(1)


def _generated(
    engine: Engine, prompts: list[list[int]], temperature: float, options: ExactTextsOptions
) -> tuple[list[list[int]], list[Stats]]:
    result = engine.generate(prompts, max_new_tokens=options.max_new_tokens, **sampling(temperature, SEED))
    return [request.generated.tolist() for request in result.requests], result.stats


def _journal(options: ExactTextsOptions, corpus: str, device: str) -> Journal:
    """Open what --out has; raise ValueError if it is of another model, text or version."""
    own: Row = {"max_new_tokens": options.max_new_tokens, "cache_budget": options.cache_budget}
    own |= {"text": hashlib.sha256(corpus.encode()).hexdigest()[:16]}
    return Journal(options.out, about(options.model, options.dtype, device) | own, resume=True)


Cell = tuple[tuple[int, float, str], list[list[int]], float]


def _cells(name: str, text: Sequence[int], options: ExactTextsOptions) -> Iterator[Cell]:
    """Yield names, prompts, alone and in a batch, and temperatures."""
    for turn, temperature in product(range(options.prompts), TEMPERATURES):
        for length in (*SHORT, *(LONG if name in FAR else ())):
            yield (turn, temperature, str(length)), [_cut(text, length, turn)], temperature
        yield (turn, temperature, "batch"), [_cut(text, length, turn) for length in BATCH], temperature


def _cut(text: Sequence[int], length: int, turn: int) -> list[int]:
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} tokens; {length} are needed (--text)")
    begin = (turn * 977) % max(1, len(text) - length)
    return list(text[begin : begin + length])
