"""Options of ``forerun serve``. The environment and the settings file supply those not given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from forerun.cli.options import (
    ACTIVATIONS_HELP,
    DRAFTER_HELP,
    KV_DTYPE_HELP,
    MODEL_HELP,
    ActivationsName,
    Budget,
    DebugOptions,
    Dtype,
    KVDtypeName,
    Quantize,
    option,
)

_WHO, _MUCH, _INDEX = "Where and for whom", "How much", "What is learned"
_SIZE = "in bytes, or such as 4GiB."
REPEATED = {"api_key": "api_keys", "allowed_host": "allowed_hosts", "cors_origin": "cors_origins"}
"""Settings that are lists, by the flag that adds one entry."""


@dataclass(frozen=True)
class ServeOptions(DebugOptions):
    """Serve a model to many clients at once, as OpenAI's API does: completions, chat, metrics.

    Each request gets the output that it would get alone. Every option may be set as FORERUN_NAME in the environment or
    by name in a TOML file; flags come first, then the environment. There, the lists are api_keys, allowed_hosts and
    cors_origins. See docs/serving.md.
    """

    config: Annotated[
        Path | None, option(panel=_WHO, help="Settings in TOML.", metavar="FILE", envvar="FORERUN_CONFIG")
    ] = None
    model: Annotated[str | None, option("--model", "-m", panel="Model", help=MODEL_HELP, metavar="PATH|NAME")] = None
    name: Annotated[str | None, option(panel="Model", help="What clients call it; else the end of its path.")] = None
    drafter: Annotated[str | None, option("--drafter", "-d", panel="Model", help=DRAFTER_HELP)] = None
    draft_model: Annotated[
        str | None,
        option(panel="Model", help="The small model of triforce, the folder of a trained head, mtp, or q8_0."),
    ] = None
    budget: Budget = None
    dtype: Annotated[
        Dtype | None, option(panel="Model", help="Of the weights; auto is the file's, float32 for bundled and GGUF.")
    ] = None
    activations: Annotated[ActivationsName | None, option(panel="Model", help=ACTIVATIONS_HELP)] = None
    quantize: Quantize = None
    device: Annotated[str | None, option(panel="Model", help="auto, cpu, cuda, cuda:1, ...")] = None
    trust_remote_code: Annotated[
        bool | None, option("--trust-remote-code", panel="Model", help="Run code that comes with the model.")
    ] = None
    host: Annotated[
        str | None, option(panel=_WHO, help="Where to listen; 127.0.0.1 if nothing is set: this computer alone.")
    ] = None
    port: Annotated[int | None, option(panel=_WHO, help="8000 if nothing is set.", min=0, max=65535)] = None
    api_key: Annotated[
        list[str] | None,
        option(panel=_WHO, help="A tenant's; may be repeated. Others see it: better FORERUN_API_KEYS."),
    ] = None
    admin_key: Annotated[str | None, option(panel=_WHO, help="A key for /metrics, which no other key may read.")] = None
    allowed_host: Annotated[
        list[str] | None, option(panel=_WHO, help="A name that clients may call it by; may be repeated, * is any.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, option(panel=_WHO, help="A web page's origin that may ask; may be repeated, * is any.")
    ] = None
    rows: Annotated[int | None, option(panel=_MUCH, help="Requests decoded at once.", min=1)] = None
    waiting: Annotated[int | None, option(panel=_MUCH, help="Requests that may wait.", min=0)] = None
    step: Annotated[int | None, option(panel=_MUCH, help="Prompt tokens prefilled per step.", min=1)] = None
    kv_memory: Annotated[
        str | None, option(panel=_MUCH, help=f"For keys and values: half of what is free, or {_SIZE}")
    ] = None
    kv_dtype: Annotated[KVDtypeName | None, option("--kv-dtype", panel=_MUCH, help=KV_DTYPE_HELP)] = None
    kv_host_memory: Annotated[
        str | None, option(panel=_MUCH, help="Then --kv-memory is the device's, and this the host's besides.")
    ] = None
    kv_folder: Annotated[
        Path | None, option(panel=_MUCH, help="For files with what does not fit there either.", metavar="DIR")
    ] = None
    kv_folder_limit: Annotated[
        str | None, option(panel=_MUCH, help=f"Of these files: half of what is free there, or {_SIZE}")
    ] = None
    prefix_cache: Annotated[
        str | None,
        option(
            panel=_MUCH, help=f"For beginnings of prompts, kept for later ones: an eighth of what is free, or {_SIZE}"
        ),
    ] = None
    kv_store: Annotated[
        Path | None, option(panel=_MUCH, help="A folder that keeps beginnings of long prompts.", metavar="DIR")
    ] = None
    kv_store_limit: Annotated[
        str | None, option(panel=_MUCH, help=f"Of that folder: a quarter of what is free there, or {_SIZE}")
    ] = None
    kv_store_expiry: Annotated[
        float | None, option(panel=_MUCH, help="Seconds without use after which what it keeps goes.")
    ] = None
    kv_store_key: Annotated[
        str | None, option(panel=_MUCH, help="Use nothing there that was written without this key.")
    ] = None
    connections: Annotated[int | None, option(panel=_MUCH, help="Open at once, at most.", min=1)] = None
    request_bytes: Annotated[str | None, option(panel=_MUCH, help=f"The largest request, {_SIZE}")] = None
    max_tokens: Annotated[int | None, option(panel=_MUCH, help="The longest answer.", min=1)] = None
    namespaces: Annotated[int | None, option(panel=_MUCH, help="Of a tenant, at most.", min=1)] = None
    share: Annotated[bool | None, option(panel=_INDEX, help="Let all keys draft from each other's answers.")] = None
    warm: Annotated[
        list[Path] | None,
        option(panel=_INDEX, metavar="FILE", help="Text or JSON lines to learn first; may be repeated."),
    ] = None
    warm_seconds: Annotated[float | None, option(panel=_INDEX, help="For all these files together.")] = None
    index: Annotated[
        Path | None, option(panel=_INDEX, metavar="DIR", help="Keep what is learned here, and go on with it.")
    ] = None
    index_interval: Annotated[float | None, option(panel=_INDEX, help="Seconds from a change to its save.")] = None
    index_limit: Annotated[str | None, option(panel=_INDEX, help=f"For what is learned, of all keys; {_SIZE}")] = None
    timeout: Annotated[float | None, option(panel=_MUCH, help="Seconds that a request may take.")] = None
    drain: Annotated[
        float | None, option(panel=_MUCH, help="Seconds for requests that run or wait at the end.", min=0)
    ] = None
    page: Annotated[bool | None, option(panel=_WHO, help="Show a page to try the model at /; shown by default.")] = None
    log_json: Annotated[bool | None, option(panel=_WHO, help="Write each line of the log as JSON.")] = None
    ray: Annotated[bool | None, option(panel=_WHO, help="Serve by replicas on Ray; RAY_ADDRESS names a cluster.")] = (
        None
    )
    replicas: Annotated[int | None, option(panel=_WHO, help="With --ray: how many.", min=1)] = None

    def flags(self) -> dict[str, Any]:
        """Return the given settings, by their names in ``ServerSettings``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for flag, name in REPEATED.items():
            values[name] = values.pop(flag) or None
        return {name: value for name, value in values.items() if value is not None and name not in ("config", "debug")}
