"""``python -m benchmarks models``: run the tests' tiny models, and write ``docs/results/models.md``.

What is tried with each is in ``tests/support/model_trials.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.reporting.study_report import listing
from forerun.bench.machine import machine
from forerun.cli.options import DebugOptions, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.models.heads.mtp import TRANSFORMERS_NAME

Row = dict[str, str]
REASON = re.compile(r"refused\[(.*?)\]")  # a trial that was refused, with why
TESTS = Path(__file__).parents[2] / "tests"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "models.md"
COLUMNS = {
    "type": "family", "shapes": "shapes tried beside the plain one", "path": "CPU", "gpu": "GPU", "float32": "float32",
    "bfloat16": "bfloat16", "trie": "trie", "draft model": "draft model", "store": "KV store", "offload": "offloading",
    "own": "its own drafter", "also": "tests",
}  # fmt: skip
TRIALS = ("float32", "bfloat16", "trie", "draft model", "store", "offload")
PATHS = ("program", "recurrent", "hooks", "refused")
"""Where models of one family take different paths, the first of these is shown."""
HEAD = """# Models, all results

Measured on {date} on {machine}, with transformers {transformers} and torch {torch}; the [short form](../models.md).
`python -m benchmarks models` writes this page: it runs each tiny random model of the tests.

- **family**: `model_type` in the `config.json` of the model, or of its text part.
- **CPU**: how a pass runs in float32 and bfloat16. `program` is one [program of kernels](../how-it-works.md#exact-bits)
  per pass, `hooks` is the model's own code with Forerun's kernels inside, `recurrent` adds [states that follow
  trees](../how-it-works.md#recurrent-layers).
- **GPU**: the path by the model's structure ([what ran](../how-it-works.md#on-a-gpu)).
- **float32**, **bfloat16**: what the [test of exactness](../how-it-works.md#exact-bits) finds.
- **trie**, **draft model**: whether greedy outputs of a batch of three prompts equal those of `transformers`'
  `generate`, all computed in float64, recurrences included. Drafts come from the trie, or from TriForce with a small
  model.
- **KV store**, **offloading**: output with stored keys and values, or with some off the device, against output
  without. `-` is not tried: too few layers, or no keys and values.
- **its own drafter**: a [trained head](../drafters.md#trained-heads) that comes with models of the family: MTP layers
  in their files, or an assistant.
- **tests**: what other tests cover: quantised GGUF weights (`stored`), and a model in two processes (`ranks`).

"""
REFUSED_HEAD = """
## What is refused

These are the words of the error when an engine is made.

"""
NOTES = """
The reasons for `refused`: {reasons}. Requests with pictures are refused.
"""


@dataclass(frozen=True)
class ModelsOptions(DebugOptions):
    """Run every tiny model of the tests, and write what each family does and what is refused; some five minutes."""

    out: Annotated[Path, option("--out", panel="Output", help="The page.")] = PAGE


def run(options: ModelsOptions) -> None:
    """Write the page. Engines use a fixed cost curve: times of models so small say nothing."""
    sys.path.append(str(TESTS))
    from support.fixed_runtime import fixed_runtime
    from support.model_trials import BITS, bits, look, refusals, texts, variants

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found, every = list[Row](), variants()
    with fixed_runtime(), progress_bar(stderr(), "models") as show:
        for done, variant in enumerate(every):
            show(done, len(every), variant.name)
            exactness = {name: bits(variant, dtype) for name, dtype in BITS.items()}
            found.append({"name": variant.name, **look(variant), **exactness, **texts(variant)})
    options.out.write_text(page(merged(found), refusals()), encoding="utf-8")


def merged(found: Sequence[Row]) -> list[Row]:
    """Return one row for each type. Its path is that of its plain shape, if there is one."""
    rows = []
    for kind in sorted({row["type"] for row in found}):
        shapes = [{**row, "shape": row["name"].partition(", ")[2]} for row in found if row["type"] == kind]
        shapes.sort(key=lambda row: row["shape"] != "")
        plain = [row for row in shapes if not row["shape"]] or shapes
        others = dict.fromkeys(row["shape"] for row in shapes if row["shape"])
        row = {"type": kind, "shapes": "; ".join(others), "own": own_drafter(kind), "also": _also(kind)}
        for name in ("path", "gpu"):
            row[name] = min((each[name] for each in plain), key=PATHS.index)
        for name in TRIALS:
            row[name] = _together([(each["shape"], each[name]) for each in shapes if each[name] != "-"])
        rows.append(row)
    return rows


def _together(results: Sequence[tuple[str, str]]) -> str:
    """Return a trial's result for all shapes; those that differ from the first are named."""
    if not results:
        return "-"
    first = results[0][1]
    others = dict.fromkeys(f"{shape or 'another size'}: {result}" for shape, result in results if result != first)
    return "; ".join([first, *others])


def own_drafter(kind: str) -> str:
    """Return the supported drafter that comes with models of a family."""
    from support.qwen_mtp import FAMILIES

    kind = kind.removesuffix("_text")
    with suppress(KeyError):  # a lazy mapping, whose ``get`` finds nothing
        if kind in FAMILIES or hasattr(CONFIG_MAPPING[kind], TRANSFORMERS_NAME):
            return "MTP"
    return "assistant" if kind.startswith("gemma4") else ""


def _also(kind: str) -> str:
    """Return what other tests cover for a family."""
    from support.gguf_hybrids import FAMILIES
    from test_as_stored import MIXTURES, NAMES
    from test_parallel import RECIPE_CASES

    stored = {*NAMES, *MIXTURES, *FAMILIES}
    return ", ".join(name for name, families in (("stored", stored), ("ranks", RECIPE_CASES)) if kind in families)


def page(rows: Sequence[Row], refused: Mapping[str, str]) -> str:
    reasons = sorted({why for row in rows for name in TRIALS for why in REASON.findall(row[name])})
    shown = [row | {name: REASON.sub("refused", row[name]) for name in TRIALS} for row in rows]
    here = machine()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    cores = f"{here['processor']}, {here['cores']} cores"
    head = HEAD.format(date=date.today().isoformat(), machine=cores, **versions)
    notes = NOTES.format(reasons="; ".join(f'"{why}"' for why in reasons))
    whys = [{"type": name, "why": why} for name, why in refused.items()]
    refusals = listing(whys, {"type": "family", "why": "why"})
    return head + listing(shown, COLUMNS) + notes + REFUSED_HEAD + refusals
