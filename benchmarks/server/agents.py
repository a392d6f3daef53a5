"""How soon an agent's turns begin: a long system prompt with tools, then turns that each add an answer and a result.

    python -m benchmarks server agents --model runs/real/SmolLM2-135M-Instruct --gguf smol-f32.gguf --out runs/agents
    python -m benchmarks server agents --model runs/real/SmolLM2-135M-Instruct --trace 4 --drafters auto,none

Every server gets the same conversation as token ids, so that no template or tokenizer makes a difference; the answers
in it are its own. A contestant's conversation is had twice: cold, and again as another session that finds the first
one's prompts and answers. Servers run one at a time. Writes JSON, Markdown and a plot.

With ``--trace`` the answers in the conversation are recorded tool calls instead, so that all drafters answer the same
prompts. Sessions repeat each other's calls with small differences, as an agent does that works on one project: that is
what drafts gain from, first cold and then warm. Exit status 1 if two drafters answer differently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from transformers import AutoConfig, AutoTokenizer

from benchmarks.reporting.study_report import Delivery, Report
from benchmarks.server import servers
from benchmarks.server.client import PATIENCE, ServerEndpoint
from benchmarks.server.servers import ServedModel, ServerContestant
from forerun.bench.machine import Row, plain_values
from forerun.bench.report import figure
from forerun.cli.options import DebugOptions
from forerun.cli.terminal import say

SHOWN_TURNS = (1, 2, 10)
RULE = "Rule {0}: before you change file {1}, read it, run test {2}, and say in one line what you found.\n"
LINE = "{0:4d}  def part_{1}(value, limit={2}): return check(value, limit) or part_{3}(value)\n"
SESSIONS = ("cold", "warm")
CHANGED = 0.2
"""Chance that an argument or a result's line differs between two sessions of a trace."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions(DebugOptions):
    """An agent's turns on Forerun's server and llama.cpp's: first tokens, tokens per step."""

    model: Annotated[Path, typer.Option(help="The model's folder.")]
    gguf: Annotated[
        Path | None, typer.Option(help="The same weights for llama-server; without it, that is left out.")
    ] = None
    system: Annotated[int, typer.Option(help="Tokens of the system prompt with its tools.", min=100)] = 8000
    tools: Annotated[int, typer.Option(help="In the system prompt.", min=0)] = 20
    turns: Annotated[int, typer.Option(help="Of each session.", min=2)] = 10
    result: Annotated[int, typer.Option(help="Tokens of a tool's result.", min=1)] = 200
    answer: Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1)] = 48
    threads: Annotated[int, typer.Option(help="Of llama-server; OMP_NUM_THREADS is Forerun's.", min=1)] = 1
    drafters: Annotated[str, typer.Option(help="Forerun's, with commas between; its default if empty.")] = ""
    trace: Annotated[int, typer.Option(help="Sessions with recorded tool calls; 0 for own answers.", min=0)] = 0
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/agents")


@dataclass
class AgentConversation:
    """The conversation as token ids, in the form of ChatML or whatever the tokenizer's template writes.

    Args:
        tokenizer: of the model.
        options: how long its parts are.
        session: its number in a trace, which has small differences to others.
    """

    tokenizer: Any
    options: AgentOptions
    session: int = 0

    def __post_init__(self) -> None:
        chance = Random(1)
        rules = "".join(RULE.format(n, chance.randrange(99), chance.randrange(99)) for n in range(self.options.system))
        tools = "\n".join(json.dumps(_tool(n)) for n in range(self.options.tools))
        room = self.options.system - len(self._ids(tools))
        self.messages = [
            {"role": "system", "content": f"You are a coding agent. Your tools:\n{tools}\n{self._cut(rules, room)}"},
            {"role": "user", "content": "Find out why the tests of part_7 fail, and repair it."},
        ]
        self._chance, self._changes = chance, Random(self.session)

    def prompt(self) -> list[int]:
        """The prompt of the next turn."""
        return list(self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False))

    def go_on(self, answer: str) -> None:
        """Add an answer, or a trace's recorded call, and what a tool says to it."""
        numbers = (self._number() for _ in iter(int, 1))
        if self.options.trace:
            given = {"path": f"src/part_{next(numbers)}.py", "pattern": f"def part_{next(numbers)}", "limit": "20"}
            call = {"name": f"tool_{next(numbers) % max(1, self.options.tools)}", "arguments": given}
            answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        lines = "".join(LINE.format(n, *(next(numbers) for _ in range(3))) for n in range(self.options.result))
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": self._cut(lines, self.options.result)},
        ]

    def _number(self) -> int:
        """The next number of a call or a result; one that differs in a part of a trace's later sessions."""
        number, other = self._chance.randrange(500), self._changes.random()
        return self._changes.randrange(500) if self.session and other < CHANGED else number

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut(self, text: str, tokens: int) -> str:
        return str(self.tokenizer.decode(self._ids(text)[: max(1, tokens)]))


def _tool(number: int) -> Row:
    """A tool as a template would write it."""
    names = {"path": "The file's path.", "pattern": "What to look for.", "limit": "The most results."}
    properties = {name: {"type": "string", "description": what} for name, what in names.items()}
    function = {"name": f"tool_{number}", "description": f"Does step {number} of a change.", "parameters": properties}
    return {"type": "function", "function": function}


def run(options: AgentOptions) -> None:
    """Measure all contestants."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    limit = AutoConfig.from_pretrained(options.model).max_position_embeddings
    delivery = Delivery(Report("An agent's turns", plain_values(options)), options.out, "agents", as_json=False)
    rows: list[Row] = []
    for contestant in _contestants(options, limit):
        with servers.started(contestant, False, options.out / f"{contestant.name}.log") as endpoint:
            for number, session in enumerate(_sessions(options)):
                conversation = AgentConversation(tokenizer, options, number if options.trace else 0)
                for row in _session(endpoint, conversation):
                    rows.append({"contestant": contestant.name, "session": session, **row})
                    say(f"{contestant.name}, {session}, turn {row['turn']}: first token after {row['first']:.2f} s")
        delivery.report.add("turns", "How soon an agent's turns start", rows, table(rows))
        delivery.report.plot("turns", lambda path: _plot(rows, path, delivery.report.note))
        delivery.save()
    delivery.end()
    if different := differences(rows) if options.trace else 0:
        say(f"{different} answers differ between drafters")
        raise typer.Exit(1)


def differences(rows: Sequence[Row]) -> int:
    """How many prompts were answered in more than one way."""
    answers: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        answers.setdefault((row["session"], row["turn"]), set()).add(row["text"])
    return sum(len(each) > 1 for each in answers.values())


def _sessions(options: AgentOptions) -> Sequence[str]:
    return SESSIONS if not options.trace else [f"session {number + 1}" for number in range(options.trace)]


def _contestants(options: AgentOptions, positions: int) -> list[ServerContestant]:
    subject = ServedModel(str(options.model), options.model, "float32", "cpu")
    found = [servers.forerun(subject, name.strip() or None) for name in options.drafters.split(",")]
    if options.gguf is not None:
        found.append(servers.llama(subject, options.gguf, 1, positions, options.threads, lambda text: []))
    return found


def _session(endpoint: ServerEndpoint, conversation: AgentConversation) -> Iterator[Row]:
    """The turns of a session: what each took."""
    for turn in range(1, conversation.options.turns + 1):
        prompt = conversation.prompt()
        text, row = _turn(endpoint, prompt, conversation.options.answer)
        yield {"turn": turn, "prompt": len(prompt), "text": text, **row}
        conversation.go_on(text)


def _turn(endpoint: ServerEndpoint, prompt: Sequence[int], most: int) -> tuple[str, Row]:
    """One answer, streamed; seconds to its first text, and to its end from there."""
    body = {"model": endpoint.model, "prompt": list(prompt), "max_tokens": most, "temperature": 0, "stream": True}
    began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    with httpx.stream(
        "POST",
        f"{endpoint.url}/v1/completions",
        json={**body, "stream_options": {"include_usage": True}},
        timeout=PATIENCE,
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            new = "".join(choice.get("text") or "" for choice in chunk["choices"])
            if new and not text:
                first = time.perf_counter() - began
            text += new
    ended = time.perf_counter() - began
    steps, tokens = usage.get("forerun", {}).get("steps"), usage.get("completion_tokens", 0)
    return text, {
        "first": first or ended,
        "decoding": ended - (first or ended),
        "tokens": tokens,
        "tokens_per_step": tokens / steps if steps else None,
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }


def table(rows: Sequence[Row]) -> str:
    """A line for each contestant and session."""
    last = max(row["turn"] for row in rows)
    turns = [turn for turn in SHOWN_TURNS if turn <= last]
    head = [f"first token, turn {turn}" for turn in turns] + [
        f"turns 2 to {last} / turn 1",
        "tokens per step",
        "tokens/s",
        "/ none",
    ]
    lines = ["| server | session | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(head)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["contestant"], row["session"]), []).append(row)
    for (contestant, session), own in groups.items():
        cold = next(row["first"] for row in rows if row["contestant"] == contestant and row["turn"] == 1)
        later = [row["first"] / cold for row in own if row["turn"] > 1]
        steps = [row["tokens_per_step"] for row in own if row["tokens_per_step"]]
        speed, plain = _speed(own), groups.get(("forerun none", session))
        cells = [f"{next(row['first'] for row in own if row['turn'] == turn):.2f} s" for turn in turns]
        cells.append(f"{100 * min(later):.1f} to {100 * max(later):.1f} %")
        cells += [f"{sum(steps) / len(steps):.2f}" if steps else "not told", f"{speed:.1f}"]
        cells.append(f"{speed / _speed(plain):.2f}" if plain else "–")
        lines.append(f"| {contestant} | {session} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _speed(rows: Sequence[Row]) -> float:
    """Tokens per second after the first."""
    return float(sum(row["tokens"] for row in rows) / max(1e-9, sum(row["decoding"] for row in rows)))


def _plot(rows: Sequence[Row], path: Path, note: str) -> None:
    """Draw the seconds to the first token by turn."""
    title = "How soon an agent's turns start"
    sessions = list(dict.fromkeys(row["session"] for row in rows))
    with figure(path, 1, len(sessions), title=title, note=note, figsize=(9, 3.6), sharey=True, squeeze=False) as (
        _,
        all_axes,
    ):
        axes = all_axes[0]
        for axis, session in zip(axes, sessions, strict=True):
            for contestant in dict.fromkeys(row["contestant"] for row in rows):
                own = [row for row in rows if (row["contestant"], row["session"]) == (contestant, session)]
                axis.plot([row["turn"] for row in own], [row["first"] for row in own], marker="o", label=contestant)
            axis.set(title=session, xlabel="turn", yscale="log")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("seconds to the first token")
        axes[0].legend(fontsize=8, frameon=False)
