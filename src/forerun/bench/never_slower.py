"""Check whether a drafter is ever slower than plain decoding: over batches, contexts, temperatures and kinds of text.

Each cell of the table has several runs: other prompts, another seed. In each, prompts are prefilled once, and every
contestant continues from the same keys and values, so a drafter's prefill counts, but the target's does not dilute a
loss. A long prefill costs minutes, so prompts share prefixes, and runs may share prompts.

A process's first run of a cell is repeated untimed, to warm up. Plain decoding runs before and after every contestant,
because a shared machine may be twice as slow for a few seconds. If the two times differ, the contestant and the second
run are repeated a few times, and the steadiest attempt counts. The remaining difference is the error of a single ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import torch

from forerun.bench.journal import Journal, TurnKey
from forerun.bench.machine import Row, caption, footer, machine
from forerun.bench.report import BenchResult, figure
from forerun.bench.rounds import Rows, Tokens, rotated, sampling
from forerun.core.request import Request
from forerun.decoding.level import Level
from forerun.decoding.recipes import Setup
from forerun.engine.engine import Engine
from forerun.kv.full_cache import SAMPLED_QUERIES, FullCache

UNDRAFTED = "none"
STEADY = 1.05
"""Ratio of two plain runs up to which the run between them was undisturbed; below the 7 % that a run may lose."""
ATTEMPTS = 4
"""Maximum runs of a contestant until one is steady."""
TASKS, NOVEL, RANDOM = "tasks", "novel", "random"
TEXT_KINDS = (TASKS, NOVEL, RANDOM)
"""Prompts of tasks, a long text to continue, random tokens."""
DISTINCT_TOKENS = 32
"""Tokens of the long text before a task that occurs again, so that no two prompts, and thus outputs, are equal."""
LEAST_MEDIAN, LEAST_SINGLE, LEAST_OF_BEST = 0.97, 0.93, 0.95
"""The promise: least median of a cell, least single ratio, and least share of the best other drafter's median."""


@dataclass(frozen=True)
class TableCell:
    """One cell of the table."""

    batch: int
    context: int
    """Tokens of a prompt; a task's prompt may be longer."""
    temperature: float
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.context:,} tokens, batch {self.batch}, temperature {self.temperature:g}"


def cells(
    batches: Sequence[int], contexts: Sequence[int], temperatures: Sequence[float], kinds: Sequence[str]
) -> list[TableCell]:
    """Return all cells of the table; those that share prefixes are adjacent."""
    return [TableCell(b, c, t, k) for c, b, k, t in product(sorted(contexts), sorted(batches), kinds, temperatures)]


@dataclass(frozen=True)
class Material:
    """Token material for prompts: complete ``tasks``, a long ``text``, and a ``vocabulary`` to draw from. ``texts`` is
    the number of runs with different prompts; later ones repeat these in turn."""

    tasks: Sequence[Tokens]
    text: Tokens
    vocabulary: int
    texts: int

    def has(self, cell: TableCell) -> bool:
        """Return whether the text is long enough for distinct prompts of a cell."""
        if cell.kind == RANDOM:
            return True
        return len(self.text) >= cell.context + (cell.batch * self.texts if cell.kind == NOVEL else 0)

    def turns(self, alike: Sequence[TableCell], draws: int) -> Iterator[tuple[int, TableCell]]:
        """Yield all runs of cells of one context and batch; those that share prompts or prefixes are adjacent."""
        for text in range(self.texts):
            for _, of_kind in groupby(alike, lambda cell: cell.kind):
                yield from product(range(text, draws, self.texts), of_kind)

    def prompts(self, cell: TableCell, draw: int) -> list[Tokens]:
        """Return the prompts of a run, one per row."""
        make = {TASKS: self._task, NOVEL: self._part, RANDOM: self._random}[cell.kind]
        return [make(cell.context, draw % self.texts * cell.batch + row) for row in range(cell.batch)]

    def _task(self, context: int, number: int) -> Tokens:
        """Return a task's prompt after text that fills ``context`` tokens, or after some text if the task repeats."""
        prompt = self.tasks[number % len(self.tasks)]
        before = max(DISTINCT_TOKENS if number >= len(self.tasks) else 0, context - len(prompt))
        return [*self._part(context, number)[:before], *prompt]

    def _part(self, context: int, number: int) -> Tokens:
        """Return a part of the text; parts of successive numbers begin far apart."""
        golden = (5**0.5 - 1) / 2  # fractional parts of its multiples are evenly spread
        begin = int(number * golden % 1 * (len(self.text) - context + 1))
        return list(self.text[begin : begin + context])

    def _random(self, context: int, number: int) -> Tokens:
        return [int(token) for token in np.random.default_rng(number).integers(0, self.vocabulary, context)]


def measure(
    engine: Engine,
    drafters: Mapping[str, Callable[[Setup], Level]],
    material: Material,
    all_cells: Sequence[TableCell],
    draws: int,
    new_tokens: int,
    journal: Journal,
    on_draw: Callable[[int, int, str], None] = lambda done, total, now: None,
) -> Iterator[Row]:
    """Measure the cells and yield their rows, all of a context and batch at once. ``drafters`` are builders: the first
    must never be slower; they include ``UNDRAFTED``. Runs in ``journal`` are not measured again. ``on_draw`` is called
    before each run with runs done, runs to do, and the cell."""
    names, done = [name for name in drafters if name != UNDRAFTED], 0
    for build in drafters.values():  # so that prefill keeps the queries that sparse caches select by
        engine.set_drafter(build)
    prefills, warm = _Prefills(engine, new_tokens + engine.budget + 1), set[TableCell]()
    for _, alike in groupby(all_cells, lambda cell: (cell.context, cell.batch)):
        runs: dict[TableCell, list[dict[str, Row]]] = {cell: [] for cell in alike}
        for draw, cell in material.turns(list(runs), draws):
            on_draw(done, draws * len(all_cells), str(cell))
            prompts = material.prompts(cell, draw)
            key = TurnKey.of(str(cell), draw, prompts, new_tokens)
            run = journal.find(key, list(drafters))
            if run is None:
                run = _draw(engine, drafters, prefills.read(prompts), cell, draw, new_tokens, cell in warm)
                journal.add(key, run)
                warm.add(cell)
            runs[cell].append(run)
            done += 1
        for cell, known in runs.items():
            yield summarise(cell, names, known)


@dataclass(frozen=True)
class _Prefilled:
    """A prompt that is prefilled except for its last token; ``queries`` as in ``FullCache``."""

    prompt: Tokens
    cache: FullCache
    queries: Mapping[int, torch.Tensor]

    def rewind(self) -> FullCache:
        self.cache.truncate(len(self.prompt) - 1)
        self.cache.queries = dict(self.queries)
        return self.cache


class _Prefills:
    """Prefilled prompts; the next ones reuse shared prefixes. ``room`` is the number of tokens after a prompt."""

    def __init__(self, engine: Engine, room: int) -> None:
        self._engine, self._room = engine, room
        self._rows: list[_Prefilled] = []

    def read(self, prompts: Rows) -> list[_Prefilled]:
        """Prefill each prompt, reusing the caches of the previous prompts."""
        known, self._rows = self._rows[: len(prompts)], []
        for prompt in prompts:
            self._rows.append(self._read(prompt, known.pop(0) if known else None))
        return self._rows

    def _read(self, prompt: Tokens, before: _Prefilled | None) -> _Prefilled:
        if before is None:
            cache = self._engine.prefill(prompt, self._room)
            return _Prefilled(prompt, cache, cache.queries)
        if before.prompt == prompt:
            return before
        most = min(len(before.prompt), len(prompt) - 1, before.cache.length)
        alike = np.equal(before.prompt[:most], prompt[:most])
        same, block = most if alike.all() else int(alike.argmin()), self._engine.prefill_block
        kept = max(0, min(same, len(prompt) - 1 - SAMPLED_QUERIES))  # the rest yields enough queries
        before.cache.truncate(kept // block * block)
        cache = self._engine.prefill(prompt, self._room, cache=before.cache)
        return _Prefilled(prompt, cache, cache.queries)


def _draw(
    engine: Engine,
    drafters: Mapping[str, Callable[[Setup], Level]],
    prefilled: Sequence[_Prefilled],
    cell: TableCell,
    draw: int,
    new_tokens: int,
    warm: bool,
) -> dict[str, Row]:
    """Run each contestant between two plain runs of the same prompts, first once untimed unless ``warm``."""

    def run(name: str) -> Row:
        engine.set_drafter(drafters[name])
        caches = [each.rewind() for each in prefilled]
        requests: list[Request] = []
        for row, each in enumerate(prefilled):  # each row gets different noise
            noise = sampling(cell.temperature, draw * len(prefilled) + row)
            requests += engine.requests([each.prompt], max_new_tokens=new_tokens, **noise)
        for request in requests:
            request.eos_token_ids = frozenset()  # an output that ends at once measures nothing
        begin = time.perf_counter()
        for _ in engine.run(requests, caches=caches):
            pass
        seconds = time.perf_counter() - begin
        steps = sum(request.stats.steps for request in requests)
        return {
            "seconds": seconds,
            "steps": steps,
            "texts": [list(map(int, request.generated)) for request in requests],
        }

    first = [] if warm else [run(name) for name in drafters]
    others = [name for name in drafters if name != UNDRAFTED]
    plain = run(UNDRAFTED)
    texts, runs = plain["texts"], {UNDRAFTED: plain}
    every = [*first, plain]
    for name in rotated(others, draw):
        attempts: list[Row] = []
        while not attempts or (_unsteadiness(attempts[-1]) > STEADY and len(attempts) < ATTEMPTS):
            tried, after = run(name), run(UNDRAFTED)
            every += tried, after
            attempts.append(tried | {"plain": [plain["seconds"], after["seconds"]]})
            plain = after
        runs[name] = min(attempts, key=_unsteadiness)
    plain = runs[UNDRAFTED]
    plain["texts_differ"] = sum(each["texts"] != texts for each in every)  # including runs that do not count
    return runs


def _unsteadiness(run: Row) -> float:
    """Return the ratio, at least 1, of the plain runs before and after this one."""
    return float(max(run["plain"]) / min(run["plain"]))


def _ratio(run: Row) -> float:
    return float(sum(run["plain"]) / 2 / run["seconds"])


def summarise(cell: TableCell, names: Sequence[str], runs: Sequence[Mapping[str, Row]]) -> Row:
    """Summarise a cell: the first drafter's ratios to plain decoding, and the best other drafter's."""
    first = names[0]
    ratios = {name: [_ratio(run[name]) for run in runs] for name in names}
    medians = {name: median(values) for name, values in ratios.items()}
    best = max(medians, key=lambda name: medians[name])
    noise = [run[first]["plain"][0] / run[first]["plain"][1] for run in runs]
    steps = {name: sum(run[name]["steps"] for run in runs) for name in (UNDRAFTED, first)}
    return {
        "kind": cell.kind, "context": cell.context, "batch": cell.batch, "temperature": cell.temperature,
        "drafter": first,
        "median": round(medians[first], 3),
        "worst": round(min(ratios[first]), 3),
        "best_other": None if best == first else best,
        "of_best": round(medians[first] / medians[best], 3),
        "medians": {name: round(value, 3) for name, value in medians.items()},
        "tokens_per_step": round(steps[UNDRAFTED] / steps[first], 3),
        "plain_against_itself": [round(value, 3) for value in noise],
        "texts_differ": sum(run[UNDRAFTED]["texts_differ"] for run in runs),
    }  # fmt: skip


def broken(row: Row) -> list[str]:
    """List how a cell breaks the promise."""
    findings = (
        (row["median"] < LEAST_MEDIAN, f"median {row['median']:.2f} < {LEAST_MEDIAN}"),
        (row["worst"] < LEAST_SINGLE, f"worst {row['worst']:.2f} < {LEAST_SINGLE}"),
        (row["of_best"] < LEAST_OF_BEST, f"{row['of_best']:.2f} of {row['best_other']}, less than {LEAST_OF_BEST}"),
        (row["texts_differ"] > 0, f"{row['texts_differ']} texts differ"),
    )
    return [what for found, what in findings if found]


COLUMNS = ("cell", "median", "worst", "best other", "tokens per step", "plain against itself", "broken")


@dataclass(frozen=True)
class SlownessTable(BenchResult):
    """The table: measured cells, settings, and cells left out with the reason."""

    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Row:
        rows = [row | {"broken": broken(row)} for row in self.rows]
        return {"machine": machine(), "settings": self.settings, "rows": rows, "left_out": dict(self.left_out)}

    @property
    def markdown(self) -> str:
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(_line, self.rows)]
        noise = [value for row in self.rows for value in row["plain_against_itself"]]
        count = sum(bool(broken(row)) for row in self.rows)
        mean = geometric_mean([row["median"] for row in self.rows])
        notes = [
            f"`{self.rows[0]['drafter']}`: {mean:.2f}x of plain decoding, the mean of {len(self.rows)} cells. "
            f"Promised: no median under {LEAST_MEDIAN}, no single run under {LEAST_SINGLE}, no median under "
            f"{LEAST_OF_BEST} of the best other drafter's. {count} cells break it.",
            f"Plain decoding against itself: {min(noise):.2f} to {max(noise):.2f}; anything within is noise.",
            *(f"Left out: {cell}: {why}." for cell, why in self.left_out.items()),
        ]
        return "\n".join([*lines, "", *(f"{note}\n" for note in notes), footer(self.settings)])

    def plot(self, path: Path) -> None:
        """Draw each cell's median and worst ratio, and the best drafter's median, beside the goal for a single run."""
        names = [str(TableCell(row["batch"], row["context"], row["temperature"], row["kind"])) for row in self.rows]
        places = np.arange(len(self.rows))
        medians, worst = ([row[name] for row in self.rows] for name in ("median", "worst"))
        best = [max(row["medians"].values()) for row in self.rows]
        title, note = f"Speed of {self.rows[0]['drafter']} relative to plain decoding", caption(self.settings)
        with figure(path, title=title, note=note, figsize=(9, 1.6 + 0.26 * len(self.rows))) as (_, axis):
            axis.hlines(places, worst, medians, color="0.6", lw=1)
            axis.plot(best, places, "d", color="tab:orange", label="best drafter, median")
            axis.plot(worst, places, "|", color="black", label="worst run")
            axis.plot(medians, places, "o", color="tab:blue", ms=5, label=f"{self.rows[0]['drafter']}, median")
            axis.axvline(1, color="0.3", lw=0.8)
            axis.axvline(LEAST_SINGLE, color="tab:red", lw=0.8, ls=":", label=f"goal for a single run, {LEAST_SINGLE}")
            axis.set_xlim(left=0)
            axis.set_yticks(places, names, fontsize=8)
            axis.invert_yaxis()
            axis.set_xlabel("times as fast as plain decoding")
            axis.grid(axis="x", alpha=0.3)
            axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _line(row: Row) -> str:
    cell = TableCell(row["batch"], row["context"], row["temperature"], row["kind"])
    best = row["best_other"]
    noise = row["plain_against_itself"]
    values = (
        str(cell), f"{row['median']:.2f}x", f"{row['worst']:.2f}x",
        "-" if best is None else f"{best} {row['medians'][best]:.2f}x",
        f"{row['tokens_per_step']:.2f}", f"{min(noise):.2f} to {max(noise):.2f}", "; ".join(broken(row)) or "-",
    )  # fmt: skip
    return f"| {' | '.join(values)} |"
