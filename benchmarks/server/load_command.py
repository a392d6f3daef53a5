"""``python -m benchmarks server load``: servers under load."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedTokenizerBase

from benchmarks.long_context.texts import Texts
from benchmarks.peers.weights import check as check_weights
from benchmarks.peers.weights import write as write_weights
from benchmarks.reporting.common_options import (
    BENCHMARKS,
    SourceOptions,
    list_option,
    numbers,
)
from benchmarks.reporting.study_report import Delivery, Report
from benchmarks.server import levels, servers
from benchmarks.server import load_rows as rows
from benchmarks.server.client import ServerEndpoint
from benchmarks.server.load_bench import Round, ServeBench
from benchmarks.server.load_report import fill
from benchmarks.server.load_requests import LoadRequest, mixed
from benchmarks.server.servers import ServedModel, ServerContestant
from benchmarks.tasks.task_prompts import LackingError, Tasks, check_names
from benchmarks.tasks.task_sets import tasks_for
from forerun.bench.journal import Journal, Turn, about
from forerun.bench.machine import plain_values
from forerun.bench.prompts_file import TemplateEncoder, check_length
from forerun.cli.commands import FAILED
from forerun.cli.models import encoder as plain_encoder
from forerun.cli.models import load_target
from forerun.cli.options import (
    ModelOptions,
    Out,
    OutputOptions,
    option,
)
from forerun.cli.terminal import say
from forerun.core.install_command import install_command
from forerun.decoding.recipes import check_drafter
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import find

TRANSFORMERS, LLAMA, DEFAULT, RAY = "transformers", "llama.cpp", "default", "ray"
REPLICAS = 2
"""Of the default on Ray, in the contestant of this name."""
GGUF, ROWS = "model.gguf", 16
"""The file that is written for llama.cpp's server, and its slots where clients come by chance."""
SPARE = 64
"""Tokens of a slot in llama.cpp's server beyond the longest text."""
_LOAD = "Load"


@dataclass(frozen=True)
class ServingOptions(OutputOptions, SourceOptions, ModelOptions):
    """Servers under load: forerun serve with and without drafts, and those of transformers and llama.cpp.

    Each has a process of its own on a free port of this computer, one at a time; the clients are in this process. All
    answer the same requests; rounds take turns and medians count. Texts under load must equal the texts alone, and
    Forerun must answer all that is asked, or the exit status is 1. Writes JSON, Markdown and plots after each load.
    """

    contestants: Annotated[
        str,
        list_option(
            "--contestants",
            "Model",
            f"Drafters of forerun serve, {DEFAULT} for its own, {RAY} for that in {REPLICAS} replicas, "
            f"{TRANSFORMERS} (with continuous batching) and {LLAMA}.",
        ),
    ] = f"none,{DEFAULT},{TRANSFORMERS}"
    concurrency: Annotated[
        str, list_option("--concurrency", _LOAD, "Clients that wait for their answers; 0 for none.")
    ] = "1,4,16"
    rates: Annotated[str, list_option("--rates", _LOAD, "Requests per second that arrive by chance; 0 for none.")] = (
        "4,16"
    )
    requests: Annotated[int, option("--requests", panel=_LOAD, help="Of each load; four a client at least.", min=1)] = (
        32
    )
    long: Annotated[
        int, option("--long", panel=_LOAD, metavar="TOKENS", help="Read so long a prompt beside streams, too.", min=0)
    ] = 0
    rounds: Annotated[int, option("--rounds", panel=_LOAD, help="Times each is measured.", min=1)] = 3
    tasks: Annotated[str | None, list_option("--tasks", "Text", "Those of tasks; default: all but copy.")] = None
    lengths: Annotated[str, list_option("--lengths", "Text", "Tokens of answers, at most; drawn for each request.")] = (
        "32,64,128"
    )
    temperature: Annotated[
        float, option("--temperature", "-t", panel="Text", help="Of every second turn through the tasks.", min=0.0)
    ] = 0.8
    seed: Annotated[int, option("--seed", panel="Text", help="Of what is drawn, and of the arrivals.")] = 0
    checks: Annotated[
        int, option("--checks", panel="Text", help="Greedy texts of a round that are asked for alone, too.", min=0)
    ] = 8
    resume: Annotated[
        bool, option("--resume", panel="Output", help="Keep the rounds that --out has; measure the others.")
    ] = False
    out: Out = Path("runs/serve")

    def __post_init__(self) -> None:
        numbers("--lengths", self.lengths, int, 1)
        if not (self.clients or self.arrivals):
            raise ValueError("--concurrency and --rates are both 0; give a load")
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"--contestants is {self.contestants!r}; each may be there once")

    @property
    def clients(self) -> list[int]:
        """Of the closed loops."""
        return [each for each in numbers("--concurrency", self.concurrency, int, 0) if each]

    @property
    def arrivals(self) -> list[float]:
        """Rates of the open loops, in requests per second."""
        return [each for each in numbers("--rates", self.rates, float, 0.0) if each]

    @property
    def drafters(self) -> list[str]:
        """Names of contestants."""
        return [name.strip() for name in self.contestants.split(",")]


NEEDED = ("httpx", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "llguidance")
LEFT_OUT = ("copy",)
"""Tasks that are not asked unless they are named: to repeat a passage is no typical use."""


def run(options: ServingOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots; exit status 1 if load changed a text, or a
    request was not answered.

    Raises:
        ValueError: for what cannot be asked or served.
        ServerError: if a server does not start, or answers nothing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"server load needs {', '.join(missing)}; install them by: {install_command('serve,bench')}")
    for name in options.drafters:
        if name not in (DEFAULT, RAY, TRANSFORMERS, LLAMA):
            check_drafter(name)
    if RAY in options.drafters and importlib.util.find_spec("ray") is None:
        raise ValueError(f"{RAY} needs Ray Serve; install it by: {install_command('ray')}")
    if LLAMA in options.drafters and importlib.util.find_spec("xllamacpp") is None:
        raise ValueError(f"{LLAMA} is not installed; install it by: {install_command('peers')}")
    subject, rounds, longest, encoder = _prepared(options)
    report = Report("Servers under load", plain_values(options) | {"dtype": subject.dtype})
    delivery = Delivery(report, options.out, "serve", options.json)

    def save(turns: Sequence[Turn], whole: bool) -> None:
        fill(report, turns, rounds, whole)
        delivery.save()

    shared = about(options.model, subject.dtype, subject.device, BENCHMARKS)
    journal = Journal(options.out / "serve-turns.jsonl", shared, options.resume)
    contestants = _contestants(options, subject, longest, encoder)

    def start(contestant: ServerContestant) -> AbstractContextManager[ServerEndpoint]:
        log = options.out / "logs" / f"{contestant.name.replace(' ', '-')}.log"
        return servers.started(contestant, subject.chats, log)

    turns = ServeBench(contestants, rounds, start, journal, save).run()
    delivery.end()
    if found := rows.wrong(rows.text_rows(turns, rounds)) + rows.unanswered(turns):
        say("\n".join(found))
        raise typer.Exit(FAILED)


def _prepared(options: ServingOptions) -> tuple[ServedModel, list[Round], int, TemplateEncoder]:
    """What is served, all that is asked, the tokens of the longest text, and what makes tokens of prompts. The model is
    read to be checked, and to be written for llama.cpp; then it is forgotten."""
    model, tokenizer = load_target(options)
    if LLAMA in options.drafters:
        check_weights(model, tokenizer, None)
        options.out.mkdir(parents=True, exist_ok=True)
        write_weights(model, tokenizer, options.out / GGUF)
    encoder = TemplateEncoder(tokenizer, options.raw)
    subject = ServedModel(
        options.model,
        find(options.model),
        dtype_name(model),
        str(model.device),
        encoder.chats,
        options.trust_remote_code,
    )
    limit = position_limit(model)
    del model
    gc.collect()
    rounds = _rounds(options, encoder, limit)
    asked = [one for each in rounds for one in (*each.warm, *each.requests, *([each.long] if each.long else []))]
    longest = max(len(encoder(request.prompt)) + request.tokens for request in asked)
    return subject, rounds, longest, encoder


def _rounds(options: ServingOptions, encoder: TemplateEncoder, limit: int | None) -> list[Round]:
    """Each round has requests of its own: none is known from an earlier one."""
    warm = max([1, *options.clients])
    of_each = warm + levels.needed(options.clients, options.arrivals, options.requests)
    longs = _longs(options, encoder.tokenizer, limit)
    requests = _requests(options, encoder, limit, of_each * options.rounds)
    found = []
    for number in range(options.rounds):
        mine = requests[number * of_each : (number + 1) * of_each]
        seed = options.seed + number
        built = levels.build(options.clients, options.arrivals, options.requests, mine[warm:], seed)
        # the first request says how transformers serve samples
        first = [replace(request, temperature=0.0) for request in mine[:warm]]
        found.append(Round(first, built, longs[number] if longs else None, options.checks))
    return found


def _requests(options: ServingOptions, encoder: TemplateEncoder, limit: int | None, count: int) -> list[LoadRequest]:
    """So many requests; tasks that lack something are left out, and named.

    Raises:
        ValueError: for an unknown task, if none is left, or for a prompt that is too long for the model.
    """
    tasks = tasks_for(encoder, options)
    default = [name for name in tasks if name not in LEFT_OUT]
    names = default if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    check_names(names, tasks)
    can = [name for name in names if _can(name, tasks)]
    if not can:
        raise ValueError("no task is left; --tasks names some that need no file, such as json or rag")
    prompts = {name: _drawn(name, tasks, -(-count // len(can))) for name in can}
    lengths = [int(each) for each in options.lengths.split(",")]
    for name, found in prompts.items():
        for prompt in found:
            _check(f"task {name}", len(encoder(prompt)), limit, max(lengths))
    return mixed(prompts, lengths, options.temperature, options.seed)


def _can(name: str, tasks: Tasks) -> bool:
    try:
        tasks[name](1)
    except LackingError as lacking:
        say(f"skipped {name}: {lacking}")
        return False
    return True


def _drawn(name: str, tasks: Tasks, count: int) -> list[str]:
    try:
        return [str(prompt) for prompt in tasks[name](count)]
    except ValueError as error:
        raise ValueError(f"task {name}: {error} (or --requests, --rounds)") from None


def _longs(options: ServingOptions, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[LoadRequest]:
    """A long prompt for each round, if one is wanted."""
    if not options.long:
        return []
    _check("--long", options.long, limit, 2)
    texts = Texts.read([options.books] if options.books else (), plain_encoder(tokenizer))
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


def _contestants(
    options: ServingOptions, subject: ServedModel, longest: int, encoder: TemplateEncoder
) -> list[ServerContestant]:
    """In the order of the options."""
    found = []
    for name in options.drafters:
        if name == TRANSFORMERS:
            found.append(servers.transformers(subject))
        elif name == LLAMA:
            slots = max(options.clients or [ROWS])
            threads = torch.get_num_threads()
            found.append(servers.llama(subject, options.out / GGUF, slots, longest + SPARE, threads, encoder))
        elif name == RAY:
            found.append(servers.forerun(subject, None, REPLICAS))
        else:
            found.append(servers.forerun(subject, None if name == DEFAULT else name))
    return found
