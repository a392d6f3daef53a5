"""Options of ``forerun generate`` and ``forerun chat``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from forerun.cli.options import (
    Budget,
    Colour,
    DrafterName,
    KVDtype,
    LongOptions,
    MaxNewTokens,
    MemoryOptions,
    Model,
    ModelOptions,
    OutputOptions,
    flag_of,
    option,
    size_option,
)


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
