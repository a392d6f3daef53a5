"""Options that commands share, as frozen dataclasses, which declare the command line, its help and its checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forerun.bench.machine import plain_values
from forerun.core.long_context import LongContextConfig, Policy, Sparse

if TYPE_CHECKING:
    from forerun.kv.kv_tiers import KVMemory

LONG_PANEL, LONG = "Long contexts", LongContextConfig()
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64", "stored"]
ActivationsName = Literal["auto", "int8", "float32"]
DRAFTER_HELP = (
    "How to draft: auto, trie, lookup, none; for long contexts low-rank, triforce-trie, triforce; with a trained head "
    "head or mtp; see docs/drafters.md."
)
MODEL_HELP = "A model's folder, a GGUF file, a hub name that is in the local cache, or 'bundled'."
DRAFT_MODEL_HELP = (
    "The small model, like --model; with bundled, the bundled one. Or the folder of a trained head; mtp for "
    "those in the model's own files; q8_0 for a copy of the model itself in 8 bits."
)
SPARSE_HELP = (
    "The target's sparse cache in auto and in all triforce drafters; by default low-rank, and retrieval on a GPU."
)
DTYPE_HELP = "Of the weights; auto is the file's, and float32 for GGUF files, which stored leaves as they are."
ACTIVATIONS_HELP = (
    "Inputs of linear layers with stored weights: int8, which is auto, quantises each token's; float32 is slower."
)
SIZE_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
)


def option(*flags: str, panel: str, help: str, **more: Any) -> Any:  # noqa: A002
    """Declare an option of a command; ``panel`` is its section of the help."""
    return typer.Option(*flags, rich_help_panel=panel, help=help, **more)


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def parsed_size(text: str) -> int:
    """Parse a size such as ``4GiB``, ``500MB`` or ``1048576`` into bytes."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if parts is None or parts[2].upper() not in SIZE_UNITS:
        raise typer.BadParameter(f"{text!r}; it must be a number of bytes, or such as 500MB or 4GiB")
    return int(float(parts[1]) * SIZE_UNITS[parts[2].upper()])


def size_option(*, panel: str, help: str) -> Any:  # noqa: A002
    """Declare an option in bytes."""
    return option(panel=panel, help=help, metavar="SIZE", parser=parsed_size)


Model = Annotated[str, option("--model", "-m", panel="Model", help=MODEL_HELP, metavar="PATH|NAME")]
AnyDtype = Annotated[Dtype, option("--dtype", panel="Model", help=DTYPE_HELP)]
Activations = Annotated[ActivationsName, option(panel="Model", help=ACTIVATIONS_HELP)]
KVDtypeName = Literal["auto", "bfloat16"]
KV_DTYPE_HELP = "Of keys and values; auto is the model's. bfloat16 halves them for float32 and stored models on a CPU."
KVDtype = Annotated[KVDtypeName, option("--kv-dtype", panel="Memory", help=KV_DTYPE_HELP)]
Budget = Annotated[int | None, option("--budget", panel="Model", help="Most drafted tokens per step.", min=1)]
Quantize = Annotated[
    str | None,
    option(
        panel="Model",
        metavar="FORMAT",
        help="Quantise a folder's weights, once: q8_0, q5_1, q5_0, q4_1 or q4_0; for the CPU.",
    ),
]
DrafterName = Annotated[str, option("--drafter", "-d", panel="Model", help=DRAFTER_HELP)]
Drafters = Annotated[
    list[str] | None, option("--drafter", "-d", panel="Model", help=f"{DRAFTER_HELP} May be repeated.")
]
MaxNewTokens = Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Per text.", min=1)]
Rounds = Annotated[int, option("--rounds", panel="Text", help="Times each is measured.", min=1)]
Raw = Annotated[bool, option("--raw", panel="Text", help="Leave the chat template out.")]
Out = Annotated[Path, option("--out", panel="Output", help="Where the report goes.")]
Resume = Annotated[
    bool, option("--resume", panel="Output", help="Continue the journal in --out: what is in it is not run again.")
]
Skip = Annotated[
    list[str] | None,
    option("--skip", panel="Output", help="A contestant, as the tables name it, to leave out; may be repeated."),
]
Colour = Annotated[
    bool | None, option("--color/--no-color", panel="Output", help="Colour drafted text; by default in a terminal.")
]
Paced = Annotated[
    bool, option("--paced/--fixed", panel=LONG_PANEL, help="Draft as many of these as pay, or always all.")
]


@dataclass(frozen=True)
class DebugOptions:
    """The option of every command."""

    debug: Annotated[bool, option("--debug", panel="Output", help="Show the traceback of an error.")] = False


@dataclass(frozen=True)
class OutputOptions(DebugOptions):
    """Options of a command that prints results."""

    json: Annotated[bool, option("--json", panel="Output", help="One JSON object on stdout and nothing else.")] = False


@dataclass(frozen=True)
class AnyTypeModelOptions:
    """The target without the type of its weights."""

    model: Model = "bundled"
    device: Annotated[str, option(panel="Model", help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    trust_remote_code: Annotated[
        bool, option("--trust-remote-code", panel="Model", help="Run code that comes with the model.")
    ] = False


@dataclass(frozen=True)
class ModelOptions(AnyTypeModelOptions):
    """The target."""

    dtype: AnyDtype = "auto"
    activations: Activations = "auto"
    quantize: Quantize = None


@dataclass(frozen=True)
class LongOptions:
    """Options of ``auto`` and the drafters for long contexts; other drafters ignore them."""

    draft_model: Annotated[str | None, option(panel=LONG_PANEL, help=DRAFT_MODEL_HELP)] = None
    gamma1: Annotated[int, option(panel=LONG_PANEL, help="Tokens the small model drafts at once.", min=1)] = LONG.gamma1
    gamma2: Annotated[int, option(panel=LONG_PANEL, help="Tokens the target verifies at a time.", min=1)] = LONG.gamma2
    paced: Paced = LONG.paced
    sparse: Annotated[Sparse | None, option(panel=LONG_PANEL, help=SPARSE_HELP)] = LONG.sparse
    cache_budget: Annotated[int, option(panel=LONG_PANEL, help="Tokens of a sparse cache.", min=1)] = LONG.cache_budget
    chunk: Annotated[int, option(panel=LONG_PANEL, help="Tokens retrieved together.", min=1)] = LONG.chunk
    refresh: Annotated[Policy, option(panel=LONG_PANEL, help="When chunks are chosen anew.")] = LONG.refresh
    sinks: Annotated[int, option(panel=LONG_PANEL, help="First tokens a streaming cache keeps.", min=0)] = LONG.sinks
    window: Annotated[int, option(panel=LONG_PANEL, help="Last tokens the small model sees.", min=1)] = LONG.window

    @property
    def drafting(self) -> dict[str, Any]:
        """Return these options as plain values; measurements with other values are not comparable."""
        values = plain_values(self)
        return {field.name: values[field.name] for field in fields(LongOptions)}

    def settings(self, draft_model: Any = None) -> LongContextConfig:
        """Convert the options to ``LongContextConfig``."""
        names = [field.name for field in fields(LongContextConfig) if field.name != "draft_model"]
        return LongContextConfig(draft_model, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class MemoryOptions:
    """Memory limits for keys and values. What does not fit on the device is copied in layer by layer."""

    kv_memory: Annotated[
        int | None, size_option(panel="Memory", help="Of keys and values on the device, such as 20GiB.")
    ] = None
    kv_host_memory: Annotated[int | None, size_option(panel="Memory", help="Of the rest, in the host's memory.")] = None
    kv_folder: Annotated[Path | None, option(panel="Memory", help="For what does not fit there either.")] = None
    simulate_bandwidth: Annotated[
        int | None, size_option(panel="Memory", help="Bring in no more bytes a second than this; on a CPU.")
    ] = None

    @property
    def memory(self) -> KVMemory | None:
        """The engine's argument ``kv_memory``."""
        if self.kv_memory is None:
            return None
        from forerun.kv.kv_tiers import KVMemory  # loads torch, which help must not

        return KVMemory(self.kv_memory, self.kv_host_memory, self.kv_folder, self.simulate_bandwidth)

    def check_memory(self) -> None:
        """Raise ValueError for other limits without ``--kv-memory``, or a missing folder."""
        names = ("kv_host_memory", "kv_folder", "simulate_bandwidth")
        rest = [name for name in names if getattr(self, name) is not None]
        if rest and self.kv_memory is None:
            raise ValueError(f"{flag_of(rest[0])} is for what does not fit on the device; add --kv-memory")
        if self.kv_folder is not None and not self.kv_folder.is_dir():
            raise ValueError(f"--kv-folder is {self.kv_folder}; there is no such folder")
