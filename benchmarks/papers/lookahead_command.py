"""``python -m benchmarks papers lookahead``: the Lookahead paper's tables and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.papers.accuracy import Exam
from benchmarks.papers.lookahead import Half, LookaheadBench, LookaheadSizes
from benchmarks.papers.lookahead_methods import Lengths
from benchmarks.papers.variants import Track
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import SourceOptions, check_positions, list_option, names, numbers
from benchmarks.reporting.tables import Report
from benchmarks.tasks import graded
from benchmarks.tasks.contestants import TaskBench
from benchmarks.tasks.questions import Files
from benchmarks.tasks.task_prompts import Counts, LackingError, build_jobs
from benchmarks.tasks.task_sets import tasks_for
from benchmarks.training import material
from forerun.bench.machine import plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet, Tokens
from forerun.cli.models import encoder as plain_encoder
from forerun.cli.models import load_target
from forerun.cli.options import ModelOptions, Out, OutputOptions, option
from forerun.cli.terminal import say
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.stored_weights import dtype_name

PARTS = ("methods", "updating", "capacity", "memory", "accuracy", "lengths", "passes", "warmup", "batches")
_LENGTHS = "Lengths and sizes"


@dataclass(frozen=True)
class Amounts:
    """How much is measured: the values of options that ``--quick`` makes small unless they are given."""

    prompts: int = 4
    warm_prompts: int = 20
    questions: int = 20
    rounds: int = 3
    max_new_tokens: int = 160
    decoding_lengths: str = "2,4,8,16,32,64,128"
    branch_lengths: str = "8,24"
    capacities: str = "64,256,1024,4096,16384"
    other_tokens: int = 200_000
    warm_counts: str = "0,1,2,5,10,20"
    batches: str = "1,2,4,8"
    contexts: str = "128,1024"


QUICK = Amounts(
    prompts=1,
    warm_prompts=2,
    questions=2,
    rounds=1,
    max_new_tokens=24,
    decoding_lengths="4,16",
    branch_lengths="8",
    capacities="64,1024",
    other_tokens=2000,
    warm_counts="0,2",
    batches="1,2",
    contexts="64",
)


def _amount(name: str, panel: str, help: str, *flags: str, **more: object) -> object:  # noqa: A002
    """An option of ``Amounts``; its help tells the value that it has if it is not given."""
    metavar = {"metavar": "LIST"} if isinstance(getattr(Amounts, name), str) else {}
    told = f"{help}{' Commas between;' if metavar else ''} default {getattr(Amounts, name)}."
    return option(f"--{name.replace('_', '-')}", *flags, panel=panel, help=told, **metavar, **more)


@dataclass(frozen=True)
class LookaheadOptions(OutputOptions, SourceOptions, ModelOptions):
    """The Lookahead paper's tables 2 to 6 and 12 and figures 1 and 4 to 7, on any model and this machine.

    Parts: methods by task, compared with transformers; the effect of updating the trie; its capacity; peak memory;
    accuracy in bfloat16; decoding and branch lengths; passes; warm-up; batches. Greedy; contestants take turns in one
    process; medians count. Writes JSON, Markdown and plots after each part.
    """

    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(PARTS)}.")] = ",".join(PARTS)
    tasks: Annotated[str | None, list_option("--tasks", "Text", "Those of tasks; default: all.")] = None
    focus: Annotated[str, option("--focus", panel="Text", help="The task of all parts but the first two.")] = "rag"
    prompts: Annotated[int | None, _amount("prompts", "Text", "Per task;", min=1)] = None
    warm_prompts: Annotated[int | None, _amount("warm_prompts", "Text", "Answered before, per task;", min=0)] = None
    questions: Annotated[int | None, _amount("questions", "Text", "Of each kind, for accuracy;", min=1)] = None
    rounds: Annotated[int | None, _amount("rounds", "Text", "Times each is measured;", min=1)] = None
    max_new_tokens: Annotated[int | None, _amount("max_new_tokens", "Text", "Per text;", "-n", min=2)] = None
    decoding_length: Annotated[
        int, option("--decoding-length", panel=_LENGTHS, help="Drafted tokens of a step, in the paper's forms.", min=1)
    ] = 16
    branch_length: Annotated[
        int, option("--branch-length", panel=_LENGTHS, help="Tokens of a branch, context included.", min=2, max=256)
    ] = 12
    decoding_lengths: Annotated[str | None, _amount("decoding_lengths", _LENGTHS, "To compare.")] = None
    branch_lengths: Annotated[str | None, _amount("branch_lengths", _LENGTHS, "To compare.")] = None
    capacities: Annotated[str | None, _amount("capacities", _LENGTHS, "Of the trie, in KiB.")] = None
    other_tokens: Annotated[
        int | None, _amount("other_tokens", _LENGTHS, "Of code that a trie saw first, for its capacity;", min=0)
    ] = None
    warm_counts: Annotated[str | None, _amount("warm_counts", _LENGTHS, "Answers that a trie knows, at most all.")] = (
        None
    )
    batches: Annotated[str | None, _amount("batches", _LENGTHS, "Rows together.")] = None
    contexts: Annotated[str | None, _amount("contexts", _LENGTHS, "Tokens in the cache, for passes alone.")] = None
    quick: Annotated[
        bool, option("--quick", panel="Text", help="The least of all that is not given: a look in a minute or two.")
    ] = False
    out: Out = Path("runs/lookahead")

    def __post_init__(self) -> None:
        names("--parts", self.parts, PARTS)
        amounts = self.amounts()
        numbers("--decoding-lengths", amounts.decoding_lengths, int, 1)
        if max(numbers("--branch-lengths", amounts.branch_lengths, int, 2)) > 256:
            raise ValueError(f"--branch-lengths is {self.branch_lengths!r}; none may exceed 256")
        least, most = 64, 1 << 26
        if max(numbers("--capacities", amounts.capacities, int, least)) > most:
            raise ValueError(f"--capacities is {self.capacities!r}; none may exceed {most:,} KiB")
        numbers("--batches", amounts.batches, int, 1)
        numbers("--contexts", amounts.contexts, int, 0)
        numbers("--warm-counts", amounts.warm_counts, int, 0)

    def amounts(self) -> Amounts:
        """What is given, and the default of the rest: with ``quick`` the smallest."""
        given = {each.name: getattr(self, each.name) for each in fields(Amounts)}
        known = {name: value for name, value in given.items() if value is not None}
        return replace(QUICK if self.quick else Amounts(), **known)


OUTPUT = 512
"""Tokens per text of the other texts that a trie saw."""


def run(options: LookaheadOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    amounts = options.amounts()
    sizes, parts = _sizes(options, amounts), names("--parts", options.parts, PARTS)
    model, tokenizer = load_target(options)
    encoder = TemplateEncoder(tokenizer, options.raw)
    if "passes" in parts:
        check_positions(max(sizes.contexts), max(sizes.decodings) + 1, position_limit(model))
    jobs, focus = _jobs(options, amounts, sizes, encoder, model)
    ballast = _other_texts(tokenizer, amounts.other_tokens) if "capacity" in parts else []
    dtype = dtype_name(model)
    report = Report(
        "The Lookahead paper's tables and figures", plain_values(options) | asdict(amounts) | {"dtype": dtype}
    )
    delivery = Delivery(report, options.out, "lookahead", options.json)
    bench = LookaheadBench(
        TaskBench(model, (), tokenizer=tokenizer),
        _track(model, tokenizer),
        jobs,
        focus,
        ballast,
        lambda: _half(options, amounts, encoder, model),
        sizes,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        report,
        say,
        delivery.save,
        delivery.part,
    )
    bench.run(parts)
    delivery.end()


def _track(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Track:
    return Track(Engine(model, "none", tokenizer=tokenizer))


def _sizes(options: LookaheadOptions, amounts: Amounts) -> LookaheadSizes:
    def rising(name: str, least: int) -> list[int]:
        flag = f"--{name.replace('_', '-')}"
        return sorted(set(numbers(flag, getattr(amounts, name), int, least)))

    return LookaheadSizes(
        lengths=Lengths(options.decoding_length, options.branch_length),
        rounds=amounts.rounds,
        max_new_tokens=amounts.max_new_tokens,
        prompts=amounts.prompts,
        decodings=rising("decoding_lengths", 1),
        branches=rising("branch_lengths", 2),
        capacities=[kib << 10 for kib in rising("capacities", 64)],
        warm_counts=sorted({min(count, amounts.warm_prompts) for count in rising("warm_counts", 0)}),
        batches=rising("batches", 1),
        contexts=rising("contexts", 0),
    )


def _jobs(
    options: LookaheadOptions, amounts: Amounts, sizes: LookaheadSizes, encoder: TemplateEncoder, model: PreTrainedModel
) -> tuple[list[PromptSet], PromptSet]:
    """The tasks' jobs, and the focus task's job with enough prompts for the largest batch.

    All are drawn in the same way, so that no measured prompt warms another's trie.
    """
    files = Files(options.books, options.maths, options.code)
    tasks = tasks_for(encoder, files)
    wanted = list(tasks) if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    counts = Counts(max(amounts.prompts, *sizes.batches), amounts.warm_prompts, amounts.max_new_tokens)
    found, skipped = build_jobs([*wanted, options.focus], tasks, encoder, counts, position_limit(model))
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    by_name = {job.task: job for job in found}
    if options.focus not in by_name:
        raise ValueError(f"--focus is {options.focus!r}, which {skipped[options.focus]}")
    jobs = [replace(job, prompts=job.prompts[: amounts.prompts]) for name, job in by_name.items() if name in wanted]
    return jobs, by_name[options.focus]


def _other_texts(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Tokens]:
    """``tokens`` tokens of Python's own sources, in texts of ``OUTPUT`` tokens."""
    encode, ids = plain_encoder(tokenizer), list[int]()
    for source in material.read_code()[0]:
        if len(ids) >= tokens:
            break
        ids += encode(source)
    return [ids[start : start + OUTPUT] for start in range(0, min(tokens, len(ids)), OUTPUT)]


def _half(options: LookaheadOptions, amounts: Amounts, encoder: TemplateEncoder, model: PreTrainedModel) -> Half:
    """The target in bfloat16, and its questions."""
    half, tokenizer = load_target(replace(options, dtype="bfloat16"))
    texts = material.read_held_out(None, options.maths)
    limit, positions = amounts.max_new_tokens, position_limit(model)
    exams = []
    for kind in graded.KINDS:
        try:
            found = graded.questions(kind, amounts.questions, texts, lambda text: encoder.count(text) < limit)
        except LackingError as lacking:
            say(f"skipped accuracy at {kind}: {lacking}")
            continue
        asked = [(question, encoder(question.prompt)) for question in found]
        fitting = [(q, ids) for q, ids in asked if positions is None or len(ids) + limit <= positions]
        if fitting:
            exams.append(Exam(kind, [q for q, _ in fitting], [ids for _, ids in fitting]))
    return Half(TaskBench(half, (), tokenizer=tokenizer), _track(half, tokenizer), exams)
