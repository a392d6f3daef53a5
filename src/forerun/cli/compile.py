"""``forerun compile``: compile ahead what the first request would wait for."""

from __future__ import annotations

import time
from dataclasses import replace

from forerun.cli.compile_options import CompileOptions
from forerun.cli.models import load_target
from forerun.cli.terminal import progress_bar, say, stderr, working
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, quiet
from forerun.trie.compilation import Compilation, compiled_before

BUNDLED_DTYPES = ("float32", "bfloat16")

PROMPT_TOKENS = 300
"""More than one block of keys, so that attention over several is compiled."""


def run(options: CompileOptions) -> None:
    """Compile the trie in other processes, and a model's passes in this one."""
    began = time.perf_counter()
    trie = None if compiled_before() else Compilation()
    both = options.model == BUNDLED and options.dtype == "auto"
    with quiet():
        for dtype in BUNDLED_DTYPES if both else (options.dtype,):
            _compile_passes(replace(options, dtype=dtype))  # type: ignore[arg-type]
    if trie is not None:
        with progress_bar(stderr(), "compiling the trie") as bar:
            trie.wait(bar)
    say(f"compiled in {time.perf_counter() - began:.0f} s")


def _compile_passes(options: CompileOptions) -> None:
    """Generate a few tokens for several prompts, greedy and sampled."""
    model, tokenizer = load_target(options)
    with working(stderr(), f"compiling the passes of {options.model} ({options.dtype})"):
        engine = Engine(model, "lookup", tokenizer=tokenizer, kv_dtype=options.kv_dtype)
        prompts = [[1 + i % 7 for i in range(length)] for length in (PROMPT_TOKENS, 8)]
        engine.generate(prompts, max_new_tokens=8)
        engine.generate(prompts, max_new_tokens=8, do_sample=True, top_p=0.9, top_k=20, seed=0)
