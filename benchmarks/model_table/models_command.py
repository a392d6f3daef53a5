"""``python -m benchmarks models``: run the tests' tiny models, and write ``docs/results/models.md``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers

from benchmarks.model_table.page import PAGE, Row, merged, page
from benchmarks.model_table.trials import BITS, Variant, bits, look, refusals, texts, variants
from forerun.cli.options import DebugOptions, option
from forerun.cli.terminal import progress_bar, stderr


@dataclass(frozen=True)
class ModelsOptions(DebugOptions):
    """Run every tiny model of the tests, and write what each family does and what is refused; some five minutes."""

    out: Annotated[Path, option("--out", panel="Output", help="The page.")] = PAGE


def run(options: ModelsOptions) -> None:
    """Write the page. Engines draft by a fixed cost curve, since times of models so small say nothing."""
    from support.fixed_runtime import fixed_runtime  # of the tests, which ``trials`` puts into the path

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found, every = [], variants()
    with fixed_runtime(), progress_bar(stderr(), "models") as show:
        for done, variant in enumerate(every):
            show(done, len(every), variant.name)
            found.append(tried(variant))
    options.out.write_text(page(merged(found), refusals()), encoding="utf-8")


def tried(variant: Variant) -> Row:
    """All of one variant."""
    return {
        "name": variant.name,
        **look(variant),
        **{name: bits(variant, dtype) for name, dtype in BITS.items()},
        **texts(variant),
    }
