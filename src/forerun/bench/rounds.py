"""Measure contestants on the same prompts, in interleaved rounds in one process, with medians and spread.

Every contestant continues every prompt, or batch, greedily. Their order rotates, so that disturbances affect all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TypeVar

from forerun.bench.disturbance import LoadMeter
from forerun.bench.journal import Journal, TurnKey
from forerun.bench.machine import Row

BASELINE = "transformers greedy"
PLAIN = "forerun none"
"""Forerun without drafts: every drafter's output must equal its output."""
UNTIMED_TOKENS = 8
"""Untimed tokens per contestant before its first round."""
Tokens = list[int]
Rows = Sequence[Tokens]
"""One prompt, or those of a batch."""
Decode = Callable[[Tokens], str]
Item = TypeVar("Item")


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a task, and others whose answers warm drafters have indexed."""

    task: str
    prompts: Sequence[Tokens]
    warm_prompts: Sequence[Tokens]
    max_new_tokens: int


@dataclass(frozen=True)
class Run:
    """One generation."""

    texts: Sequence[Tokens | str]  # each row's new tokens, or characters if the contestant returns only those
    seconds: float
    passes: int | None  # of the target, counting prefill as one; None if unknown
    counted: int | None = None  # tokens of all rows; by default those of ``texts``
    cores: float | None = None  # as ``others``, see ``Load``; None if not measured
    others: float | None = None
    first: float | None = None  # seconds until the first token; None if unknown

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts)) if self.counted is None else self.counted


@dataclass(frozen=True)
class Contestant:
    """A way to continue rows, and its untimed preparation before each round (clear, index)."""

    run: Callable[[Rows, int], Run]
    prepare: Callable[[], None] = lambda: None


@dataclass
class Series:
    """One contestant's runs on one task, ``runs[prompt][round]``."""

    contestant: str
    task: str
    runs: list[list[Run]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """All tokens, divided by the sum of each prompt's median time."""
        return self._tokens() / sum(median(run.seconds for run in rounds) for rounds in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per second of each prompt's slowest and fastest round."""
        slow, fast = (sum(pick(run.seconds for run in rounds) for rounds in self.runs) for pick in (max, min))
        return self._tokens() / slow, self._tokens() / fast

    @property
    def tokens_per_step(self) -> float | None:
        """A row's tokens per forward pass of the target, including prefill; None if passes are unknown."""
        passes = [rounds[0].passes for rounds in self.runs]
        known = [count for count in passes if count is not None]
        if len(known) < len(passes):
            return None
        return sum(rounds[0].tokens / len(rounds[0].texts) for rounds in self.runs) / sum(known)

    @property
    def first_token(self) -> float | None:
        """Mean over prompts of the median seconds until the first token; None if unknown."""
        known = [[run.first for run in rounds if run.first is not None] for rounds in self.runs]
        return sum(map(median, known)) / len(known) if all(known) else None

    @property
    def cores(self) -> float | None:
        """Mean number of cores used."""
        return self._weighted([(run.cores, run.seconds) for rounds in self.runs for run in rounds])

    @property
    def others(self) -> float | None:
        """Share of processor time that other processes used."""
        return self._weighted([(run.others, run.seconds) for rounds in self.runs for run in rounds])

    def _weighted(self, values: Sequence[tuple[float | None, float]]) -> float | None:
        known = [(value, seconds) for value, seconds in values if value is not None]
        total = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / total if total else None

    def same_texts(self, other: Series, decode: Decode = str) -> float:
        """Return the share of equal outputs of all rounds: by token, or by characters if only those are known."""
        pairs = zip(_texts(self.runs), _texts(other.runs), strict=True)
        same = [_same(mine, theirs, decode) for mine, theirs in pairs]
        return sum(same) / len(same)

    def _tokens(self) -> float:
        """Count tokens of all prompts, each by its median round, as an output that changes varies in length."""
        return sum(median(run.tokens for run in rounds) for rounds in self.runs)


def sampling(temperature: float, seed: int) -> Row:
    """Return the engine's arguments for greedy decoding (temperature 0), or sampling from the full distribution."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}


def _texts(runs: Sequence[Sequence[Run]]) -> list[Tokens | str]:
    return [text for rounds in runs for run in rounds for text in run.texts]


def _same(mine: Tokens | str, theirs: Tokens | str, decode: Decode) -> bool:
    if isinstance(mine, list) and isinstance(theirs, list):
        return mine == theirs
    return (mine if isinstance(mine, str) else decode(mine)) == (theirs if isinstance(theirs, str) else decode(theirs))


def rotated(items: list[Item], shift: int) -> list[Item]:
    """Return the items in an order that differs from turn to turn, so that disturbances of the machine affect all."""
    shift %= len(items)
    return items[shift:] + items[:shift]


def measure(
    contestants: Mapping[str, Contestant],
    task: str,
    groups: Sequence[Rows],
    max_new_tokens: int,
    rounds: int,
    journal: Journal | None = None,
    seen: Sequence[Tokens] = (),
) -> Iterator[list[Series]]:
    """Continue all groups of rows, each a prompt or a batch, with all contestants; yield all results so far after each
    round. Rounds in ``journal`` are not measured again; new ones are added. ``seen``: prompts that warm contestants
    have answered before. Raise ValueError, which names the contestant that raised it."""
    series = {name: Series(name, task, [[] for _ in groups]) for name in contestants}
    warm = False
    for turn in range(rounds):
        for i, rows in enumerate(groups):
            key = TurnKey.of(task, turn, rows, max_new_tokens, seen)
            runs = None if journal is None else journal.find(key, list(contestants))
            if runs is None:
                if not warm:
                    _warm_up(contestants, rows, max_new_tokens)
                    warm = True
                runs = _turn(contestants, turn + i, rows, max_new_tokens)
                if journal is not None:
                    journal.add(key, runs)
            for name, run in runs.items():
                series[name].runs[i].append(Run(**run))
        yield list(series.values())


def _warm_up(contestants: Mapping[str, Contestant], rows: Rows, max_new_tokens: int) -> None:
    for name, contestant in contestants.items():
        _run(name, contestant, rows, min(UNTIMED_TOKENS, max_new_tokens))


def _turn(contestants: Mapping[str, Contestant], shift: int, rows: Rows, max_new_tokens: int) -> dict[str, Row]:
    """Run each contestant once, in an order rotated by ``shift``; return plain values."""
    names = rotated(list(contestants), shift)
    return {name: asdict(_run(name, contestants[name], rows, max_new_tokens)) for name in names}


def _run(name: str, contestant: Contestant, rows: Rows, max_new_tokens: int) -> Run:
    try:
        contestant.prepare()
        meter = LoadMeter()
        run = contestant.run(rows, max_new_tokens)
        load = meter.stop()
        return replace(run, cores=load.own, others=load.others)
    except ValueError as error:
        raise ValueError(f"contestant {name}: {error}") from error
