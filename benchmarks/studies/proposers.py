"""Forerun's proposer for vLLM beside prompt lookup, replayed on recorded answers; no model and no vLLM is needed.

    python -m benchmarks proposers --tokenizer FILE --replay FILE[:author=A][:from=I][:to=J] ... [--tokens 8]

The loop is vLLM's with greedy decoding and one row: the longest beginning of the draft that follows the recorded answer
is accepted, and one token comes with it. Prints, for each file and proposer: tokens per step, the share of drafted
tokens that were accepted, tokens drafted a step, and microseconds of a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer

from benchmarks.reporting.common_options import numbers
from benchmarks.studies.replay import Recorded, Selection
from forerun.cli.options import DebugOptions
from forerun.integrations.vllm import ForerunProposer

LENGTH = 1 << 14
Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


def lookup(longest: int, shortest: int, tokens: int) -> Propose:
    """What followed the longest suffix of the row that occurred before, first, as vLLM does."""

    def propose(sampled: list[list[int]], lengths: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        text = rows[0, : lengths[0]]
        for size in range(min(longest, len(text) - 1), shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            (found,) = np.nonzero((windows == text[-size:]).all(1))
            if len(found):
                return [text[found[0] + size : found[0] + size + tokens].tolist()]
        return [[]]

    return propose


def forerun(tokens: int, **settings: object) -> Propose:
    """Forerun's, with the configuration that vLLM would hand over."""
    return ForerunProposer(
        SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=LENGTH, tokenizer="", enable_prompt_embeds=False, get_vocab_size=lambda: 1 << 20
            ),
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, data_parallel_rank=0),
            speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
            additional_config={"forerun": settings},
            use_v2_model_runner=False,
        )
    ).propose


def replay(rows: list[Recorded], propose: Propose) -> str:
    """One proposer over all rows, in a line."""
    steps = committed = drafted = accepted = 0
    seconds = 0.0
    text = np.zeros((1, LENGTH), np.int32)
    for row in rows:
        whole = row.prompt + row.answer
        end, came = len(row.prompt) + 1, 1
        text[0, : len(whole)] = whole
        while end < len(whole):
            started = time.perf_counter()
            (draft,) = propose([whole[end - came : end]], np.array([end]), text)
            seconds += time.perf_counter() - started
            right = next(
                (at for at, pair in enumerate(zip(draft, whole[end:], strict=False)) if pair[0] != pair[1]), len(draft)
            )
            right = min(right, len(whole) - end)
            came = min(right + 1, len(whole) - end)
            steps, committed, drafted, accepted = steps + 1, committed + came, drafted + len(draft), accepted + right
            end += came
    share = accepted / max(drafted, 1)
    return (
        f"{committed / steps:5.2f} tokens per step  {share:4.0%} accepted of {drafted / steps:5.2f} drafted a step"
        f"  {seconds / steps * 1e6:6.0f} us a call"
    )


@dataclass(frozen=True, kw_only=True)
class ProposersOptions(DebugOptions):
    """Forerun's proposer for vLLM beside prompt lookup, replayed on recorded answers."""

    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.")]
    recordings: Annotated[list[str], typer.Option("--replay", help="FILE[:author=A][:from=I][:to=J]; may be repeated.")]
    tokens: Annotated[int, typer.Option(help="Drafted a step.")] = 8
    least: Annotated[str, typer.Option(help="Least probabilities; commas between.")] = "0.1"


def run(options: ProposersOptions) -> None:
    """Print the table."""
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    for where in options.recordings:
        rows = Selection.parse(where).read(lambda text: tokenizer.encode(text).ids)
        print(where, len(rows), "rows")
        print("  ngram 5-5   ", replay(rows, lookup(5, 5, options.tokens)))
        print("  ngram 3-1   ", replay(rows, lookup(3, 1, options.tokens)))
        for least in numbers("--least", options.least, float, 0.0):
            print(f"  forerun {least:4} ", replay(rows, forerun(options.tokens, least_probability=least)))
