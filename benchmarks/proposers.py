"""Forerun's proposer for vLLM beside prompt lookup, replayed on recorded answers; no model and no vLLM is needed.

    python -m benchmarks.proposers --tokenizer FILE --replay FILE[:author=A][:from=I][:to=J] ... [--tokens 8]

The loop is vLLM's with greedy decoding and one row: the longest beginning of the draft that follows the recorded answer
is accepted, and one token comes with it. Prints, for each file and proposer: tokens a step, the share of drafted tokens
that were accepted, tokens drafted a step, and microseconds of a call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer

from benchmarks.replay import Recorded, Selection
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
        f"{committed / steps:5.2f} tokens a step  {share:4.0%} accepted of {drafted / steps:5.2f} drafted a step"
        f"  {seconds / steps * 1e6:6.0f} us a call"
    )


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--replay", required=True, action="append")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--least", type=float, nargs="*", default=[0.1])
    told = parser.parse_args()
    tokenizer = Tokenizer.from_file(told.tokenizer)
    for where in told.replay:
        rows = Selection.parse(where).read(lambda text: tokenizer.encode(text).ids)
        print(where, len(rows), "rows")
        print("  ngram 5-5   ", replay(rows, lookup(5, 5, told.tokens)))
        print("  ngram 3-1   ", replay(rows, lookup(3, 1, told.tokens)))
        for least in told.least:
            print(f"  forerun {least:4} ", replay(rows, forerun(told.tokens, least_probability=least)))


if __name__ == "__main__":
    main()
