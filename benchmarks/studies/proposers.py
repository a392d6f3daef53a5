"""``python -m benchmarks proposers``: Forerun's proposer for vLLM beside prompt lookup, on recorded answers.

Neither a model nor vLLM is needed. The loop is vLLM's, greedy, with one row: the longest prefix of the draft that
equals the recorded answer is accepted, and one token follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import numpy as np
import typer
from tokenizers import Tokenizer

from benchmarks.reporting.common_options import ListOptions, json_lines, list_option, numbers_of
from benchmarks.reporting.study_report import listing
from forerun.bench.machine import Row
from forerun.cli.options import DebugOptions
from forerun.integrations.vllm import ForerunProposer

LENGTH = 1 << 14
Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


def lookup(longest: int, shortest: int, tokens: int) -> Propose:
    """Return vLLM's prompt lookup: what followed the first earlier occurrence of the row's longest suffix."""

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
    """Return Forerun's proposer, with the configuration that vLLM hands over."""
    model = {"max_model_len": LENGTH, "tokenizer": "", "enable_prompt_embeds": False, "get_vocab_size": lambda: 1 << 20}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, data_parallel_rank=0),
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        additional_config={"forerun": settings}, use_v2_model_runner=False,
    )  # fmt: skip
    return ForerunProposer(config).propose


class Recorded(NamedTuple):
    """A prompt and its recorded answer, as tokens."""

    prompt: list[int]
    answer: list[int]


def read(file: Path, author: str | None, encode: Callable[[str], list[int]]) -> Iterator[Recorded]:
    """Yield the rows of JSON lines of {prompt, answer}, of one ``author`` if it is given; raise ValueError with the
    first wrong line."""
    for place, row in json_lines(file, "--replay"):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("prompt", "answer")):
            raise ValueError(f"{place} is no JSON object with 'prompt' and 'answer'")
        if author in (None, row.get("author")):
            yield Recorded(encode(row["prompt"]), encode(row["answer"]))


def replay(rows: list[Recorded], propose: Propose) -> Row:
    """Return a proposer's figures over all rows."""
    steps = committed = drafted = accepted = 0
    seconds = 0.0
    text = np.zeros((1, LENGTH), np.int32)
    for row in rows:
        tokens = row.prompt + row.answer
        end, came = len(row.prompt) + 1, 1
        text[0, : len(tokens)] = tokens
        while end < len(tokens):
            started = time.perf_counter()
            (draft,) = propose([tokens[end - came : end]], np.array([end]), text)
            seconds += time.perf_counter() - started
            equal = [mine == theirs for mine, theirs in zip(draft, tokens[end:], strict=False)]
            right = (*equal, False).index(False)
            came = min(right + 1, len(tokens) - end)
            steps, committed, drafted, accepted = steps + 1, committed + came, drafted + len(draft), accepted + right
            end += came
    if not steps:
        raise ValueError("no row has an answer of two tokens")
    figures = {"tokens_per_step": round(committed / steps, 2), "accepted": f"{accepted / max(drafted, 1):.0%}"}
    return figures | {"drafted": round(drafted / steps, 2), "call": round(seconds / steps * 1e6)}


COLUMNS = {"answers": "answers", "proposer": "proposer", "tokens_per_step": "tokens per step", "accepted": "accepted",
           "drafted": "of drafted per step", "call": "us a call"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProposersOptions(ListOptions, DebugOptions):
    """Forerun's proposer for vLLM beside prompt lookup, replayed on recorded answers."""

    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.")]
    recordings: Annotated[list[Path], typer.Option("--replay", help="JSON lines of {prompt, answer}; may be repeated.")]
    author: Annotated[str | None, typer.Option(help="Replay the rows that have this author.")] = None
    limit: Annotated[int | None, typer.Option(help="Rows of a file.", min=1)] = None
    tokens: Annotated[int, typer.Option(help="Drafted per step.", min=1)] = 8
    least: Annotated[str, list_option("Text", "Least probabilities.")] = "0.2,0.05,0"

    chances = numbers_of("least", float, 0.0)


def run(options: ProposersOptions) -> None:
    tokenizer, rows = Tokenizer.from_file(str(options.tokenizer)), list[Row]()
    for file in options.recordings:
        recorded = list(read(file, options.author, lambda text: tokenizer.encode(text).ids))[: options.limit]
        proposers = {f"ngram {size}-{least}": lookup(size, least, options.tokens) for size, least in ((5, 5), (3, 1))}
        for least in options.chances:
            proposers[f"forerun {least:g}"] = forerun(options.tokens, least_probability=least)
        for name, propose in proposers.items():
            rows.append({"answers": f"{file.name}, {len(recorded)} rows", "proposer": name} | replay(recorded, propose))
    print(listing(rows, COLUMNS), end="")
