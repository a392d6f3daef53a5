"""``python -m benchmarks``: the papers' tables, studies, load tests and predictions. Not part of the package.

A command is a dataclass of options and ``run(options)`` in one module, imported when the command is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from forerun.cli.commands import command

COMMANDS: dict[str, tuple[str, str]] = {
    "tasks": ("tasks.tasks_command:TaskOptions", "Forerun beside transformers and other engines, on six tasks."),
    "edit": ("studies.edit_picture:EditOptions", "The speed of one code edit over its answer, as a picture."),
    "peers": ("peers.peers_command:PeersOptions", "Plain decoding and prompts beside llama.cpp and OpenVINO, in every GGUF format."),
    "specbench": ("studies.specbench:SpecBenchOptions", "Spec-Bench: tokens per step and speed-up by category."),
    "papers lookahead": ("papers.lookahead:LookaheadOptions", "The Lookahead paper's forms of a draft beside Forerun's."),
    "papers triforce": ("papers.triforce:TriforceOptions", "TriForce's tables: decoding after long prompts."),
    "server load": ("server.load_command:ServingOptions", "Servers under load, with and without drafts."),
    "server attack": ("server.attack:AttackOptions", "Two tenants, of whom one attacks."),
    "server agents": ("server.agents:AgentOptions", "The time to the first token of an agent's turns, beside llama-server."),
    "capacity": ("capacity.capacity:CapacityOptions", "Memory and speed of a model on given devices, and the tables of docs/scaling.md."),
    "models": ("studies.models:ModelsOptions", "How each family of models runs, and what is refused: docs/results/models.md."),
    "passes": ("studies.passes:PassesOptions", "What passes of 1 to 64 tokens cost, beside the memory's bandwidth."),
    "heads": ("studies.head_costs:HeadsOptions", "What a trained head costs, in plain passes of its target."),
    "activations": ("studies.activations:ActivationsOptions", "Divergence of a GGUF model's distributions by quantised activations."),
    "gpu": ("gpu.gpu_command:GpuOptions", "Forerun on this machine's GPU: exactness, bandwidth, passes, long contexts."),
    "gpu-host": ("gpu.host_time:HostTimeOptions", "What a step on a GPU costs the host, measured without a GPU."),
    "exact-texts": ("studies.exact_texts:ExactTextsOptions", "How many outputs differ, in any token, between any drafter and none."),
    "decisions": ("studies.decisions:DecisionOptions", "What the planner decides on a simulated clock, beside each source alone."),
    "step-trace": ("studies.step_trace:TraceOptions", "How much Python a step runs: files, functions and lines."),
    "constants": ("studies.constants:ConstantsOptions", "How much each hand-set constant matters."),
    "proposers": ("studies.proposers:ProposersOptions", "Forerun's proposer for vLLM beside prompt lookup, replayed."),
    "train-bundled": ("training.train:TrainOptions", "Train the bundled models."),
    "evaluate-bundled": ("training.evaluate:EvaluateOptions", "Evaluate the bundled models as MODEL_CARD.md shows it."),
    "learn-evidence": ("training.learn_evidence:EvidenceOptions", "Train the trie's initial weights: src/forerun/trie/prior.npy."),
    "train-head": ("training.train_head:HeadOptions", "Train an EAGLE-3 head or MTP layer for a model, from texts that it wrote."),
    "evaluate-head": ("training.evaluate_head:EvaluateHeadOptions", "A trained head beside the trie, alone and in auto."),
    "learn-recycled": ("training.learn_recycled:RecycledOptions", "Train the initial weights of recycled logits, in the same file."),
    "update-pages": ("reporting.update_pages:UpdateOptions", "Put the last measured tables into README.md and docs/."),
}  # fmt: skip
"""Where each command's options are, and what it measures."""
GROUPS = {
    "papers": "The Lookahead and TriForce papers.",
    "server": "Servers under load, attacked, and with an agent's turns.",
}


class LazyGroup(TyperGroup):
    """Commands whose names begin with ``prefix``; a module is imported when its command is called."""

    prefix = ""

    def list_commands(self, ctx: Any) -> list[str]:
        names = (name.removeprefix(self.prefix) for name in COMMANDS if name.startswith(self.prefix))
        return list(dict.fromkeys(name.split()[0] for name in names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = self.prefix + cmd_name
        if name in GROUPS:
            return typer.main.get_command(_app(f"{name} "))
        return _command(cmd_name, COMMANDS[name][0]) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known: Mapping[str, str] = {name: text for name, (_, text) in COMMANDS.items()} | GROUPS
        with formatter.section("Commands"):
            formatter.write_dl([(name, known[self.prefix + name]) for name in self.list_commands(ctx)])


def _command(name: str, target: str) -> Any:
    """Return the command whose options are at ``module:class``; ``run`` is in that module."""
    module, _, options = target.partition(":")
    found: Any = getattr(importlib.import_module(f"benchmarks.{module}"), options)
    one = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    command(one, name, found, f"benchmarks.{module}")
    return typer.main.get_command(one)


def _app(prefix: str) -> typer.Typer:
    group = type("LazyGroup", (LazyGroup,), {"prefix": prefix})
    made = typer.Typer(
        name="benchmarks", cls=group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        rich_markup_mode=None, help=GROUPS.get(prefix.strip(), "The papers' tables, studies, load tests and "
        "predictions."),
    )  # fmt: skip
    made.callback()(lambda: None)
    return made


app = _app("")

if __name__ == "__main__":
    app()
