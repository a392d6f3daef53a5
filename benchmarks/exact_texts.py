"""How many texts differ, bit for bit, between any drafter and none: the promise counted on real models.

    python -m benchmarks.exact_texts --model bundled --dtype bfloat16 --out runs/exact/bundled-bfloat16.jsonl

Every recipe, alone and in batches of ragged rows, greedy and at two temperatures, behind prompts of 5 to 6,000 tokens.
Each prompt or batch is written to --out as it is done, and not done again; what --out has must be of the same model,
lengths and sources. The last line printed is one JSON object of counts. Exit status 1 if a text differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forerun
from benchmarks.journal import Journal, Key, about
from forerun.core.long_context import LongContextConfig
from forerun.drafting.recipes import RECIPES, build_drafter, buildable
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, load, load_draft

SHORT, LONG = (5, 17, 40, 81, 133, 178, 260, 520), (1500, 6000)
"""Tokens of the prompts; behind long ones drafters for long contexts alone are tried."""
TEMPERATURES = (0.0, 0.6, 1.0)
BATCH = (5, 133, 40, 260)
FAR = ("triforce", "triforce-trie", "triforce-auto", "low-rank", "retrieval", "trie")


def main() -> None:
    """Count."""
    options = _options()
    model, tokenizer = load(options.model, options.dtype)
    draft = load_draft("bundled-draft", model, tokenizer) if options.model == BUNDLED else None
    corpus = _corpus(options.text)
    journal = _journal(options, corpus, str(model.device))
    text = [int(token) for token in tokenizer(corpus)["input_ids"]]
    settings = LongContextConfig(draft_model=draft, cache_budget=options.cache_budget, paced=False, gamma2=6)
    engine = Engine(model, "none", tokenizer=tokenizer)
    print(
        f"{options.model} in {options.dtype}: {engine.exactness.level} {engine.exactness.reason or ''}", file=sys.stderr
    )
    rows: list[dict[str, Any]] = []
    for name in buildable(settings):
        for (turn, *what), prompts, temperature in _cells(name, text, options):
            key = Key(name, turn, json.dumps(what))
            found = journal.find(key, [name])
            if found is None:
                texts = _texts(engine, name, settings, prompts, temperature, options.max_new_tokens)
                journal.add(key, found := {name: {"texts": texts}})
            rows += [{"drafter": name, **text} for text in found[name]["texts"]]
    summary = _summary(options, engine, rows)
    print(json.dumps(summary))
    sys.exit(1 if summary["different"] else 0)


def _journal(options: argparse.Namespace, corpus: str, device: str) -> Journal:
    """What --out has; it must be of the same models, texts and sources."""
    own = {"max_new_tokens": options.max_new_tokens, "cache_budget": options.cache_budget}
    own |= {"text": hashlib.sha256(corpus.encode()).hexdigest()[:16]}
    try:
        return Journal(options.out, about(options.model, options.dtype, device) | own, resume=True)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--text", type=Path, help="Where prompts are cut from; by default Python's own library.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--cache-budget", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=1, help="Of each length.")
    return parser.parse_args()


def _corpus(path: Path | None) -> str:
    return (
        path.read_text()
        if path
        else "\n".join(
            Path(json.__file__).parent.joinpath(f"{n}.py").read_text()
            for n in ("decoder", "encoder", "scanner", "__init__")
        )
    )


def _cells(
    name: str, text: Sequence[int], options: argparse.Namespace
) -> Iterator[tuple[tuple[Any, ...], list[list[int]], float]]:
    """Prompts, alone and in a batch, and temperatures, with a name for each."""
    lengths = (*SHORT, *(LONG if name in FAR else ()))
    for turn in range(options.prompts):
        for temperature in TEMPERATURES:
            for length in lengths:
                yield (turn, temperature, str(length)), [_cut(text, length, turn)], temperature
            yield (turn, temperature, "batch"), [_cut(text, length, turn) for length in BATCH], temperature


def _cut(text: Sequence[int], length: int, turn: int) -> list[int]:
    begin = (turn * 977) % max(1, len(text) - length)
    if len(text) < length:
        raise SystemExit(f"the text has {len(text)} tokens; {length} are needed (--text)")
    return list(text[begin : begin + length])


_plain: dict[tuple[Any, ...], list[int]] = {}


def _texts(
    engine: Engine, name: str, settings: LongContextConfig, prompts: list[list[int]], temperature: float, count: int
) -> list[dict[str, Any]]:
    """Each prompt's text with the drafter, in one batch, beside its text alone without one."""
    how: dict[str, Any] = {"max_new_tokens": count, "do_sample": temperature > 0}
    if temperature:
        how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": 7}
    expected = [_without(engine, prompt, temperature, how) for prompt in prompts]
    engine.set_drafter(build_drafter(name, settings))
    found = engine.generate(prompts, **how).requests
    return [
        {
            "equal": request.generated.tolist() == text,
            "drafted": sum(request.stats.drafted),
            "accepted": sum(request.stats.accepted),
        }
        for request, text in zip(found, expected, strict=True)
    ]


def _without(engine: Engine, prompt: list[int], temperature: float, how: dict[str, Any]) -> list[int]:
    key = (tuple(prompt), temperature)
    if key not in _plain:
        engine.set_drafter(build_drafter("none"))
        _plain[key] = engine.generate(prompt, **how).requests[0].generated.tolist()
    return _plain[key]


def _summary(options: argparse.Namespace, engine: Engine, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": options.model,
        "dtype": options.dtype,
        "exactness": engine.exactness.level,
        "forerun": forerun.__version__,
        "texts": len(rows),
        "different": sum(not row["equal"] for row in rows),
        "accepted": sum(row["accepted"] for row in rows),
        "drafted": sum(row["drafted"] for row in rows),
        "recipes": len({row["drafter"] for row in rows} & set(RECIPES)),
    }


if __name__ == "__main__":
    main()
