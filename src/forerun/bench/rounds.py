"""Contestants on the same prompts: in one process, in interleaved rounds, with medians and spread.

Every contestant continues every prompt, or batch of prompts, greedily. Their order rotates from round to round, so that
disturbances of the machine affect all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from forerun.bench.disturbance import LoadMeter
from forerun.bench.journal import Journal, TurnKey
from forerun.bench.machine import Row

BASELINE = "transformers greedy"
PLAIN = "forerun none"
"""Forerun without drafts: what every drafter's texts must equal."""
UNTIMED_TOKENS = 8
"""Tokens that each contestant generates untimed before its first round."""
Tokens = list[int]
Rows = Sequence[Tokens]
"""One prompt, or those of a batch."""
Decode = Callable[[Tokens], str]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a task, and further ones whose answers warm drafters have drafted before."""

    task: str
    prompts: Sequence[Tokens]
    warm_prompts: Sequence[Tokens]
    max_new_tokens: int


@dataclass(frozen=True)
class Run:
    """One generation.

    Attributes:
        texts: each row's new tokens; or its text, for contestants that give only text.
        seconds: from prompt to last token.
        passes: of the target, where reading the prompt counts as one; None if unknown.
        counted: number of tokens of all rows; by default those of ``texts``.
        cores: processor time of this process by ``seconds``; None if it was not measured.
        others: share of all processors' time that other processes took; None if it was not measured.
    """

    texts: Sequence[Tokens | str]
    seconds: float
    passes: int | None
    counted: int | None = None
    cores: float | None = None
    others: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(map(len, self.texts)) if self.counted is None else self.counted


@dataclass(frozen=True)
class Contestant:
    """A way to continue rows, and its preparation before each round (forget, learn), which is not timed."""

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
        """The same with each prompt's slowest and fastest round."""
        slow, fast = (sum(pick(run.seconds for run in rounds) for rounds in self.runs) for pick in (max, min))
        return self._tokens() / slow, self._tokens() / fast

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens of a row by forward passes of the target, including the prefill; None if passes are unknown."""
        passes = [rounds[0].passes for rounds in self.runs]
        known = [count for count in passes if count is not None]
        if len(known) < len(passes):
            return None
        return sum(rounds[0].tokens / len(rounds[0].texts) for rounds in self.runs) / sum(known)

    @property
    def cores(self) -> float | None:
        """Processor time by time, of all runs."""
        return self._weighted([(run.cores, run.seconds) for rounds in self.runs for run in rounds])

    @property
    def others(self) -> float | None:
        """The share of all processors' time that other processes took during all runs."""
        return self._weighted([(run.others, run.seconds) for rounds in self.runs for run in rounds])

    def _weighted(self, values: Sequence[tuple[float | None, float]]) -> float | None:
        known = [(value, seconds) for value, seconds in values if value is not None]
        total = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / total if total else None

    def same_texts(self, other: Series, decode: Decode = str) -> float:
        """The share of equal texts of all rounds: token for token, or as strings if only those are known."""
        pairs = zip(_texts(self.runs), _texts(other.runs), strict=True)
        same = [_same(mine, theirs, decode) for mine, theirs in pairs]
        return sum(same) / len(same)

    def _tokens(self) -> float:
        """Tokens of all prompts, each by its median round: a text that changes has a different number each time."""
        return sum(median(run.tokens for run in rounds) for rounds in self.runs)


def sampling(temperature: float, seed: int) -> Row:
    """The engine's arguments for greedy decoding, which is temperature 0, or for samples of the whole distribution."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}


def _texts(runs: Sequence[Sequence[Run]]) -> list[Tokens | str]:
    return [text for rounds in runs for run in rounds for text in run.texts]


def _same(mine: Tokens | str, theirs: Tokens | str, decode: Decode) -> bool:
    if isinstance(mine, list) and isinstance(theirs, list):
        return mine == theirs
    return (mine if isinstance(mine, str) else decode(mine)) == (theirs if isinstance(theirs, str) else decode(theirs))


def measure(
    contestants: Mapping[str, Contestant],
    task: str,
    groups: Sequence[Rows],
    max_new_tokens: int,
    rounds: int,
    journal: Journal | None = None,
    seen: Sequence[Tokens] = (),
) -> Iterator[list[Series]]:
    """Let all contestants continue all groups of rows, and yield what is measured so far after each round.

    Args:
        contestants: by name.
        task: the rows' task.
        groups: each is a prompt or a batch of prompts.
        max_new_tokens: per row.
        rounds: how often each contestant continues each group.
        journal: rounds in it are not measured again; new ones are added to it.
        seen: prompts that warm contestants have answered before, for the journal.

    Raises:
        ValueError: with the contestant that raised it.
    """
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
    """One run of each contestant, as plain values, in an order rotated by ``shift``."""
    names = list(contestants)
    shift %= len(names)
    rotated = names[shift:] + names[:shift]
    return {name: asdict(_run(name, contestants[name], rows, max_new_tokens)) for name in rotated}


def _run(name: str, contestant: Contestant, rows: Rows, max_new_tokens: int) -> Run:
    try:
        contestant.prepare()
        meter = LoadMeter()
        run = contestant.run(rows, max_new_tokens)
        load = meter.stop()
        return replace(run, cores=load.own, others=load.others)
    except ValueError as error:
        raise ValueError(f"contestant {name}: {error}") from error
