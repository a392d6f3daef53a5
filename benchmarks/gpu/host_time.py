"""``python -m benchmarks gpu-host``: what a step on a GPU costs the host, measured without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.gpu.counting import LaunchCounter
from benchmarks.gpu.interpreter import host_code
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.cli.options import Out, OutputOptions, Rounds, option
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.work_clock import work_seconds
from forerun.engine.engine import Engine
from forerun.engine.result import Commit
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.runtime import Runtime
from forerun.policy.cost_curve import CostCurve
from forerun.trie.recycled import NO_ROWS

HOST_DRAFTERS = ("none", "trie", "auto", "retrieval", "triforce", "triforce-trie")
COLUMNS = {"drafter": "drafter", "rows": "rows", "microseconds": "microseconds a step", "kernels": "kernels a step",
           "copies": "copies to the device a step"}  # fmt: skip
PROMPT_TOKENS = 200


@dataclass(frozen=True)
class HostTimeOptions(OutputOptions):
    """The host's part of a step on a GPU: replays and kernels do nothing here, and outputs have no meaning.

    Counts launches and copies besides replays, and times steps. Writes JSON and Markdown.
    """

    layers: Annotated[int, option(panel="Model", help="Layers of the model.", min=1)] = 32
    tokens: Annotated[int, option(panel="Text", help="Tokens of a text.", min=2)] = 64
    rounds: Rounds = 7
    out: Out = Path("runs/gpu-host")


def run(options: HostTimeOptions) -> None:
    report = Report.of("The host's part of a step on a GPU", options, "gpu-host")
    with host_code():
        found = list(host_rows(options))
    report.add("host", "Steps", found, listing(found, COLUMNS))
    report.end()


def host_rows(options: HostTimeOptions) -> Iterator[Row]:
    """Measure steps with each drafter; call within ``host_code``."""
    shape = ModelShape(options.layers, 32, 32, 4, 2, 512)
    model, small = random_model(shape, torch.bfloat16), random_model(replace(shape, layers=2), torch.bfloat16)
    settings = LongContextConfig(small, cache_budget=64, chunk=8, gamma2=4, sparse="retrieval", paced=False)
    for drafter in HOST_DRAFTERS:
        engine = Engine(model, drafter, settings=settings, prune_drafts=drafter == "auto", _runtime=host_runtime())
        for rows in (1, 8):
            yield {"drafter": drafter, "rows": rows} | _steps(engine, rows, options)


def host_runtime() -> Runtime:
    """Return a runtime that measures and checks nothing, as the results of passes have no meaning."""
    return Runtime(
        work_seconds, lambda scorer: CostCurve.linear(24), lambda *_: Exactness("bitwise"), lambda *_: None,
        static_lists=lambda scorer: NO_ROWS,
    )  # fmt: skip


def _steps(engine: Engine, rows: int, options: HostTimeOptions) -> Row:
    texts = np.random.default_rng(0).integers(0, 512, (rows, PROMPT_TOKENS)).tolist()
    seconds = []
    for _ in range(options.rounds + 1):
        requests = engine.requests(texts, max_new_tokens=options.tokens, eos_token_id=None)
        seconds.append(_timed(engine.run(requests), lambda: None) / _steps_of(requests))
    requests = engine.requests(texts, max_new_tokens=options.tokens, eos_token_id=None)
    with LaunchCounter() as counter:
        _timed(engine.run(requests), counter.clear)
    kernels, copies = (count / _steps_of(requests) for count in (counter.kernels.total(), counter.copies))
    return {"microseconds": 1e6 * statistics.median(seconds[1:]), "kernels": kernels, "copies": copies}


def _timed(commits: Iterator[Commit], begin: Callable[[], None]) -> float:
    """Return the thread's processor seconds of all steps but the first, a prefill; call ``begin`` after it."""
    next(commits)
    begin()
    began = time.thread_time()  # on a busy machine others have the core at times
    for _ in commits:
        pass
    return time.thread_time() - began


def _steps_of(requests: Sequence[Request]) -> int:
    return max(1, *(request.stats.steps - 1 for request in requests))
