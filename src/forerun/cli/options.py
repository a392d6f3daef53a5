"""Every command's options as a frozen dataclass: one declaration for the command line, its help and the checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from forerun.cli.memory_options import MemoryOptions
from forerun.core.long_context import LongContextConfig, Policy, Sparse

Dtype = Literal["auto", "float32", "bfloat16", "float64", "stored"]

_MODEL, _TEXT, _SAMPLING, _OUTPUT = "Model", "Text", "Sampling", "Output"
_DRAFTER = (
    "How to draft: auto, trie, lookup, none; for long contexts low-rank, triforce-trie, triforce; see docs/usage.md."
)
_LONG = "Long contexts"
_SOURCE = "A model's folder, a GGUF file, a hub name that is in the local cache, or 'bundled'."


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


Model = Annotated[str, _option("--model", "-m", panel=_MODEL, help=_SOURCE, metavar="PATH|NAME")]
Device = Annotated[str, _option("--device", panel=_MODEL, help="auto, cpu, cuda, cuda:1, ...")]
Trust = Annotated[bool, _option("--trust-remote-code", panel=_MODEL, help="Run code that comes with the model.")]
Budget = Annotated[int | None, _option("--budget", panel=_MODEL, help="Most drafted tokens a step.", min=1)]
Drafter = Annotated[str, _option("--drafter", "-d", panel=_MODEL, help=_DRAFTER)]
_DTYPE = "Of the weights; auto is the file's, and float32 for GGUF files, which stored leaves as they are."
AnyDtype = Annotated[Dtype, _option("--dtype", panel=_MODEL, help=_DTYPE)]
Namespace = Annotated[str, _option("--namespace", panel=_MODEL, help="Whose outputs may be drafted.")]
System = Annotated[str | None, _option("--system", panel=_TEXT, help="What the chat model is told first.")]
MaxNewTokens = Annotated[int, _option("--max-new-tokens", "-n", panel=_TEXT, help="Most tokens.", min=1)]
Stop = Annotated[list[str] | None, _option("--stop", panel=_TEXT, help="End behind this text; may be repeated.")]
Penalty = Annotated[float | None, _option("--repetition-penalty", panel=_TEXT, help="Above 1: repeat less.")]
Temperature = Annotated[float, _option("--temperature", "-t", panel=_SAMPLING, help="0 is greedy.", min=0.0)]
TopK = Annotated[int | None, _option("--top-k", panel=_SAMPLING, help="Keep the k likeliest.", min=0)]
TopP = Annotated[float | None, _option("--top-p", panel=_SAMPLING, help="Keep the likeliest with mass p.")]
MinP = Annotated[float | None, _option("--min-p", panel=_SAMPLING, help="Keep p times the best and up.")]
Verification = Annotated[
    Literal["coupled", "rejection"], _option("--verification", panel=_SAMPLING, help="How samples are verified.")
]
Seed = Annotated[int | None, _option("--seed", panel=_SAMPLING, help="Of the noise; drawn and reported by default.")]
Json = Annotated[bool, _option("--json", panel=_OUTPUT, help="One JSON object on stdout and nothing else.")]
Debug = Annotated[bool, _option("--debug", panel=_OUTPUT, help="Show the traceback of an error.")]
Colour = Annotated[
    bool | None, _option("--color/--no-color", panel=_OUTPUT, help="Colour drafted text; by default in a terminal.")
]

Paced = Annotated[bool, _option("--paced/--fixed", panel=_LONG, help="Draft as many of these as pay, or always all.")]


@dataclass(frozen=True)
class LongOptions:
    """Options of the drafters for long contexts; other drafters ignore them."""

    draft_model: Annotated[
        str | None,
        _option("--draft-model", panel=_LONG, help="The small model, like --model; with bundled, the bundled one."),
    ] = None
    gamma1: Annotated[int, _option("--gamma1", panel=_LONG, help="Tokens the small model drafts at a time.", min=1)] = (
        LongContextConfig.gamma1
    )
    gamma2: Annotated[int, _option("--gamma2", panel=_LONG, help="Tokens the target verifies at a time.", min=1)] = (
        LongContextConfig.gamma2
    )
    paced: Paced = LongContextConfig.paced
    sparse: Annotated[
        Sparse,
        _option("--sparse", panel=_LONG, help="The target's cache in triforce, triforce-trie and triforce-auto."),
    ] = LongContextConfig.sparse
    cache_budget: Annotated[
        int, _option("--cache-budget", panel=_LONG, help="Tokens in a sparse cache of the target.", min=1)
    ] = LongContextConfig.cache_budget
    chunk: Annotated[int, _option("--chunk", panel=_LONG, help="Tokens retrieved together.", min=1)] = (
        LongContextConfig.chunk
    )
    refresh: Annotated[Policy, _option("--refresh", panel=_LONG, help="When chunks are chosen anew.")] = (
        LongContextConfig.refresh
    )
    sinks: Annotated[int, _option("--sinks", panel=_LONG, help="First tokens a streaming cache keeps.", min=0)] = (
        LongContextConfig.sinks
    )
    window: Annotated[int, _option("--window", panel=_LONG, help="Last tokens the small model sees.", min=1)] = (
        LongContextConfig.window
    )

    def settings(self, draft_model: Any = None) -> LongContextConfig:
        """The options as ``LongContextConfig``."""
        names = ("gamma1", "gamma2", "paced", "sparse", "cache_budget", "chunk", "refresh", "sinks", "window")
        return LongContextConfig(draft_model, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class GenerateOptions(MemoryOptions, LongOptions):
    """Continue a prompt; accepted drafts are shown in colour.

    Temperature 0, the default, is greedy decoding. The text is the model's own, the same with and without a drafter.
    """

    model: Model = "bundled"
    drafter: Drafter = "auto"
    budget: Budget = None
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    trie_file: Annotated[
        Path | None, _option("--trie-file", panel=_MODEL, help="Load the trie, if the file is there; save it after.")
    ] = None
    warm: Annotated[
        list[Path] | None, _option("--warm", panel=_MODEL, help="A text file to draft from; may be repeated.")
    ] = None
    kv_store: Annotated[
        Path | None, _option("--kv-store", panel=_MODEL, help="A folder that keeps what was read of prompts.")
    ] = None
    kv_store_limit: Annotated[
        str | None, _option("--kv-store-limit", panel=_MODEL, help="Of bytes there, such as 20GiB.", metavar="SIZE")
    ] = None
    namespace: Namespace = "default"
    prompt: Annotated[str | None, _option("--prompt", "-p", panel=_TEXT, help="The text to continue or answer.")] = None
    prompt_file: Annotated[
        str | None,
        _option("--prompt-file", "-f", panel=_TEXT, help="Its file, or - for stdin; a final newline is dropped."),
    ] = None
    chat: Annotated[
        bool | None,
        _option(
            "--chat/--raw", panel=_TEXT, help="Answer, or continue; by default answer if the model has a chat template."
        ),
    ] = None
    system: System = None
    context: Annotated[
        int | None, _option("--context", panel=_TEXT, help="Keep this many tokens of the prompt, the last.", min=1)
    ] = None
    max_new_tokens: MaxNewTokens = 256
    stop: Stop = None
    repetition_penalty: Penalty = None
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    seed: Seed = None
    verification: Verification = "coupled"
    stats: Annotated[bool, _option("--stats", panel=_OUTPUT, help="A table of steps and times, on stderr.")] = False
    json: Json = False
    color: Colour = None
    debug: Debug = False

    def __post_init__(self) -> None:
        check_sampling(self)
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("give either --prompt or --prompt-file (- reads stdin)")
        if self.system is not None and self.chat is False:
            raise ValueError("--system is for chat models, and --raw turns that off")
        self.sizes()
        if self.trie_file is not None:
            _check_trie_file(self.trie_file, self.drafter)


@dataclass(frozen=True)
class AuditOptions(LongOptions):
    """Check on your own model that drafting changes nothing.

    Compares greedy text with transformers' own generate, sampled text with plain sampling of the same seeds, and a
    batch with each of its prompts alone. Exit status 1 if any text differs by more than rounding, or a drafter never
    drafted. Drafts have fixed lengths unless --paced is given, so that they are made although they may not pay.
    """

    model: Model = "bundled"
    drafter: Annotated[
        list[str] | None, _option("--drafter", "-d", panel=_MODEL, help=f"{_DRAFTER} May be repeated; default: all.")
    ] = None
    budget: Budget = None
    dtype: Annotated[
        Dtype | None,
        _option("--dtype", panel=_MODEL, help="Default: float64 under 100 million parameters, else the file's."),
    ] = None
    device: Device = "auto"
    trust_remote_code: Trust = False
    prompt: Annotated[list[str] | None, _option("--prompt", "-p", panel=_TEXT, help="May be repeated.")] = None
    prompt_file: Annotated[
        list[str] | None, _option("--prompt-file", "-f", panel=_TEXT, help="A file with one prompt; may be repeated.")
    ] = None
    max_new_tokens: Annotated[int, _option("--max-new-tokens", "-n", panel=_TEXT, help="Per text.", min=1)] = 64
    seeds: Annotated[int, _option("--seeds", panel=_SAMPLING, help="Sampled texts per prompt.", min=0)] = 1
    paced: Paced = False
    temperature: Annotated[float, _option("--temperature", "-t", panel=_SAMPLING, help="Of these, above 0.")] = 1.0
    json: Json = False
    debug: Debug = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"--temperature is {self.temperature}; it must be above 0 (greedy is audited in any case)")
        if self.model != "bundled" and not self.prompt and not self.prompt_file:
            raise ValueError("give --prompt or --prompt-file: only the bundled model has prompts of its own")


@dataclass(frozen=True)
class DemoOptions:
    """Decode one prompt of each kind plainly and with the trie: the same text, timed side by side."""

    kind: Annotated[
        list[str] | None, _option("--kind", "-k", panel=_TEXT, help="rag, code, json, maths or prose; default: all.")
    ] = None
    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", "-n", panel=_TEXT, help="At most this many for each.", min=1)
    ] = None
    repeats: Annotated[int, _option("--repeats", panel=_TEXT, help="Runs; the medians count.", min=1)] = 3
    warm: Annotated[
        bool, _option("--warm", panel=_TEXT, help="Let the trie remember earlier runs; else each starts empty.")
    ] = False
    json: Json = False
    color: Colour = None
    debug: Debug = False


def check_sampling(options: Any) -> None:
    """Refuse sampling options for greedy decoding.

    Raises:
        ValueError: with the options.
    """
    given = [name for name in ("top_k", "top_p", "min_p", "seed") if getattr(options, name) is not None]
    if options.temperature == 0 and given:
        listed = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{listed} has no effect at temperature 0, which is greedy; add --temperature")


def _check_trie_file(path: Path, drafter: str) -> None:
    if drafter != "auto" and not drafter.startswith("trie"):
        raise ValueError(f"--trie-file needs a trie drafter, and --drafter is {drafter!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--trie-file is {path}: there is no folder {path.parent}")
