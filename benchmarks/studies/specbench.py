"""``python -m benchmarks specbench``: tokens per step and speed-up by category of Spec-Bench's questions.

Drafters keep what they index from prompt to prompt of a category. A question's second turn follows Forerun's own answer
to the first, for all contestants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.papers.lookahead_trie import RECIPES
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import ListOptions, SourceOptions, json_lines, list_option, numbers_of
from benchmarks.reporting.study_report import Report, listing
from benchmarks.reporting.turns import journal_of
from benchmarks.tasks.task_prompts import Counts
from benchmarks.tasks.task_sets import jobs_for
from forerun.bench.contestants import Bench, Makers, timed
from forerun.bench.journal import Journal, TurnKey
from forerun.bench.machine import Row
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.report import pivot, summarise
from forerun.bench.rounds import PLAIN, Contestant, PromptSet, Rows, Run, Series, Tokens, measure
from forerun.cli.bench import check_texts
from forerun.cli.models import check_drafters, load_target
from forerun.cli.options import Drafters, ModelOptions, Out, OutputOptions, option
from forerun.cli.terminal import say
from forerun.decoding.level import Level
from forerun.engine.engine import BUDGET
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit

DRAFTERS = ("none", "auto", "trie", "lookahead-trie")
Questions = Mapping[str, Sequence[Sequence[str]]]  # the turns of each question, by category
TASK_PROMPTS = 4  # default number of prompts of each of the tasks


@dataclass(frozen=True)
class SpecBenchOptions(ListOptions, OutputOptions, SourceOptions, ModelOptions):
    """Spec-Bench on any model: tokens per step and speed-up by category, both turns of every question.

    Contestants take turns: transformers' greedy and prompt lookup, and Forerun's drafters, with what they indexed of
    the category's earlier questions. ``--every-node`` only counts tokens per step, unpruned.
    """

    questions: Annotated[Path | None, option("--questions", "-q", panel="Text", help="Its question.jsonl.")] = None
    drafter: Drafters = None
    budget: Annotated[str, list_option("Model", "Most drafted tokens per step.")] = str(BUDGET)
    every_node: Annotated[bool, option("--every-node", panel="Model", help="Score whole drafts; no times.")] = False
    limit: Annotated[int | None, option("--limit", panel="Text", help="Questions of a category.", min=1)] = None
    tasks: Annotated[bool, option("--tasks", panel="Text", help="The prompts of `tasks` as well.")] = False
    rounds: Annotated[int, option("--rounds", panel="Text", help="Times each is measured.", min=1)] = 1
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per turn.", min=1)] = 96
    temperature: Annotated[float, option("--temperature", "-t", panel="Sampling", help="0 is greedy.", min=0.0)] = 0.0
    out: Out = Path("runs/specbench")
    resume: Annotated[bool, option("--resume", panel="Output", help="Keep the categories that --out has.")] = False

    budgets = numbers_of("budget", int, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.questions is None and not self.tasks:
            raise ValueError("there is nothing to measure; give --questions, --tasks or both")
        if not self.tasks and (given := [name for name in ("maths", "code", "books") if getattr(self, name)]):
            raise ValueError(f"--{given[0]} is for --tasks")


class SpecBench(Bench):
    """The contestants, over one engine."""

    recipes = RECIPES

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: SpecBenchOptions) -> None:
        super().__init__(model, (), tokenizer=tokenizer)
        self._options, self._tokenizer = options, tokenizer
        if options.temperature:
            self.sampling = {"do_sample": True, "temperature": options.temperature, "seed": 0}

    def answer(self, prompt: Tokens) -> str:
        [text], _ = self.generate([prompt], self._options.max_new_tokens)
        return str(self._tokenizer.decode(text, skip_special_tokens=True))

    def category(self, job: PromptSet) -> list[Series]:
        groups = [[prompt] for prompt in job.prompts]
        *_, series = measure(self.contestants(job), job.task, groups, job.max_new_tokens, self._options.rounds)
        return series

    def of_transformers(self) -> Makers:
        return {} if self._options.every_node or self._options.temperature else self.baselines()

    def contestants(self, job: PromptSet) -> dict[str, Contestant]:
        options = self._options
        found = self._built(self.of_transformers())
        for name in options.drafter or DRAFTERS:
            for budget in options.budgets:
                label = f"forerun {name}" if len(options.budgets) == 1 else f"forerun {name}, {budget}"
                found[PLAIN if name == "none" else label] = self._keeping(name, budget, job.prompts[0])
        return found

    def _keeping(self, name: str, budget: int, first: Tokens) -> Contestant:
        """Return a drafter that is made for the first prompt and kept for the next ones."""
        kept: list[Level] = []

        def run(rows: Rows, max_new_tokens: int) -> Run:
            self.engine.prune_drafts, self.engine.budget = not self._options.every_node, budget
            if not kept or rows[0] == first:
                self.engine.set_drafter(self._drafter(name))
                kept[:] = [self.engine.level]
            self.engine.level = kept[0]
            return timed(self.generate)(rows, max_new_tokens)

        return Contestant(run)


def read_questions(file: Path, limit: int | None = None) -> Questions:
    """Return the first ``limit`` questions of each category of Spec-Bench's ``question.jsonl`` (hemingkx/Spec-Bench),
    lines of ``{category, turns}``; raise ValueError for another file or line."""
    found: dict[str, list[list[str]]] = {}
    for place, row in json_lines(file, "--questions"):
        try:
            category, turns = row["category"], row["turns"]
        except (KeyError, TypeError):
            raise ValueError(f"{place} is no JSON object with category and turns") from None
        texts = [category, *turns] if isinstance(turns, list) and turns else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{place} has a category or turns that are no text")
        found.setdefault(category, []).append(turns)
    if not found:
        raise ValueError(f"--questions {file} is empty")
    return {category: questions[:limit] for category, questions in found.items()}


def prompt_set(
    category: str, questions: Sequence[Sequence[str]], encoder: TemplateEncoder, answer: Callable[[Tokens], str],
    max_new_tokens: int, positions: int | None = None,
) -> PromptSet:  # fmt: skip
    """Return the prompts of all turns of a category's questions. A second turn follows the model's ``answer`` to the
    first; a question ends before the turn that exceeds the model's ``positions``."""
    prompts: list[Tokens] = []
    for turns in questions:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(turns, 1):
            messages.append({"role": "user", "content": turn})
            whole = messages if encoder.chats else "\n\n".join(message["content"] for message in messages) + "\n\n"
            prompt = encoder(whole)
            if positions is not None and len(prompt) + max_new_tokens > positions:
                break
            prompts.append(prompt)
            if number < len(turns):
                messages.append({"role": "assistant", "content": answer(prompt)})
    return PromptSet(category, prompts, (), max_new_tokens)


def run(options: SpecBenchOptions) -> None:
    plots.check()
    check_drafters(options.drafter or DRAFTERS, options, RECIPES)
    questions = read_questions(options.questions, options.limit) if options.questions else {}
    model, tokenizer = load_target(options)
    encoder, positions = TemplateEncoder(tokenizer, options.raw), position_limit(model)
    bench, dtype = SpecBench(model, tokenizer, options), dtype_name(model)
    tasks = dict[str, PromptSet]()
    if options.tasks:
        counts = Counts(options.limit or TASK_PROMPTS, 0, options.max_new_tokens)
        jobs, _ = jobs_for(None, options, encoder, counts, positions)
        tasks = {name: replace(job, task=name) for job in jobs for name in (f"{job.task} (task)",)}
    alike = {name: getattr(options, name) for name in ("every_node", "rounds", "temperature", "budget")}
    journal = journal_of(options, "specbench", options.model, dtype, str(model.device), **alike)
    report = Report.of("Tokens per step by category", options, "specbench", dtype=dtype)
    groups = {"all of Spec-Bench": list(questions), "all tasks": list(tasks)}
    measured: dict[str, list[Series]] = {}
    left_out: list[Row] = []
    theirs = bench.of_transformers()
    if refused := [{"name": name, "why": why} for name, why in bench.refused.items() if name in theirs]:
        report.add("not measured", "Not measured", refused, listing(refused, {"name": "contestant", "why": "why"}))
    for category in [*questions, *tasks]:
        say(f"{category}, {len(measured) + 1} of {len(questions) + len(tasks)} categories")
        job = tasks.get(category)
        if job is None:
            job = prompt_set(category, questions[category], encoder, bench.answer, options.max_new_tokens, positions)
        if category in questions and (lacking := sum(map(len, questions[category])) - len(job.prompts)):
            left_out.append({"category": category, "turns": lacking})
            said = f"Turns that are left out, as the model has {positions:,} positions."
            report.add("left out", said, left_out, listing(left_out, {"category": "category", "turns": "turns"}))
        if job.prompts:
            measured[category] = _measured(bench, job, journal)
            _fill(report, measured | _totals(measured, groups), timed=not options.every_node)
            report.save()
    report.end()
    rows = [row for series in measured.values() for row in summarise(series, baseline=series[0].contestant)]
    check_texts(bench.engine.exactness, rows)


def _measured(bench: SpecBench, job: PromptSet, journal: Journal) -> list[Series]:
    """Return a category's runs, from the journal or measured as a whole, since drafters keep what they index."""
    key, names = TurnKey.of(job.task, 0, job.prompts, job.max_new_tokens), list(bench.contestants(job))
    turn = journal.find(key, names)
    if turn is None:
        found = bench.category(job)
        turn = {one.contestant: {"runs": [[asdict(run) for run in runs] for runs in one.runs]} for one in found}
        journal.add(key, turn)
    return [Series(name, job.task, [[Run(**run) for run in runs] for runs in turn[name]["runs"]]) for name in names]


def _totals(measured: Mapping[str, list[Series]], groups: Mapping[str, list[str]]) -> dict[str, list[Series]]:
    """Join the categories of each group, as one task."""
    found = {}
    for name, categories in groups.items():
        parts = [measured[category] for category in categories if category in measured]
        if len(parts) > 1:
            joined = {
                each[0].contestant: [runs for one in each for runs in one.runs] for each in zip(*parts, strict=True)
            }
            found[name] = [Series(contestant, name, runs) for contestant, runs in joined.items()]
    return found


def _fill(report: Report, measured: Mapping[str, list[Series]], timed: bool) -> None:
    rows: list[Row] = []
    for series in measured.values():
        rows += summarise(series, baseline=series[0].contestant)
    tables = {"tokens": ("Tokens per step", "tokens_per_step", "{:.2f}")}
    if timed:
        tables["speed"] = (f"Speed-up over {rows[0]['contestant']}", "speed_up", "{:.2f}x")
    for name, (heading, column, shape) in tables.items():
        cells = pivot(rows, "contestant", "task", lambda row, c=column, s=shape: s.format(row[c]))
        report.add(name, heading, rows if name == "tokens" else (), cells)
        ends = ("slowest", "fastest")
        spread = [row | {each: row[column] * row[each] / row["tokens_per_second"] for each in ends} for row in rows]
        groups, bars = plots.grouped(spread, lambda row: str(row["task"]), column)
        if name == "tokens":  # every round has as many
            bars = [replace(line, low=(), high=()) for line in bars]
        report.bars(name, plots.Frame(heading, "", heading.lower()), groups, bars)
