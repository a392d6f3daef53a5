"""Decoding with keys and values that are not on the device: speed, and the bytes that are moved for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch

from benchmarks.long_context.long_bench import PLAIN, LongBench, Prefilled, RequestMaker, Tokens
from benchmarks.long_context.rows import summarise
from benchmarks.reporting.plots import Frame, grouped
from benchmarks.reporting.study_report import Delivery, listing
from benchmarks.studies.memory_bandwidth import BufferReader
from forerun.bench.machine import Row
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.kv.offloaded import CopyEngine

SLOWER = 20
"""How many times slower the simulated link is than memory. An A100 reads its memory 62 times as fast as its host's
(2,000 GB/s, and 32 GB/s over PCIe 4.0); PCIe 6.0 would make that 16."""
TRIES = 5
"""How often the memory's bandwidth is measured; the median counts."""

READING = {
    "context": "tokens",
    "kv_bytes": "bytes of keys and values",
    "away_bytes": "not on the device",
    "written": "brought away",
    "of_least": "of the least",
    "fetched": "brought in for the first token",
    "seconds": "seconds",
}
SPEED = {
    "context": "tokens",
    "temperature": "temperature",
    "contestant": "drafter",
    "tokens_per_second": "tokens/s",
    "speed_up": "speed-up",
    "slowest": "slowest round",
    "fastest": "fastest round",
    "tokens_per_step": "tokens per step",
    "acceptance": "acceptance",
    "bytes_per_token": "bytes brought in a token",
    "link_share": "of the link's bandwidth",
    "same_output": "same text",
}


def slow_link(device: torch.device) -> float | None:
    """Bytes a second of a link that is to this machine's memory what a host's is to an accelerator's; measured. None
    where the link is a real one."""
    if device.type != "cpu":
        return None
    reader, found = BufferReader(device), []
    reader()
    for _ in range(TRIES):
        begin = time.perf_counter()
        reader()
        found.append(reader.nbytes / (time.perf_counter() - begin))
    return median(found) / SLOWER


class Traffic:
    """Bytes that each contestant's runs bring in.

    Args:
        copy_engine: of the engine.
        make: makes the requests.
    """

    def __init__(self, copy_engine: CopyEngine, make: RequestMaker) -> None:
        self._copy_engine, self._make = copy_engine, make
        self._begun: list[tuple[str, int]] = []

    def __call__(self, engine: Engine, tokens: Tokens, contestant: str) -> Request:
        """A ``RequestMaker``; it is called as a run begins."""
        self._begun.append((contestant, self._copy_engine.fetched))
        return self._make(engine, tokens, contestant)

    def fetched(self, contestant: str) -> float:
        """Bytes of one of its runs, in the median."""
        marks = [*self._begun, ("", self._copy_engine.fetched)]
        return median(after - before for (name, before), (_, after) in pairwise(marks) if name == contestant)


class OffloadBench:
    """Continues prompts with each drafter in turn.

    Args:
        drafters: names of recipes, compared with plain autoregression.
        settings: what they are built with.
        rounds: runs of each.
        delivery: of the report.
    """

    def __init__(self, drafters: Sequence[str], settings: LongContextConfig, rounds: int, delivery: Delivery) -> None:
        self._drafters, self._settings, self._rounds, self._delivery = drafters, settings, rounds, delivery
        self._read: list[Row] = []
        self._rows: list[Row] = []

    def take(self, engine: Engine, prompt: Prefilled) -> None:
        """Go on with a prompt in a cache of this engine; report what reading it has moved, if it was really read."""
        assert engine.tiers is not None
        self._engine, self._copy_engine, self._prompt = engine, engine.tiers.copy_engine, prompt
        if prompt.seconds is None:
            return
        taken, size = engine.tiers.taken, engine.target.kv.nbytes * prompt.held
        share = (taken["host"] + taken["file"]) / (engine.target.kv.nbytes * prompt.cache.capacity)
        away = round(size * share)
        self._read.append(
            {
                "context": len(prompt.tokens),
                "kv_bytes": size,
                "away_bytes": away,
                "written": self._copy_engine.written,
                "fetched": self._copy_engine.fetched,
                "of_least": round(self._copy_engine.written / max(1, away), 4),
                "seconds": prompt.seconds,
            }
        )
        self._delivery.report.add("reading", "Reading the prompt", self._read, listing(self._read, READING))
        self._delivery.save()

    def decode(self, temperature: float, make: RequestMaker) -> None:
        """Continue the prompt."""
        traffic = Traffic(self._copy_engine, make)
        bench = LongBench(self._engine, self._rounds)
        found = bench.run([[self._prompt]], self._drafters, self._settings, traffic)
        for row, series in zip(
            summarise(found, context=len(self._prompt.tokens), temperature=temperature), found, strict=True
        ):
            run = series.runs[0][0]
            row["bytes_per_token"] = round(traffic.fetched(series.contestant) / len(run.texts[0]))
            used = row["bytes_per_token"] * row["tokens_per_second"]
            row["link_share"] = (
                None if self._copy_engine.bandwidth is None else round(used / self._copy_engine.bandwidth, 3)
            )
            self._rows.append(row)
        self._delivery.report.add("speed", "Decoding", self._rows, listing(self._rows, SPEED))
        groups, lines = grouped([row for row in self._rows if row["contestant"] != PLAIN], _group, "speed_up")
        frame = Frame("Decoding with keys and values off the device", "", "times plain autoregression", reference=1)
        self._delivery.report.bars("speed", frame, groups, lines)
        self._delivery.save()


def _group(row: Row) -> str:
    return f"{row['context']:,} tokens, temperature {row['temperature']:g}"
