"""``python -m benchmarks server load``: servers under load, with and without drafts."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedTokenizerBase

from benchmarks.long_context.texts import Texts
from benchmarks.peers import weights
from benchmarks.reporting.common_options import ListOptions, SourceOptions, list_option, names_of, numbers_of
from benchmarks.reporting.study_report import Report
from benchmarks.reporting.turns import journal_of
from benchmarks.server import load_report, servers
from benchmarks.server.client import Level, LoadRequest, mixed
from benchmarks.server.load_bench import Round, ServeBench
from benchmarks.server.servers import ServedModel, ServerContestant
from benchmarks.tasks.task_prompts import LackingError, check_names
from benchmarks.tasks.task_sets import tasks_for
from forerun.bench.journal import Turn
from forerun.bench.prompts_file import TemplateEncoder, check_length
from forerun.cli.commands import FAILED
from forerun.cli.models import load_target
from forerun.cli.options import ModelOptions, Out, OutputOptions, option
from forerun.cli.terminal import say
from forerun.core.install_command import install_command
from forerun.decoding.recipes import check_drafter
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import find
from forerun.models.text.prompts import text_ids

TRANSFORMERS, LLAMA, DEFAULT, RAY = "transformers", "llama.cpp", "default", "ray"
REPLICAS = 2  # of the default on Ray
GGUF, ROWS = "model.gguf", 16  # the file for llama.cpp's server, and its slots for Poisson arrivals
SPARE = 64  # tokens of a slot in llama.cpp's server beyond the longest sequence
CLIENT_TURNS = 4  # minimum answers per client of a closed loop: with fewer, a level is mostly its start and end
NEEDED = ("httpx", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "llguidance")
LEFT_OUT = ("copy",)  # tasks that are measured only if named: repeating a passage is no typical use
_LOAD = "Load"


@dataclass(frozen=True)
class ServingOptions(ListOptions, OutputOptions, SourceOptions, ModelOptions):
    """Servers under load: forerun serve with and without drafts, and those of transformers and llama.cpp.

    Each is a process on a free port of this computer, one at a time. All answer the same requests in rounds; medians
    count. Exit status 1 if an output under load differs from the same request alone, or if Forerun leaves a request
    unanswered. Writes JSON, Markdown and plots after each load.
    """

    contestants: Annotated[str, list_option("Model", f"Drafters of forerun serve, {DEFAULT} for its own, {RAY} for "
        f"that in {REPLICAS} replicas, {TRANSFORMERS} (with continuous batching) and {LLAMA}.")
    ] = f"none,{DEFAULT},{TRANSFORMERS}"  # fmt: skip
    concurrency: Annotated[str, list_option(_LOAD, "Clients that wait for their answers; 0 for none.")] = "1,4,16"
    rates: Annotated[str, list_option(_LOAD, "Requests per second that arrive by chance; 0 for none.")] = "4,16"
    requests: Annotated[int, option(panel=_LOAD, help="Of each load; four a client at least.", min=1)] = 32
    long: Annotated[int, option(panel=_LOAD, metavar="TOKENS", help="A long prompt beside streams.", min=0)] = 0
    rounds: Annotated[int, option(panel=_LOAD, help="Times each is measured.", min=1)] = 3
    tasks: Annotated[str | None, list_option("Text", "Those of tasks; default: all but copy.")] = None
    lengths: Annotated[str, list_option("Text", "Most tokens of answers; drawn for each request.")] = "32,64,128"
    temperature: Annotated[float, option("-t", "--temperature", panel="Text", help="Of half the turns.", min=0.0)] = 0.8
    seed: Annotated[int, option(panel="Text", help="Of what is drawn, and of the arrivals.")] = 0
    checks: Annotated[int, option(panel="Text", help="Greedy requests of a round to repeat alone.", min=0)] = 8
    resume: Annotated[bool, option("--resume", panel="Output", help="Keep the rounds that --out has.")] = False
    out: Out = Path("runs/serve")

    drafters, tokens = names_of("contestants"), numbers_of("lengths", int, 1)
    named_tasks = names_of("tasks")
    _clients, _rates = numbers_of("concurrency", int, 0), numbers_of("rates", float, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.clients or self.arrivals):
            raise ValueError("--concurrency and --rates are both 0; give a load")
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"--contestants is {self.contestants!r}; each may be there once")

    @property
    def clients(self) -> list[int]:
        return list(filter(None, self._clients))

    @property
    def arrivals(self) -> list[float]:
        return list(filter(None, self._rates))


def run(options: ServingOptions) -> None:
    _check_installed(options)
    subject, rounds, contestants = _prepared(options)
    report = Report.of("Servers under load", options, "serve", dtype=subject.dtype)

    def save(turns: Sequence[Turn], whole: bool) -> None:
        load_report.fill(report, turns, rounds, whole)
        report.save()

    journal = journal_of(options, "serve", options.model, subject.dtype, subject.device)
    start = partial(servers.started, chats=subject.chats, logs=options.out / "logs")
    turns = ServeBench(contestants, rounds, start, journal, save).run()
    report.end()
    faults = load_report.changed(load_report.output_rows(turns, rounds)) + list(load_report.unanswered(turns))
    if faults:
        say("\n".join(faults))
        raise typer.Exit(FAILED)


def _check_installed(options: ServingOptions) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"server load needs {', '.join(missing)}; install them by: {install_command('serve,bench')}")
    for name in options.drafters:
        if name not in (DEFAULT, RAY, TRANSFORMERS, LLAMA):
            check_drafter(name)
    for name, module, extra in ((RAY, "ray", "ray"), (LLAMA, "xllamacpp", "peers")):
        if name in options.drafters and importlib.util.find_spec(module) is None:
            raise ValueError(f"{name} is not installed; install it by: {install_command(extra)}")


def _prepared(options: ServingOptions) -> tuple[ServedModel, list[Round], list[ServerContestant]]:
    """Return the model, all requests and the contestants. The model is loaded only to check it, and to write
    llama.cpp's file."""
    model, tokenizer = load_target(options)
    if LLAMA in options.drafters:
        weights.check(model, tokenizer, None)
        options.out.mkdir(parents=True, exist_ok=True)
        weights.write(model, tokenizer, options.out / GGUF)
    encoder = TemplateEncoder(tokenizer, options.raw)
    files, dtype, limit = find(options.model), dtype_name(model), position_limit(model)
    device, remote = str(model.device), options.trust_remote_code
    subject = ServedModel(options.model, files, dtype, device, encoder.chats, remote)
    del model
    gc.collect()
    rounds = _rounds(options, encoder, limit)
    requests = [one for each in rounds for one in (*each.warm, *each.requests, *([each.long] if each.long else []))]
    longest = max(len(encoder(request.prompt)) + request.tokens for request in requests)
    return subject, rounds, [_contestant(name, options, subject, longest, encoder) for name in options.drafters]


def _contestant(
    name: str, options: ServingOptions, subject: ServedModel, longest: int, encoder: TemplateEncoder
) -> ServerContestant:
    if name == TRANSFORMERS:
        return servers.transformers(subject)
    if name == LLAMA:
        slots = max(options.clients or [ROWS])
        return servers.llama(subject, options.out / GGUF, slots, longest + SPARE, torch.get_num_threads(), encoder)
    return servers.forerun(subject, None if name in (DEFAULT, RAY) else name, REPLICAS if name == RAY else None)


def _rounds(options: ServingOptions, encoder: TemplateEncoder, limit: int | None) -> list[Round]:
    """Return rounds with different requests: no answer is known from an earlier one."""
    warm = max([1, *options.clients])
    of_each = warm + needed(options.clients, options.arrivals, options.requests)
    longs = _longs(options, encoder.tokenizer, limit)
    requests = iter(_requests(options, encoder, limit, of_each * options.rounds))
    found = []
    for number in range(options.rounds):
        # the first request says how transformers serve samples
        first = [replace(request, temperature=0.0) for request in islice(requests, warm)]
        mine = list(islice(requests, of_each - warm))
        levels = build_levels(options.clients, options.arrivals, options.requests, mine, options.seed + number)
        found.append(Round(first, levels, longs[number] if longs else None, options.checks))
    return found


def build_levels(
    clients: Sequence[int], rates: Sequence[float], least: int, requests: Sequence[LoadRequest], seed: int
) -> list[Level]:
    """Return a round's levels with different requests: ``least`` each, or more for many clients."""
    left = iter(requests)
    closed = [Level("clients", each, list(islice(left, _size(each, least))), seed) for each in clients]
    return [*closed, *(Level("rate", each, list(islice(left, least)), seed) for each in rates)]


def needed(clients: Sequence[int], rates: Sequence[float], least: int) -> int:
    return sum(_size(each, least) for each in clients) + least * len(rates)


def _size(clients: int, least: int) -> int:
    return max(least, CLIENT_TURNS * clients)


def _requests(options: ServingOptions, encoder: TemplateEncoder, limit: int | None, count: int) -> list[LoadRequest]:
    """Return requests of all tasks that have their files; raise ValueError if there are none, or one is too long."""
    tasks = tasks_for(encoder, options)
    chosen = options.named_tasks or [name for name in tasks if name not in LEFT_OUT]
    check_names(chosen, tasks)
    possible = []
    for name in chosen:
        try:
            possible += [name] if tasks[name](1) else []
        except LackingError as lacking:
            say(f"skipped {name}: {lacking}")
    if not possible:
        raise ValueError("no task is left; --tasks names some that need no file, such as json or rag")
    prompts = dict[str, list[str]]()
    for name in possible:
        try:
            prompts[name] = [str(prompt) for prompt in tasks[name](-(-count // len(possible)))]
        except ValueError as error:
            raise ValueError(f"task {name}: {error} (or --requests, --rounds)") from None
        for prompt in prompts[name]:
            _check(f"task {name}", len(encoder(prompt)), limit, max(options.tokens))
    return mixed(prompts, options.tokens, options.temperature, options.seed)


def _longs(options: ServingOptions, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[LoadRequest]:
    if not options.long:
        return []
    _check("--long", options.long, limit, 2)
    texts = Texts.read([options.books] if options.books else (), partial(text_ids, tokenizer))
    texts.check(options.rounds, options.long)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return [
        LoadRequest("long", str(decode(texts.tokens(number, options.long))), 2, 0.0, options.seed)
        for number in range(options.rounds)
    ]


def _check(what: str, tokens: int, limit: int | None, new: int) -> None:
    try:
        check_length(tokens, limit, new)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
