"""Options of ``forerun audit``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from forerun.cli.options import (
    Activations,
    AnyTypeModelOptions,
    Budget,
    Drafters,
    Dtype,
    KVDtype,
    LongOptions,
    MaxNewTokens,
    OutputOptions,
    Paced,
    flag_of,
    option,
)

_SERVER = "A server"
AuditKind = StrEnum("AuditKind", "greedy seeded tools schema stops logprobs long own")


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
