"""Options of ``forerun chat``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.cli.options import (
    _OUTPUT,
    AnyDtype,
    Budget,
    Colour,
    Debug,
    Device,
    Drafter,
    Json,
    LongOptions,
    MaxNewTokens,
    MinP,
    Model,
    Namespace,
    Penalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    Trust,
    Verification,
    check_sampling,
)
from forerun.cli.options import _option as option


@dataclass(frozen=True)
class ChatOptions(LongOptions):
    """Talk with a chat model; accepted drafts are shown in colour.

    One message per line, typed or piped in. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation.
    In each turn the model reads only what is new.
    """

    model: Model = ""
    drafter: Drafter = "auto"
    budget: Budget = None
    dtype: AnyDtype = "auto"
    device: Device = "auto"
    trust_remote_code: Trust = False
    namespace: Namespace = "default"
    system: System = None
    max_new_tokens: MaxNewTokens = 512
    stop: Stop = None
    repetition_penalty: Penalty = None
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    seed: Seed = None
    verification: Verification = "coupled"
    stats: Annotated[
        bool, option("--stats", panel=_OUTPUT, help="After each answer steps, times and what was read anew, on stderr.")
    ] = False
    json: Json = False
    color: Colour = None
    debug: Debug = False

    def __post_init__(self) -> None:
        check_sampling(self)
        if not self.model:
            raise ValueError("give --model, a chat model; make real puts a small one into runs/real")
