"""Every command's options as a frozen dataclass, which declares its command line, help and checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from forerun.bench.machine import plain_values
from forerun.core.long_context import LongContextConfig, Policy, Sparse

_SERVER = "A server"
LONG_PANEL, LONG = "Long contexts", LongContextConfig()
TextKind = StrEnum("TextKind", "tasks novel random")
AuditKind = StrEnum("AuditKind", "greedy seeded tools schema stops logprobs long own")
DemoKind = StrEnum("DemoKind", "rag code json maths prose")
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64", "stored"]
ActivationsName = Literal["auto", "int8", "float32"]

DRAFTER_HELP = (
    "How to draft: auto, trie, lookup, none; for long contexts low-rank, triforce-trie, triforce; with a trained head "
    "head or mtp; see docs/drafters.md."
)
MODEL_HELP = "A model's folder, a GGUF file, a hub name that is in the local cache, or 'bundled'."
DRAFT_MODEL_HELP = (
    "The small model, like --model; with bundled, the bundled one. Or the folder of a trained head; mtp for "
    "those in the model's own files."
)
SPARSE_HELP = (
    "The target's sparse cache in auto and in all triforce drafters; by default low-rank, and retrieval on a GPU."
)
DTYPE_HELP = "Of the weights; auto is the file's, and float32 for GGUF files, which stored leaves as they are."
ACTIVATIONS_HELP = (
    "Inputs of linear layers with stored weights: int8, which is auto, quantises each token's; float32 is slower."
)
BENCH_DRAFTERS = ("auto", "trie", "lookup")
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

    def check_memory(self) -> None:
        """Raise ValueError for other limits without ``--kv-memory``, or a missing folder."""
        names = ("kv_host_memory", "kv_folder", "simulate_bandwidth")
        rest = [name for name in names if getattr(self, name) is not None]
        if rest and self.kv_memory is None:
            raise ValueError(f"{flag_of(rest[0])} is for what does not fit on the device; add --kv-memory")
        if self.kv_folder is not None and not self.kv_folder.is_dir():
            raise ValueError(f"--kv-folder is {self.kv_folder}; there is no such folder")


@dataclass(frozen=True)
class WriterOptions(LongOptions, ModelOptions):
    """Options of an output that one engine generates for a user."""

    drafter: DrafterName = "auto"
    budget: Budget = None
    kv_dtype: KVDtype = "auto"
    namespace: Annotated[str, option(panel="Model", help="Whose outputs may be drafted.")] = "default"
    system: Annotated[str | None, option(panel="Text", help="The chat model's system message.")] = None
    max_new_tokens: Annotated[int, option("--max-new-tokens", "-n", panel="Text", help="Most tokens.", min=1)] = 256
    stop: Annotated[list[str] | None, option(panel="Text", help="Stop after this text; may be repeated.")] = None
    repetition_penalty: Annotated[float | None, option(panel="Text", help="Above 1: repeat less.")] = None
    temperature: Annotated[float, option("--temperature", "-t", panel="Sampling", help="0 is greedy.", min=0.0)] = 0.0
    top_k: Annotated[int | None, option(panel="Sampling", help="Keep the k likeliest.", min=0)] = None
    top_p: Annotated[float | None, option(panel="Sampling", help="Keep those with mass p.", min=0, max=1)] = None
    min_p: Annotated[float | None, option(panel="Sampling", help="Keep p times the best and up.", min=0, max=1)] = None
    seed: Annotated[int | None, option(panel="Sampling", help="Of the noise; drawn and reported by default.")] = None
    verification: Annotated[
        Literal["coupled", "rejection"], option(panel="Sampling", help="How samples are verified.")
    ] = "coupled"
    stats: Annotated[
        bool, option("--stats", panel="Output", help="A table of steps and times for each text, on stderr.")
    ] = False
    color: Colour = None

    def __post_init__(self) -> None:
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(f"--repetition-penalty is {self.repetition_penalty:g}; it must be above 0")
        sampling = [name for name in ("top_k", "top_p", "min_p", "seed") if getattr(self, name) is not None]
        if self.temperature == 0 and sampling:
            flags = ", ".join(map(flag_of, sampling))
            raise ValueError(f"{flags} has no effect at temperature 0, which is greedy; add --temperature")


@dataclass(frozen=True)
class GenerateOptions(OutputOptions, MemoryOptions, WriterOptions):
    """Continue a prompt; accepted drafts are shown in colour.

    Temperature 0, the default, is greedy decoding. The output is the model's own, with or without a drafter.
    """

    trie_file: Annotated[
        Path | None, option(panel="Model", help="Load the trie, if the file is there; save it after.")
    ] = None
    warm: Annotated[list[Path] | None, option(panel="Model", help="A text file to draft from; may be repeated.")] = None
    kv_store: Annotated[Path | None, option(panel="Model", help="A folder that keeps prefilled prompts.")] = None
    kv_store_limit: Annotated[int | None, size_option(panel="Model", help="Of bytes there, such as 20GiB.")] = None
    prompt: Annotated[str | None, option("--prompt", "-p", panel="Text", help="The text to continue or answer.")] = None
    prompt_file: Annotated[
        str | None,
        option("--prompt-file", "-f", panel="Text", help="Its file, or - for stdin; a final newline is dropped."),
    ] = None
    prediction: Annotated[Path | None, option(panel="Text", help="A file that the answer should resemble.")] = None
    chat: Annotated[
        bool | None,
        option("--chat/--raw", panel="Text", help="Answer, or continue; by its chat template if not given."),
    ] = None
    context: Annotated[int | None, option(panel="Text", help="Last tokens of the prompt to keep.", min=1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("give either --prompt or --prompt-file (- reads stdin)")
        if self.prompt == "":
            raise ValueError("--prompt is empty; give some text")
        if self.system is not None and self.chat is False:
            raise ValueError("--system is for chat models, and --raw turns that off")
        self.check_memory()
        if self.kv_store_limit is not None and self.kv_store is None:
            raise ValueError("--kv-store-limit needs a store; add --kv-store")
        path = self.trie_file
        if path is not None and self.drafter != "auto" and not self.drafter.startswith("trie"):
            raise ValueError(f"--trie-file needs a trie drafter, and --drafter is {self.drafter!r}")
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--trie-file is {path}: there is no folder {path.parent}")


@dataclass(frozen=True)
class ChatOptions(OutputOptions, WriterOptions):
    """Talk with a chat model; accepted drafts are shown in colour.

    One message per line, typed or piped in. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation.
    Each turn prefills only what is new.
    """

    model: Model = ""
    max_new_tokens: MaxNewTokens = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("give --model, a chat model; make real puts a small one into runs/real")


@dataclass(frozen=True)
class AuditOptions(OutputOptions, LongOptions, AnyTypeModelOptions):
    """Check that drafting changes nothing, on your own model or on any OpenAI-compatible server.

    For a model, compare greedy output with transformers' generate, sampled output with plain sampling of the same
    seeds, and a batch with each of its prompts alone. Exit with status 1 if any output differs by more than rounding,
    or if a drafter never drafted. Drafts have fixed lengths unless --paced is given, so that they are made even if they
    do not pay. By default, audit every drafter that needs no small model or head, or only the given one.

    With --url, audit a server: send each request with speculation, and again without, by --against or --against-fields,
    or twice unchanged. Forerun's server needs neither. Exit with status 1 if an answer differs by more than rounding.
    """

    url: Annotated[str | None, option(panel=_SERVER, help="The server to audit, such as http://127.0.0.1:8000.")] = None
    against: Annotated[str | None, option(panel=_SERVER, help="A server of the same model without speculation.")] = None
    fields: Annotated[
        str | None, option(panel=_SERVER, help="Fields, as a JSON object, of each audited request.", metavar="JSON")
    ] = None
    against_fields: Annotated[
        str | None, option(panel=_SERVER, help="Fields of each request without speculation.", metavar="JSON")
    ] = None
    name: Annotated[str | None, option(panel=_SERVER, help="What the server calls the model; else its first.")] = None
    api_key: Annotated[
        str | None, option(panel=_SERVER, help="For both servers.", envvar="FORERUN_AUDIT_KEY", show_envvar=True)
    ] = None
    requests: Annotated[
        Path | None, option(panel=_SERVER, help="Your own: JSON lines of bodies with messages or a prompt.")
    ] = None
    kind: Annotated[
        list[AuditKind] | None, option("--kind", "-k", panel=_SERVER, help="May be repeated. Default: all.")
    ] = None
    long_characters: Annotated[int, option(panel=_SERVER, help="Of the long prompts.", min=1)] = 8000
    rounding: Annotated[
        float, option(panel=_SERVER, help="Gap of log-probabilities that rounding may close.", min=0.0)
    ] = 0.125
    strict: Annotated[bool, option("--strict", panel=_SERVER, help="Fail if any answer is not equal.")] = False
    out: Annotated[Path | None, option(panel="Output", help="A folder for the server's report.")] = None
    dtype: Annotated[
        Dtype | None,
        option(panel="Model", help="Default: on a CPU float64 under 100 million parameters, else the file's."),
    ] = None
    activations: Activations = "auto"
    kv_dtype: KVDtype = "auto"
    drafter: Drafters = None
    budget: Budget = None
    prompt: Annotated[list[str] | None, option("--prompt", "-p", panel="Text", help="May be repeated.")] = None
    prompt_file: Annotated[
        list[str] | None, option("--prompt-file", "-f", panel="Text", help="A file with one prompt; may be repeated.")
    ] = None
    max_new_tokens: MaxNewTokens = 64
    seeds: Annotated[int, option(panel="Sampling", help="Sampled texts per prompt.", min=0)] = 1
    temperature: Annotated[float, option("--temperature", "-t", panel="Sampling", help="Of these, above 0.")] = 1.0
    paced: Paced = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"--temperature is {self.temperature}; it must be above 0 (greedy is audited in any case)")
        self._check_whose()
        if self.url is None and self.model != "bundled" and not self.prompt and not self.prompt_file:
            raise ValueError("give --prompt or --prompt-file: only the bundled model comes with prompts")

    def _check_whose(self) -> None:
        """Refuse a server's options without ``--url``, and a model's options with it."""
        given = {each.name for each in fields(AuditOptions) if getattr(self, each.name) != each.default}
        wrong = given & OF_SERVERS if self.url is None else given - OF_SERVERS - OF_BOTH
        if wrong:
            names = ", ".join(map(flag_of, sorted(wrong)))
            raise ValueError(f"{names}: only {'with --url' if self.url is None else 'without --url'}")


OF_SERVERS = frozenset(
    {
        "url", "against", "fields", "against_fields", "name", "requests", "kind", "long_characters", "rounding",
        "strict", "out",
    }
)  # fmt: skip
OF_BOTH = frozenset({"prompt", "prompt_file", "max_new_tokens", "seeds", "temperature", "api_key", "json", "debug"})


@dataclass(frozen=True)
class BenchOptions(OutputOptions, LongOptions, ModelOptions):
    """Compare drafters with transformers' greedy decoding and prompt lookup, on any model and your own prompts.

    Contestants take turns in one process; results are medians, with the spread of the rounds. Plain Forerun (none)
    always takes part, and every drafter's output is compared with its output. The default drafters are auto, trie and
    lookup. Writes JSON, Markdown and, with matplotlib, a plot. Exit status 1 if an output differs although the model's
    passes are exact to the bit.
    """

    drafter: Drafters = None
    kv_dtype: KVDtype = "auto"
    prompts_file: Annotated[
        Path | None, option(panel="Text", help="JSON lines of {task, prompt} or {task, messages}; default: the demo's.")
    ] = None
    raw: Raw = False
    prompts: Annotated[int | None, option(panel="Text", help="Per task; default: all.", min=1)] = None
    warm_prompts: Annotated[int, option(panel="Text", help="Of the rest, answered before by a warm trie.", min=0)] = 20
    rounds: Rounds = 5
    max_new_tokens: MaxNewTokens = 160
    skip: Skip = None
    out: Out = Path("runs/bench")
    resume: Resume = False


@dataclass(frozen=True)
class NeverSlowerOptions(OutputOptions, LongOptions, ModelOptions):
    """Measure whether a drafter is ever slower than plain decoding, over batches, contexts, temperatures and texts.

    Each cell of the table is measured several times, with other prompts and seeds; --texts 1 prefills long prompts
    once. Exit status 1 if a median is under 0.97, a single run under 0.93, or a median under 0.95 of the best other
    drafter's. Plain decoding runs before and after each drafter; if the two differ, the drafter runs again. Writes
    JSON, Markdown and, with matplotlib, a plot.
    """

    drafter: DrafterName = "auto"
    against: Annotated[
        list[str] | None, option(panel="Model", help="Others to compare with; may be repeated; by default all.")
    ] = None
    yarn: Annotated[float | None, option(panel="Model", metavar="FACTOR", help="On the model's positions.")] = None
    batch: Annotated[
        list[int] | None, option(panel="Text", help="Rows; may be repeated. Default: 1, 4, 16.", min=1)
    ] = None
    context: Annotated[
        list[int] | None, option(panel="Text", help="Tokens of a prompt; may be repeated. Default: 100, 2000.", min=2)
    ] = None
    temperature: Annotated[
        list[float] | None,
        option("--temperature", "-t", panel="Text", help="0 is greedy; may be repeated. Default: 0, 0.8, 1.", min=0.0),
    ] = None
    kind: Annotated[
        list[TextKind] | None, option("--kind", "-k", panel="Text", help="May be repeated. Default: all.")
    ] = None
    prompts_file: Annotated[
        Path | None, option(panel="Text", help="The tasks: JSON lines as for forerun bench; default: the demo's.")
    ] = None
    text: Annotated[
        Path | None, option(panel="Text", help="The novel; default: the demo's prompts.", exists=True, dir_okay=False)
    ] = None
    raw: Raw = False
    draws: Annotated[int, option(panel="Text", help="Of each cell.", min=1)] = 5
    texts: Annotated[
        int | None, option(panel="Text", help="Prompts that the draws share in turn; default: one each.", min=1)
    ] = None
    max_new_tokens: MaxNewTokens = 64
    out: Out = Path("runs/never-slower")
    resume: Resume = False

    def __post_init__(self) -> None:
        if self.yarn is not None and not self.yarn > 1:
            raise ValueError(f"--yarn is {self.yarn:g}; it must be above 1")


@dataclass(frozen=True)
class DemoOptions(OutputOptions):
    """Decode one prompt of each kind without drafts and with ``auto``: equal outputs, timed side by side."""

    kind: Annotated[
        list[DemoKind] | None, option("--kind", "-k", panel="Text", help="May be repeated. Default: all.")
    ] = None
    max_new_tokens: Annotated[
        int | None, option("--max-new-tokens", "-n", panel="Text", help="Most tokens for each.", min=1)
    ] = None
    repeats: Annotated[int, option(panel="Text", help="Runs; the medians count.", min=1)] = 3
    warm: Annotated[
        bool,
        option("--warm", panel="Text", help="Draft from earlier runs, too; else each starts with an empty index."),
    ] = False
    color: Colour = None


@dataclass(frozen=True)
class CompileOptions(ModelOptions, DebugOptions):
    """Compile now what the first request would wait for, for this processor and user.

    Use it for container images, and for machines that start often. The code is stored next to the package, or in
    NUMBA_CACHE_DIR if set. For the bundled model, the default, this compiles float32 and bfloat16; name your own model
    if it needs other kernels.
    """

    kv_dtype: KVDtype = "auto"
