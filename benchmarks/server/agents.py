"""``python -m benchmarks server agents``: how soon an agent's turns start, after a long system prompt with tools.

Each turn adds an answer and a tool's result. Servers get the conversation as token ids, one server at a time, cold and
then as a second session that finds the first one's prompts and answers. With ``--trace``, answers in the conversation
are recorded tool calls, so that all drafters get the same prompts, and sessions repeat each other's calls with small
differences. Exit status 1 if two drafters then answer differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from transformers import AutoConfig, AutoTokenizer

from benchmarks.reporting.common_options import ListOptions, list_option, names_of
from benchmarks.reporting.study_report import Report, listing
from benchmarks.server import client, servers
from benchmarks.server.client import Level, LoadRequest, ServerEndpoint, parsed
from benchmarks.server.servers import ServedModel, ServerError
from forerun.bench.machine import Row
from forerun.bench.report import figure
from forerun.cli.options import DebugOptions, Out
from forerun.cli.terminal import say

SHOWN_TURNS = (1, 2, 10)
RULE = "Rule {0}: before you change file {1}, read it, run test {2}, and say in one line what you found.\n"
LINE = "{0:4d}  def part_{1}(value, limit={2}): return check(value, limit) or part_{3}(value)\n"
SESSIONS = ("cold", "warm")
CHANGED = 0.2  # chance that an argument or a result's line differs between two sessions of a trace


@dataclass(frozen=True, kw_only=True)
class AgentOptions(ListOptions, DebugOptions):
    """An agent's turns on Forerun's server and llama.cpp's: first tokens, tokens per step.

    Writes JSON, Markdown and a plot. With --trace, exit status 1 if two drafters answer differently.
    """

    model: Annotated[Path, typer.Option(help="The model's folder.")]
    gguf: Annotated[Path | None, typer.Option(help="Equal weights for llama-server; left out without it.")] = None
    system: Annotated[int, typer.Option(help="Tokens of the system prompt with its tools.", min=100)] = 8000
    tools: Annotated[int, typer.Option(help="In the system prompt.", min=0)] = 20
    turns: Annotated[int, typer.Option(help="Of each session.", min=2)] = 10
    result: Annotated[int, typer.Option(help="Tokens of a tool's result.", min=1)] = 200
    answer: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 48
    threads: Annotated[int, typer.Option(help="Of llama-server; OMP_NUM_THREADS is Forerun's.", min=1)] = 1
    drafters: Annotated[str, list_option("Model", "Forerun's; its default if empty.")] = ""
    trace: Annotated[int, typer.Option(help="Sessions with recorded tool calls; 0 for own answers.", min=0)] = 0
    out: Out = Path("runs/agents")

    names = names_of("drafters")


@dataclass
class AgentConversation:
    """The conversation as token ids, by the tokenizer's template; ``session`` is its number in a trace."""

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
        return list(self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False))

    def go_on(self, answer: str) -> None:
        """Add an answer, or a trace's recorded call instead, and the tool's result."""
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
        """Return the next number of a call or a result, sometimes another one in a trace's later sessions."""
        number, other = self._chance.randrange(500), self._changes.random()
        return self._changes.randrange(500) if self.session and other < CHANGED else number

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut(self, text: str, tokens: int) -> str:
        return str(self.tokenizer.decode(self._ids(text)[: max(1, tokens)]))


def _tool(number: int) -> Row:
    names = {"path": "The file's path.", "pattern": "What to look for.", "limit": "The most results."}
    properties = {name: {"type": "string", "description": what} for name, what in names.items()}
    function = {"name": f"tool_{number}", "description": f"Does step {number} of a change.", "parameters": properties}
    return {"type": "function", "function": function}


def run(options: AgentOptions) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    limit = AutoConfig.from_pretrained(options.model).max_position_embeddings
    report = Report.of("An agent's turns", options, "agents")
    subject = ServedModel(str(options.model), options.model, "float32", "cpu")
    contestants = [servers.forerun(subject, name or None) for name in options.names]
    if options.gguf is not None:
        contestants.append(servers.llama(subject, options.gguf, 1, limit, options.threads, lambda text: []))
    sessions = SESSIONS if not options.trace else [f"session {number + 1}" for number in range(options.trace)]
    rows: list[Row] = []
    for contestant in contestants:
        with servers.started(contestant, False, options.out) as endpoint:
            for number, session in enumerate(sessions):
                conversation = AgentConversation(tokenizer, options, number if options.trace else 0)
                for row in _session(endpoint, conversation):
                    rows.append({"contestant": contestant.name, "session": session, **row})
                    say(f"{contestant.name}, {session}, turn {row['turn']}: first token after {row['first']:.2f} s")
        report.add("turns", "How soon an agent's turns start", rows, table(rows))
        report.plot("turns", lambda path: _plot(rows, path, report.note))
        report.save()
    report.end()
    if different := differences(rows) if options.trace else 0:
        say(f"{different} answers differ between drafters")
        raise typer.Exit(1)


def differences(rows: Sequence[Row]) -> int:
    """Count the prompts that were answered in more than one way."""
    answers: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        answers.setdefault((row["session"], row["turn"]), set()).add(row["text"])
    return sum(len(each) > 1 for each in answers.values())


def _session(endpoint: ServerEndpoint, conversation: AgentConversation) -> Iterator[Row]:
    """Yield a row for each turn: seconds to the first text, and from there to the end."""
    for turn in range(1, conversation.options.turns + 1):
        prompt = conversation.prompt()
        request = LoadRequest("agent", prompt, conversation.options.answer, 0.0, 0)
        answer = parsed(client.run(endpoint, Level("clients", 1, [request]), {}).replies[0])
        if answer.error is not None:
            raise ServerError(f"turn {turn}: {answer.error}")
        steps = answer.usage.get("forerun", {}).get("steps")
        yield {
            "turn": turn, "prompt": len(prompt), "text": answer.text, "first": answer.first,
            "decoding": answer.seconds - answer.first, "tokens": answer.tokens,
            "tokens_per_step": answer.tokens / steps if steps else None,
            "cached": (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        }  # fmt: skip
        conversation.go_on(answer.text)


def table(rows: Sequence[Row]) -> str:
    last = max(row["turn"] for row in rows)
    turns = [turn for turn in SHOWN_TURNS if turn <= last]
    columns = {"contestant": "server", "session": "session", **{f"{n}": f"first token, turn {n}" for n in turns}}
    columns |= {
        "later": f"turns 2 to {last} / turn 1", "steps": "tokens per step", "speed": "tokens/s", "ratio": "/ none",
    }  # fmt: skip
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["contestant"], row["session"]), []).append(row)
    lines = []
    for (contestant, session), own in groups.items():
        cold = next(row["first"] for row in rows if row["contestant"] == contestant and row["turn"] == 1)
        later = [row["first"] / cold for row in own if row["turn"] > 1]
        steps = [row["tokens_per_step"] for row in own if row["tokens_per_step"]]
        plain = groups.get(("forerun none", session))
        lines.append(
            {"contestant": contestant, "session": session, "speed": f"{_speed(own):.1f}"}
            | {f"{row['turn']}": f"{row['first']:.2f} s" for row in own if row["turn"] in turns}
            | {"later": f"{100 * min(later):.1f} to {100 * max(later):.1f} %",
               "steps": f"{sum(steps) / len(steps):.2f}" if steps else None,
               "ratio": f"{_speed(own) / _speed(plain):.2f}" if plain else None}
        )  # fmt: skip
    return listing(lines, columns)


def _speed(rows: Sequence[Row]) -> float:
    return float(sum(row["tokens"] for row in rows) / max(1e-9, sum(row["decoding"] for row in rows)))


def _plot(rows: Sequence[Row], path: Path, note: str) -> None:
    sessions = list(dict.fromkeys(row["session"] for row in rows))
    how: Row = {"title": "How soon an agent's turns start", "note": note, "figsize": (9, 3.6)}
    with figure(path, 1, len(sessions), **how, sharey=True, squeeze=False) as (_, [axes]):
        for axis, session in zip(axes, sessions, strict=True):
            for contestant in dict.fromkeys(row["contestant"] for row in rows):
                own = [row for row in rows if (row["contestant"], row["session"]) == (contestant, session)]
                axis.plot([row["turn"] for row in own], [row["first"] for row in own], marker="o", label=contestant)
            axis.set(title=session, xlabel="turn", yscale="log")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("seconds to the first token")
        axes[0].legend(fontsize=8, frameon=False)
