"""``python -m benchmarks papers lookahead``: the Lookahead paper's tables and figures."""

from __future__ import annotations

from dataclasses import asdict, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.papers.accuracy import Exam
from benchmarks.papers.lookahead import Half, LookaheadBench, LookaheadSizes
from benchmarks.papers.lookahead_methods import Lengths
from benchmarks.papers.lookahead_options import PARTS, Amounts, LookaheadOptions
from benchmarks.papers.variants import Track
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import check_positions, names, numbers
from benchmarks.reporting.tables import Report
from benchmarks.tasks import graded
from benchmarks.tasks.contestants import TaskBench
from benchmarks.tasks.questions import Files
from benchmarks.tasks.task_prompts import Counts, LackingError, build_jobs, positions_of
from benchmarks.tasks.task_sets import tasks_for
from benchmarks.training import material
from forerun.bench.machine import plain_values
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet, Tokens
from forerun.cli.models import encoder as plain_encoder
from forerun.cli.terminal import say, stderr, working
from forerun.engine.engine import Engine
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import dtype_name

OUTPUT = 512
"""Tokens per text of the other texts that a trie saw."""


def run(options: LookaheadOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    amounts = options.amounts()
    sizes, parts = _sizes(options, amounts), names("--parts", options.parts, PARTS)
    with working(stderr(), "loading"):
        model, tokenizer = _load(options, options.dtype)
    encoder = TemplateEncoder(tokenizer, options.raw)
    if "passes" in parts:
        check_positions(max(sizes.contexts), max(sizes.decodings) + 1, positions_of(model))
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


def _load(options: LookaheadOptions, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(options.model, dtype, device=options.device, trust_remote_code=options.trust_remote_code)


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
    found, skipped = build_jobs([*wanted, options.focus], tasks, encoder, counts, positions_of(model))
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
    half, tokenizer = _load(options, "bfloat16")
    texts = material.read_held_out(None, options.maths)
    limit, positions = amounts.max_new_tokens, positions_of(model)
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
