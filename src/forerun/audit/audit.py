"""An audit of losslessness on a user's model: drafting, sampling and batching must change no token.

Each drafter gets four checks. Its greedy output equals that of ``transformers``' ``generate``, and that of Forerun
without drafts. Its sampled output equals plain sampling with that seed. Its output in a batch equals that of the prompt
alone. Rounding can excuse a difference (``forerun.audit.divergence``); if passes are bitwise exact, only from
``transformers``, which sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from forerun.audit.divergence import Divergence, first_difference, weigh
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.recipes import buildable, check_drafter
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.engine.engine import BUDGET, Engine
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.runtime import default_runtime, without_folder

Check = Literal["greedy", "plain", "coupled", "batch"]
Tokens = list[int]


@dataclass(frozen=True)
class Plan:
    """What to audit; by default all drafters that the settings can build, with full-length drafts even if they do not
    pay. ``seeds``: sampled outputs per prompt; 0 for none. ``kv_dtype`` is as in ``Engine``."""

    drafters: Sequence[str] = ()
    settings: LongContextConfig = field(default_factory=partial(LongContextConfig, paced=False))
    max_new_tokens: int = 64
    seeds: int = 1
    temperature: float = 1.0
    budget: int = BUDGET
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.drafters:
            object.__setattr__(self, "drafters", tuple(buildable(self.settings)))
        for name in self.drafters:
            check_drafter(name)
        if self.max_new_tokens < 1 or self.seeds < 0 or self.temperature <= 0:
            raise ValueError(f"{self} needs max_new_tokens of at least 1, seeds of at least 0, temperature above 0")


@dataclass(frozen=True)
class Comparison:
    """One output compared with its reference, at index ``prompt``. ``divergence`` is None if they are equal, which
    proves little with few accepted drafts. If ``strict``, rounding is no excuse."""

    check: Check
    drafter: str
    prompt: int
    seed: int | None
    tokens: int
    drafted: int
    accepted: int
    divergence: Divergence | None
    strict: bool = False

    @property
    def failed(self) -> bool:
        return self.divergence is not None and (self.strict or not self.divergence.rounding)


@dataclass(frozen=True)
class Report:
    """All comparisons of an audit, and how exact passes are (``Engine.exactness``)."""

    dtype: str
    comparisons: Sequence[Comparison]
    exactness: Exactness

    @property
    def divergences(self) -> list[Comparison]:
        """All comparisons whose outputs differ, for any reason."""
        return [comparison for comparison in self.comparisons if comparison.divergence is not None]

    @property
    def failures(self) -> list[Comparison]:
        """Comparisons whose outputs differ by more than rounding excuses."""
        return [comparison for comparison in self.comparisons if comparison.failed]

    @property
    def undrafted(self) -> list[Comparison]:
        """Comparisons without any draft: they prove nothing."""
        return [comparison for comparison in self.comparisons if not comparison.drafted]

    @property
    def never_drafted(self) -> list[str]:
        """The drafters that never drafted."""
        drafted = {comparison.drafter for comparison in self.comparisons if comparison.drafted} | {"none"}
        return list(dict.fromkeys(each.drafter for each in self.comparisons if each.drafter not in drafted))


def audit(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    plan: Plan | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Compare every drafter's outputs with their references; raise ValueError without prompts, or if one is too long.
    ``progress`` is called with runs done, runs to do, and a description of the current run."""
    plan = plan or Plan()
    if not prompts:
        raise ValueError("there is no prompt to audit with")
    jobs = _jobs(len(prompts), plan)
    comparisons: list[Comparison] = []
    bench = _AuditedRuns(model, prompts, plan)
    for done, (drafter, seed, rows) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), f"{drafter}, {'greedy' if seed is None else f'seed {seed}'}")
        comparisons += bench.compare(drafter, seed, rows)
    return Report(dtype_name(model), comparisons, bench.exactness)


def _jobs(prompts: int, plan: Plan) -> list[tuple[str, int | None, list[int]]]:
    """List drafter, seed and prompts of every run: each prompt alone, then all together."""
    runs = [*([i] for i in range(prompts)), list(range(prompts)) if prompts > 1 else [0, 0]]
    return [(drafter, seed, rows) for drafter in plan.drafters for seed in (None, *range(plan.seeds)) for rows in runs]


class _AuditedRuns:
    """Runs of all drafters against references, which are generated once."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Tokens], plan: Plan) -> None:
        self.model = model
        self.prompts = prompts
        self.plan = plan
        runtime = without_folder(default_runtime())
        self._plain = Engine(model, "none", kv_dtype=plan.kv_dtype, _runtime=runtime)
        self.exactness = self._plain.exactness
        self._references: dict[tuple[Check, int, int | None], Tokens] = {}
        self._alone: dict[tuple[str, int | None, int], Tokens] = {}
        self._engines = {
            name: Engine(
                model,
                name,
                settings=plan.settings,
                budget=plan.budget,
                prune_drafts=plan.settings.paced,
                kv_dtype=plan.kv_dtype,
                _runtime=runtime,
            )
            for name in plan.drafters
        }

    def compare(self, drafter: str, seed: int | None, rows: Sequence[int]) -> Iterator[Comparison]:
        """Generate for the prompts ``rows`` together, and compare each output with its reference."""
        batch = len(rows) > 1
        strict = self.exactness.level == "bitwise"
        checks: list[Check] = ["batch"] if batch else ["plain", "greedy"] if seed is None else ["coupled"]
        expected = [[self._expected(each, drafter, row, seed) for each in checks] for row in rows]
        requests, logits_by_text = self._generate(drafter, seed, rows, expected)
        for row, request, texts in zip(rows, requests, expected, strict=True):
            got, stats = request.generated.tolist(), request.stats
            counts = len(got), sum(stats.drafted), sum(stats.accepted)
            if not batch:
                self._alone[drafter, seed, row] = got
            for which, (check, text) in enumerate(zip(checks, texts, strict=True)):
                position = first_difference(text, got)
                logits = logits_by_text.get((request.id, which))
                weighed = None if position is None else self._weigh(request, text, position, logits)
                yield Comparison(check, drafter, row, seed, *counts, weighed, strict and check != "greedy")

    def _weigh(self, request: Request, text: Tokens, position: int, logits: torch.Tensor | None) -> Divergence:
        return weigh(self.model, request, text, position, logits, self._plain.target.kv_dtype)

    def _generate(
        self, drafter: str, seed: int | None, rows: Sequence[int], expected: Sequence[Sequence[Tokens]]
    ) -> tuple[Sequence[Request], dict[tuple[int, int], torch.Tensor]]:
        """Return finished requests, and by their ids the logits at the first difference from each expected output."""
        engine = self._engines[drafter]  # one engine for all prompts, so that it drafts from earlier outputs
        watch = _Watch(expected)
        with engine.level.planner.watched_by(watch):
            requests = engine.generate([self.prompts[row] for row in rows], **self._options(seed)).requests
        return requests, watch.seen

    def _expected(self, check: Check, drafter: str, row: int, seed: int | None) -> Tokens:
        if check == "batch":
            return self._alone[drafter, seed, row]
        key = (check, row, seed)
        if key not in self._references:
            make = self._by_transformers if check == "greedy" else self._without_drafts
            self._references[key] = make(self.prompts[row], seed)
        return self._references[key]

    def _without_drafts(self, prompt: Tokens, seed: int | None) -> Tokens:
        return self._plain.generate(prompt, **self._options(seed)).generated[0]

    def _by_transformers(self, prompt: Tokens, seed: int | None) -> Tokens:
        ids = torch.tensor([prompt], device=self.model.device)
        text = self.model.generate(ids, attention_mask=torch.ones_like(ids), **self._options(seed))
        return [int(token) for token in text[0, len(prompt) :].tolist()]

    def _options(self, seed: int | None) -> dict[str, Any]:
        greedy = {"do_sample": False, "max_new_tokens": self.plan.max_new_tokens}
        sampled = {"do_sample": True, "temperature": self.plan.temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
        return greedy if seed is None else {**greedy, **sampled}


class _Watch(Source):
    """A source that proposes nothing, and keeps the logits at the first difference from each expected output."""

    def __init__(self, expected: Sequence[Sequence[Tokens]]) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self._waiting = list(expected)

    def open(self, row: Row) -> Sequence[Tokens]:
        return self._waiting.pop(0)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [DraftTree.empty()] * len(rows)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            for which, text in enumerate(row.states[self]):
                if (row.request.id, which) not in self.seen:
                    self._look(row.request, outcome, which, text)

    def _look(self, request: Request, outcome: Outcome, which: int, text: Tokens) -> None:
        tokens = outcome.verdict.tokens
        start = len(request.generated) - len(tokens)
        i = first_difference(text[start : start + len(tokens)], tokens)
        nodes = [-1, *outcome.verdict.path]
        if i is not None and i < len(nodes):
            self.seen[request.id, which] = outcome.logits[nodes[i] + 1].clone()
