"""``python -m benchmarks papers lookahead``: the Lookahead paper's tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.papers import graded_questions
from benchmarks.papers.graded_questions import Exam
from benchmarks.papers.lookahead import PARTS as MEASURED
from benchmarks.papers.lookahead import QUICK, Bfloat16Target, LookaheadBench, LookaheadSizes
from benchmarks.papers.variants import VariantBench
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import SourceOptions, check_positions, list_option, names, numbers
from benchmarks.reporting.study_report import Delivery, Report
from benchmarks.tasks.task_prompts import Counts, LackingError, build_jobs
from benchmarks.tasks.task_sets import tasks_for
from benchmarks.training import material
from forerun.bench.machine import plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet, Tokens
from forerun.cli.models import encoder as plain_encoder
from forerun.cli.models import load_target
from forerun.cli.options import ModelOptions, Out, OutputOptions, flag_of, option
from forerun.cli.terminal import say
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit

PARTS = tuple(MEASURED)
_LENGTHS = "Lengths and sizes"
LEAST = {
    "decoding_lengths": 1,
    "branch_lengths": 2,
    "capacities": 64,
    "warm_counts": 0,
    "batches": 1,
    "contexts": 0,
}
"""The least number of each list."""
LONGEST_BRANCH, LARGEST_KIB = 256, 1 << 26


def _size(name: str, panel: str, help: str, *flags: str, **more: object) -> object:  # noqa: A002
    """An option of ``LookaheadSizes``; its help tells the value that it has if it is not given."""
    default, metavar = getattr(LookaheadSizes, name), {"metavar": "LIST"} if name in LEAST else {}
    shown = f"Commas between; default {','.join(map(str, default))}" if name in LEAST else f"default {default}"
    return option(flag_of(name), *flags, panel=panel, help=f"{help} {shown}.", **metavar, **more)


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
    prompts: Annotated[int | None, _size("prompts", "Text", "Per task;", min=1)] = None
    warm_prompts: Annotated[int | None, _size("warm_prompts", "Text", "Answered before, per task;", min=0)] = None
    questions: Annotated[int | None, _size("questions", "Text", "Of each kind, for accuracy;", min=1)] = None
    rounds: Annotated[int | None, _size("rounds", "Text", "Times each is measured;", min=1)] = None
    max_new_tokens: Annotated[int | None, _size("max_new_tokens", "Text", "Per text;", "-n", min=2)] = None
    decoding_length: Annotated[
        int, option("--decoding-length", panel=_LENGTHS, help="Drafted tokens of a step, in the paper's forms.", min=1)
    ] = LookaheadSizes.decoding_length
    branch_length: Annotated[
        int, option("--branch-length", panel=_LENGTHS, help="Tokens of a branch, context included.", min=2, max=256)
    ] = LookaheadSizes.branch_length
    decoding_lengths: Annotated[str | None, _size("decoding_lengths", _LENGTHS, "To compare.")] = None
    branch_lengths: Annotated[str | None, _size("branch_lengths", _LENGTHS, "To compare.")] = None
    capacities: Annotated[str | None, _size("capacities", _LENGTHS, "Of the trie, in KiB.")] = None
    other_tokens: Annotated[
        int | None, _size("other_tokens", _LENGTHS, "Of code that a trie saw first, for its capacity;", min=0)
    ] = None
    warm_counts: Annotated[str | None, _size("warm_counts", _LENGTHS, "Answers that a trie knows, at most all.")] = None
    batches: Annotated[str | None, _size("batches", _LENGTHS, "Rows together.")] = None
    contexts: Annotated[str | None, _size("contexts", _LENGTHS, "Tokens in the cache, for passes alone.")] = None
    quick: Annotated[
        bool, option("--quick", panel="Text", help="The least of all that is not given: a look in a minute or two.")
    ] = False
    out: Out = Path("runs/lookahead")

    def __post_init__(self) -> None:
        names("--parts", self.parts, PARTS)
        sizes = self.sizes()
        if max(sizes.branch_lengths) > LONGEST_BRANCH:
            raise ValueError(f"--branch-lengths is {self.branch_lengths!r}; none may exceed {LONGEST_BRANCH}")
        if max(sizes.capacities) > LARGEST_KIB:
            raise ValueError(f"--capacities is {self.capacities!r}; none may exceed {LARGEST_KIB:,} KiB")

    def sizes(self) -> LookaheadSizes:
        """What is given, and the default of the rest: with ``quick`` the smallest."""
        given: dict[str, Any] = {}
        for each in fields(LookaheadSizes):
            value = getattr(self, each.name)
            if isinstance(value, str):
                given[each.name] = tuple(sorted(set(numbers(flag_of(each.name), value, int, LEAST[each.name]))))
            elif value is not None:
                given[each.name] = value
        found = replace(QUICK if self.quick else LookaheadSizes(), **given)
        return replace(found, warm_counts=tuple(sorted({min(each, found.warm_prompts) for each in found.warm_counts})))


OUTPUT = 512
"""Tokens per text of the other texts that a trie saw."""


def run(options: LookaheadOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    sizes, parts = options.sizes(), names("--parts", options.parts, PARTS)
    model, tokenizer = load_target(options)
    encoder = TemplateEncoder(tokenizer, options.raw)
    if "passes" in parts:
        check_positions(max(sizes.contexts), max(sizes.decoding_lengths) + 1, position_limit(model))
    jobs, focus = _jobs(options, sizes, encoder, model)
    ballast = _other_texts(tokenizer, sizes.other_tokens) if "capacity" in parts else []
    settings = plain_values(options) | plain_values(sizes) | {"dtype": dtype_name(model)}
    report = Report("The Lookahead paper's tables and figures", settings)
    delivery = Delivery(report, options.out, "lookahead", options.json)
    bench = LookaheadBench(
        VariantBench(model, (), tokenizer=tokenizer),
        jobs,
        focus,
        ballast,
        lambda: _half(options, sizes, encoder, model),
        sizes,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        delivery,
    )
    bench.run(parts)
    delivery.end()


def _jobs(
    options: LookaheadOptions, sizes: LookaheadSizes, encoder: TemplateEncoder, model: PreTrainedModel
) -> tuple[list[PromptSet], PromptSet]:
    """The tasks' jobs, and the focus task's job with enough prompts for the largest batch.

    All are drawn in the same way, so that no measured prompt warms another's trie.
    """
    tasks = tasks_for(encoder, options)
    wanted = list(tasks) if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    counts = Counts(max(sizes.prompts, *sizes.batches), sizes.warm_prompts, sizes.max_new_tokens)
    found, skipped = build_jobs([*wanted, options.focus], tasks, encoder, counts, position_limit(model))
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    by_name = {job.task: job for job in found}
    if options.focus not in by_name:
        raise ValueError(f"--focus is {options.focus!r}, which {skipped[options.focus]}")
    jobs = [replace(job, prompts=job.prompts[: sizes.prompts]) for name, job in by_name.items() if name in wanted]
    return jobs, by_name[options.focus]


def _other_texts(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Tokens]:
    """``tokens`` tokens of Python's own sources, in texts of ``OUTPUT`` tokens."""
    encode, ids = plain_encoder(tokenizer), list[int]()
    for source in material.read_code()[0]:
        if len(ids) >= tokens:
            break
        ids += encode(source)
    return [ids[start : start + OUTPUT] for start in range(0, min(tokens, len(ids)), OUTPUT)]


def _half(
    options: LookaheadOptions, sizes: LookaheadSizes, encoder: TemplateEncoder, model: PreTrainedModel
) -> Bfloat16Target:
    """The target in bfloat16, and its questions."""
    half, tokenizer = load_target(replace(options, dtype="bfloat16"))
    texts = material.read_held_out(None, options.maths)
    limit, positions = sizes.max_new_tokens, position_limit(model)
    exams = []
    for kind in graded_questions.KINDS:
        try:
            found = graded_questions.questions(kind, sizes.questions, texts, lambda text: encoder.count(text) < limit)
        except LackingError as lacking:
            say(f"skipped accuracy at {kind}: {lacking}")
            continue
        asked = [(question, encoder(question.prompt)) for question in found]
        fitting = [(q, ids) for q, ids in asked if positions is None or len(ids) + limit <= positions]
        if fitting:
            exams.append(Exam(kind, [q for q, _ in fitting], [ids for _, ids in fitting]))
    return Bfloat16Target(VariantBench(half, (), tokenizer=tokenizer), exams)
