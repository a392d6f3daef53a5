"""From the turns of all contestants to rows: medians over rounds, ratios to plain decoding, texts that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from benchmarks.server.figures import medians
from benchmarks.server.load_bench import Round, absent, compare
from benchmarks.server.servers import LLAMA, TRANSFORMERS
from forerun.bench.journal import Turn
from forerun.bench.machine import Row
from forerun.bench.rounds import PLAIN

OF_PLAIN = {"of_plain": "tokens_per_second", "decoding_of_plain": "decoding_per_second"}
"""Figures that are compared with those of plain decoding, by the comparison's name."""


def load_rows(turns: Sequence[Turn], rounds: Sequence[Round]) -> list[Row]:
    """A row for each level and contestant that has answered it in any round."""
    found = []
    for level in rounds[0].levels:
        for name in _names(turns):
            measured = [turn for turn in turns if level.name in turn.get(name, {}).get("levels", {})]
            if not measured:
                continue
            middle = medians([turn[name]["levels"][level.name] for turn in measured])
            head = {"load": level.name, "kind": level.kind, "value": level.value, "contestant": name}
            ratios = {of: _of_plain(measured, level.name, name, figure) for of, figure in OF_PLAIN.items()}
            found.append(head | middle | ratios)
    return found


def long_rows(turns: Sequence[Turn]) -> list[Row]:
    """A row for each contestant that has read a long prompt."""
    found = []
    for name in _names(turns):
        measured = [row for row in _longs(turns, name) if "error" not in row]
        if measured:
            known = {each: [row[each] for row in measured if row[each] is not None] for each in measured[0]}
            found.append({"contestant": name} | {each: median(v) if v else None for each, v in known.items()})
    return found


def text_rows(turns: Sequence[Turn], rounds: Sequence[Round]) -> list[Row]:
    """How many texts were compared, and how many were the same: with each text alone, and with plain decoding's.

    ``exact`` says that they must be. Of other servers only greedy texts are compared.
    """
    found = []
    for name in _names(turns):
        mine = [turn[name] for turn in turns if "alone" in turn.get(name, {})]
        if mine:
            found.append(_summed(name, "each alone, without drafts", [results["alone"] for results in mine]))
        if name != PLAIN:
            pairs = [_beside(turn, one, name) for turn, one in zip(turns, rounds, strict=False)]
            beside = [row for row in pairs if row]
            found += [_summed(name, PLAIN, beside)] if beside else []
    return found


def wrong(rows: Sequence[Row]) -> list[str]:
    """What the rows of texts say is wrong: nothing, if the list is empty."""
    return [
        f"{row['contestant']}: {row['compared'] - row['same']} of {row['compared']} texts under load differ from "
        f"{row['with']}"
        for row in rows
        if row["exact"] and row["same"] < row["compared"]
    ]


def unanswered(turns: Sequence[Turn]) -> list[str]:
    """What Forerun's servers did not answer: nothing, if the list is empty."""
    counted = {name: sum(each.values()) for name, each in errors(turns).items()}
    told = [(name, f"{count} requests under load were not answered") for name, count in counted.items()]
    told += [(name, f"a long prompt was not answered: {why}") for name, why in refusals(turns).items()]
    return [f"{name}: {what}" for name, what in told if name not in (TRANSFORMERS, LLAMA)]


def absences(turns: Sequence[Turn]) -> dict[str, str]:
    """Why a contestant took no part."""
    return {name: why for turn in turns for name in turn if (why := absent(turn, name))}


def errors(turns: Sequence[Turn]) -> dict[str, dict[str, int]]:
    """How often each error came, by contestant."""
    found: dict[str, Counter[str]] = {}
    for turn in turns:
        for name, results in turn.items():
            found.setdefault(name, Counter()).update(results.get("reasons", {}))
    return {name: dict(counted) for name, counted in found.items() if counted}


def refusals(turns: Sequence[Turn]) -> dict[str, str]:
    """Why a contestant did not answer a long prompt, the last time."""
    return {name: row["error"] for name in _names(turns) for row in _longs(turns, name) if "error" in row}


def _longs(turns: Sequence[Turn], name: str) -> list[Row]:
    return [turn[name]["long"] for turn in turns if "long" in turn.get(name, {})]


def _names(turns: Sequence[Turn]) -> list[str]:
    """Contestants, those with plain decoding first."""
    names = {name for turn in turns for name in turn}
    return sorted(names, key=lambda name: (name == TRANSFORMERS, name != PLAIN, name))


def _of_plain(turns: Sequence[Turn], level: str, name: str, figure: str) -> float | None:
    """A figure beside plain decoding's of the same round: the median."""
    pairs = [(turn[name]["levels"][level], turn.get(PLAIN, {}).get("levels", {}).get(level)) for turn in turns]
    ratios = [mine[figure] / plain[figure] for mine, plain in pairs if plain and mine[figure] and plain[figure]]
    return median(ratios) if ratios else None


def _beside(turn: Turn, one: Round, name: str) -> Row | None:
    """A contestant's texts of a round beside those of plain decoding."""
    mine, plain = turn.get(name, {}).get("texts"), turn.get(PLAIN, {}).get("texts")
    if not mine or not plain:
        return None
    greedy = {str(request.seed) for request in one.requests if request.temperature == 0}
    ours = name not in (TRANSFORMERS, LLAMA)
    kept = mine if ours else {seed: digest for seed, digest in mine.items() if seed in greedy}
    exact = ours and all(turn[each].get("alone", {}).get("exact", False) for each in (name, PLAIN))
    return compare(kept, plain) | {"exact": exact}


def _summed(name: str, other: str, rows: Sequence[Row]) -> Row:
    total = {each: sum(row[each] for row in rows) for each in ("compared", "same")}
    return {"contestant": name, "with": other, **total, "exact": all(row["exact"] for row in rows)}
