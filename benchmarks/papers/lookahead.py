"""Measures the Lookahead paper's tables 2 to 6 and 12 and its figures 1 and 4 to 7: what each part runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.papers import lookahead_report as tables
from benchmarks.papers import sweeps
from benchmarks.papers.graded_questions import Exam, grade
from benchmarks.papers.lookahead_methods import Known, Lengths, default, llma, methods, plain, published
from benchmarks.papers.pass_grid import pass_rows
from benchmarks.papers.peak_memory import peaks, why_not
from benchmarks.papers.sweeps import Labelled
from benchmarks.papers.timed_trie import Times
from benchmarks.papers.variants import VariantBench
from benchmarks.reporting.study_report import Delivery
from benchmarks.tasks.task_bench import PADDED, in_batches
from forerun.bench.machine import Row
from forerun.bench.report import summarise
from forerun.bench.rounds import PLAIN, Decode, PromptSet, Tokens, measure
from forerun.cli.terminal import say

LEAST_PASSES = 9
"""The least rounds of single passes: they are short, so one disturbed pass must not matter."""


@dataclass(frozen=True)
class LookaheadSizes:
    """How much is measured. Sequences are ascending.

    Attributes:
        prompts: per task, except for batches.
        warm_prompts: of each task, whose answers a warm trie knows.
        questions: of each kind, for accuracy.
        rounds: turns of each contestant.
        max_new_tokens: per text.
        decoding_lengths, branch_lengths: to compare.
        capacities: of a trie, in KiB.
        other_tokens: of code that a trie saw first, for its capacity.
        warm_counts: answers that a warm trie knows.
        batches: batch sizes.
        contexts: tokens in each row's cache, where single passes are measured.
        decoding_length, branch_length: of the published forms, where they do not vary.
    """

    prompts: int = 4
    warm_prompts: int = 20
    questions: int = 20
    rounds: int = 3
    max_new_tokens: int = 160
    decoding_lengths: Sequence[int] = (2, 4, 8, 16, 32, 64, 128)
    branch_lengths: Sequence[int] = (8, 24)
    capacities: Sequence[int] = (64, 256, 1024, 4096, 16384)
    other_tokens: int = 200_000
    warm_counts: Sequence[int] = (0, 1, 2, 5, 10, 20)
    batches: Sequence[int] = (1, 2, 4, 8)
    contexts: Sequence[int] = (128, 1024)
    decoding_length: int = 16
    branch_length: int = 12

    @property
    def lengths(self) -> Lengths:
        """Decoding and branch length of the published forms, where they do not vary."""
        return Lengths(self.decoding_length, self.branch_length)


QUICK = LookaheadSizes(
    prompts=1,
    warm_prompts=2,
    questions=2,
    rounds=1,
    max_new_tokens=24,
    decoding_lengths=(4, 16),
    branch_lengths=(8,),
    capacities=(64, 1024),
    other_tokens=2000,
    warm_counts=(0, 2),
    batches=(1, 2),
    contexts=(64,),
)
"""For a first look."""


@dataclass(frozen=True)
class Bfloat16Target:
    """The target in bfloat16, and its questions."""

    bench: VariantBench
    exams: Sequence[Exam]


@dataclass(frozen=True)
class LookaheadBench:
    """The parts, which fill a report.

    Args:
        bench: ``transformers`` and Forerun on the target.
        jobs: of all tasks.
        focus: the task that most parts use, with enough prompts for the largest batch.
        ballast: other texts that fill a trie to its capacity.
        half: makes the same target in bfloat16, when needed.
        sizes: what is measured.
        decode: from tokens to text.
        delivery: of the report.
    """

    bench: VariantBench
    jobs: Sequence[PromptSet]
    focus: PromptSet
    ballast: Sequence[Tokens]
    half: Callable[[], Bfloat16Target]
    sizes: LookaheadSizes
    decode: Decode
    delivery: Delivery
    _known: dict[str, Known] = field(default_factory=dict)

    def run(self, parts: Collection[str]) -> None:
        """Measure the parts named, in the paper's order."""
        for name, measured in PARTS.items():
            if name in parts:
                measured(self)
                self.delivery.part()

    def methods(self) -> None:
        """Table 2: every method at every task."""
        rows: list[Row] = []
        for job in self.jobs:
            known = self._knows(job)
            say(f"methods: {job.task}")
            self.bench.others = self.bench.variants(methods(self.sizes.lengths, known))
            *_, series = self.bench.run(job, self.sizes.rounds)
            same = [row["same_output"] for row in summarise(series, PLAIN, self.decode)]
            found = zip(summarise(series, decode=self.decode), same, strict=True)
            rows += [row | {"same_as_plain": share} for row, share in found]
            tables.report_methods(self.delivery.report, rows)
            self.delivery.save()

    def updating(self) -> None:
        """Table 3: what updating the trie gives, procedure by procedure."""
        rows: list[Row] = []
        for job in self.jobs:
            found = sweeps.by_updating(self.sizes.lengths, self._knows(job))
            say(f"updating: {job.task}")
            rows += self._speeds(job, found)
            tables.report_updating(self.delivery.report, rows)
            self.delivery.save()

    def capacity(self) -> None:
        """Table 4: a trie that other texts have filled, by its capacity."""
        texts = [*self.ballast, *self._knows(self.focus).answers]
        times: dict[int, Times] = {}
        found = sweeps.by_capacity([kib << 10 for kib in self.sizes.capacities], texts, times)
        say(f"capacity: {self.focus.task}, {sum(map(len, texts)):,} tokens seen")
        rows = self._speeds(self._short(), found)
        for row in rows:
            clocked = times.get(row.get("capacity", 0), Times())
            row |= {"retrieve_ms": _milliseconds(clocked.retrieve), "update_ms": _milliseconds(clocked.update)}
        tables.report_capacity(self.delivery.report, rows)

    def memory(self) -> None:
        """Table 5: peak memory of generating one text, by decoding length."""
        target, lengths, answers = self.bench.engine.target, self.sizes.lengths, self._knows(self.focus).answers
        if reason := why_not(target.device):
            self.delivery.report.add("memory", tables.MEMORY, [], f"Not measured: {reason}.\n")
            return
        say(f"memory: {self.focus.task}")
        prompt = max(self.focus.prompts, key=len)
        variants = {0: plain()} | {
            decoding: published("hierarchical", replace(lengths, decoding=decoding), answers)
            for decoding in self.sizes.decoding_lengths
        }
        contestants = {decoding: self.bench.variant(variant) for decoding, variant in variants.items()}
        found = peaks(contestants, prompt, self.sizes.max_new_tokens, self.sizes.rounds, target.device)
        held = sum(weight.nbytes for weight in target.model.parameters())
        common = {"model": held, "prompt": len(prompt), "new": self.sizes.max_new_tokens}
        rows = [
            {"decoding": decoding, "peak": int(median(each)), "least": min(each), "most": max(each), **common}
            for decoding, each in found.items()
        ]
        tables.report_memory(self.delivery.report, rows, target.device.type)

    def accuracy(self) -> None:
        """Table 6: texts and right answers in bfloat16, with drafts and without."""
        half, rows = self.half(), []
        for exam in half.exams:
            say(f"accuracy: {len(exam.prompts)} questions of {exam.kind}")
            half.bench.others = half.bench.variants(
                {
                    PLAIN: plain(),
                    "forerun hierarchical": published("hierarchical", self.sizes.lengths, ()),
                    "forerun trie, the default": default(()),
                }
            )
            job = PromptSet(exam.kind, exam.prompts, (), self.sizes.max_new_tokens)
            *_, series = half.bench.run(job, 1)
            rows += grade(exam, series, self.decode)
            tables.report_accuracy(self.delivery.report, rows, half.bench.engine.exactness.level)
            self.delivery.save()

    def lengths(self) -> None:
        """Figures 4 and 5: speed and tokens per step by decoding and branch length."""
        answers, sizes = self._knows(self.focus).answers, self.sizes
        found = sweeps.by_lengths(sizes.decoding_lengths, sizes.branch_lengths, answers)
        say(f"lengths: {self.focus.task}, {len(found)} settings")
        tables.report_lengths(self.delivery.report, self._speeds(self._short(), found))

    def passes(self) -> None:
        """Figures 1 and 6: a pass by rows, drafts and context."""
        say("passes")
        sizes = self.sizes
        rounds = max(LEAST_PASSES, sizes.rounds)
        tables.report_passes(
            self.delivery.report,
            pass_rows(self.bench.engine, sizes.batches, sizes.decoding_lengths, sizes.contexts, rounds),
        )

    def warmup(self) -> None:
        """Figure 7: speed by the number of answers that the trie knows."""
        found = sweeps.by_warmth(self.sizes.warm_counts, self.sizes.lengths, self._knows(self.focus).answers)
        say(f"warmup: {self.focus.task}")
        tables.report_warmup(self.delivery.report, self._speeds(self._short(), found))

    def batches(self) -> None:
        """Table 12: batches of ragged prompts beside padded ones."""
        answers, rows = self._knows(self.focus).answers, []
        lengths = self.sizes.lengths
        variants = {
            PLAIN: plain(),
            "forerun lookup (LLMA)": llma(lengths.decoding),
            "forerun hierarchical": published("hierarchical", lengths, answers),
            "forerun trie, the default": default(answers),
        }
        contestants = {PADDED: self.bench.transformers()} | self.bench.variants(variants)
        for size in self.sizes.batches:
            say(f"batches: {size} rows")
            groups = in_batches(self.focus.prompts, size)
            *_, series = measure(
                contestants, f"batches of {size}", groups, self.sizes.max_new_tokens, self.sizes.rounds
            )
            rows += [{"batch": size} | row for row in summarise(series, PADDED, self.decode)]
            tables.report_batches(self.delivery.report, rows)
            self.delivery.save()

    def _short(self) -> PromptSet:
        """The focus task with as many prompts as the other tasks."""
        return replace(self.focus, prompts=self.focus.prompts[: self.sizes.prompts])

    def _speeds(self, job: PromptSet, found: Labelled) -> list[Row]:
        """One row per variant, and one for plain decoding, the baseline."""
        contestants = self.bench.variants({PLAIN: plain()} | {name: variant for name, (_, variant) in found.items()})
        groups = [[prompt] for prompt in job.prompts]
        *_, series = measure(contestants, job.task, groups, job.max_new_tokens, self.sizes.rounds)
        labels = {name: label for name, (label, _) in found.items()}
        return [row | labels.get(row["contestant"], {}) for row in summarise(series, PLAIN, self.decode)]

    def _knows(self, job: PromptSet) -> Known:
        """What a warm trie knows of a task."""
        if job.task not in self._known:
            say(f"answering {len(job.warm_prompts)} other prompts of {job.task}")
            answers = self.bench.answers(default(()), job.warm_prompts, job.max_new_tokens)
            self._known[job.task] = Known(job.warm_prompts, answers)
        return self._known[job.task]


PARTS: dict[str, Callable[[LookaheadBench], None]] = {
    "methods": LookaheadBench.methods,
    "updating": LookaheadBench.updating,
    "capacity": LookaheadBench.capacity,
    "memory": LookaheadBench.memory,
    "accuracy": LookaheadBench.accuracy,
    "lengths": LookaheadBench.lengths,
    "passes": LookaheadBench.passes,
    "warmup": LookaheadBench.warmup,
    "batches": LookaheadBench.batches,
}


def _milliseconds(seconds: Sequence[float]) -> float | None:
    return round(1000 * median(seconds), 4) if seconds else None
