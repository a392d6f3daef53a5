"""Entry points for transformers users: ``generate`` and ``custom_generate``. Each model keeps its engines."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from forerun.core.fairness import FairLock, locked
from forerun.core.long_context import LongContextConfig, check_settings
from forerun.core.request import Request
from forerun.core.sampling import Method
from forerun.core.stats import Stats
from forerun.engine.arguments import Drafts
from forerun.engine.engine import BUDGET, Engine
from forerun.engine.result import GenerationResult, feed
from forerun.kv.cache import READ_BLOCK
from forerun.kv.kv_tiers import KVMemory
from forerun.models.forward.inputs import check_inputs, check_prompt
from forerun.models.text.prompts import Prompts
from forerun.models.text.requests import GenerationOptions, Place, Prepared, RowOptions, draw_seed, make_request

ENGINES = 8
"""Maximum engines per model; each holds its drafter's index and draft model. Enough to compare every drafter."""

DEFAULTS = {name: each.default for name, each in inspect.signature(Engine).parameters.items()}


def generate(
    model: PreTrainedModel,
    prompts: Prompts,
    *,
    drafter: Drafts = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    settings: LongContextConfig | None = None,
    budget: int = BUDGET,
    prune_drafts: bool = True,
    prefill_block: int = READ_BLOCK,
    prefix_cache: int = 0,
    kv_store: str | Path | None = None,
    kv_store_limit: int | None = None,
    kv_store_expiry: float | None = None,
    kv_store_key: bytes | None = None,
    kv_memory: int | KVMemory | None = None,
    kv_dtype: str = "auto",
    **options: Unpack[GenerationOptions],
) -> GenerationResult:
    """Continue prompts with ``model``: the output of ``model.generate``, faster.

    The model keeps one engine per drafter and settings, so drafts improve with every call. Beyond ``ENGINES``, the
    least recently used one is dropped.

    Args:
        prompts: text or messages (with ``tokenizer``), token ids, a list of any of them, or a tensor. Messages are
            dicts with ``role`` and ``content``, rendered by the tokenizer's chat template.
        tokenizer: for prompts and results as text, and for ``stop_strings``; used in this call only.
        streamer: a transformers streamer; for one sequence only.
        drafter, settings, budget, prune_drafts, prefill_block, prefix_cache, kv_store, kv_store_limit, kv_store_expiry,
            kv_store_key, kv_memory, kv_dtype: see ``Engine``.
        options: see ``GenerationOptions``.
    """
    engine = engine_of(
        model, drafter, settings=settings, budget=budget, prune_drafts=prune_drafts, prefill_block=prefill_block,
        prefix_cache=prefix_cache, kv_store=None if kv_store is None else Path(kv_store),
        kv_store_limit=kv_store_limit, kv_store_expiry=kv_store_expiry, kv_store_key=kv_store_key, kv_memory=kv_memory,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    return engine.generate(prompts, streamer=streamer, tokenizer=tokenizer, **options)


@dataclass
class GenerateForerunOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Output of ``custom_generate`` with ``return_dict_in_generate=True``; ``stats`` has one entry per sequence."""

    stats: Sequence[Stats] | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    forerun_drafter: Drafts = "auto",
    forerun_settings: LongContextConfig | None = None,
    forerun_seed: int | None = None,
    forerun_verification: Method = "coupled",
    forerun_namespace: str = "default",
    forerun_budget: int = BUDGET,
    forerun_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateForerunOutput:
    """Generate for ``model.generate(..., custom_generate=forerun.custom_generate, forerun_drafter="auto")``.

    transformers does not pass ``streamer=`` and ``tokenizer=`` on. The streamer is read from the calling
    ``model.generate``; elsewhere, pass ``forerun_streamer=``. For stop strings, add a ``StopStringCriteria`` to
    ``stopping_criteria``. Without ``forerun_seed``, each prompt's seed is drawn from torch's global generator. Several
    sequences for one prompt get consecutive seeds.

    Returns:
        As ``model.generate``: ids ``[B, t]``, or an output object with ``sequences`` and ``stats``.

    Raises:
        NotImplementedError: for model inputs other than ids and their mask, such as ``inputs_embeds``.
    """
    engine = engine_of(model, forerun_drafter, budget=forerun_budget, settings=forerun_settings)
    prepared = Prepared(generation_config, logits_processor, stopping_criteria)
    options = RowOptions(forerun_seed, forerun_verification, forerun_namespace)
    requests = _rows(model, input_ids, check_inputs(input_ids, model_kwargs), prepared, options)
    streamer, prompt = (forerun_streamer, input_ids) if forerun_streamer else (_streamer_of_caller(), None)
    with closing(engine.run(requests)) as commits:
        feed(streamer, requests, commits, prompt)
    sequences = _append(input_ids, requests, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateForerunOutput(sequences=sequences, stats=[request.stats for request in requests])


def _streamer_of_caller() -> BaseStreamer | None:
    """Return the ``streamer=`` of the calling ``model.generate``, which has put the prompt into it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals["__name__"] == GenerationMixin.__module__:
            streamer: BaseStreamer | None = frame.f_locals.get("streamer")
            return streamer
        frame = frame.f_back
    return None


class _Engines(OrderedDict[Any, Engine]):
    """A model's engines by their arguments, in LRU order. A copy of the model starts with none."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = FairLock()

    def __reduce__(self) -> tuple[type[_Engines], tuple[()]]:
        return _Engines, ()

    @locked
    def get_or_make(self, key: Any, make: Callable[[], Engine]) -> Engine:
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        while len(self) > ENGINES:
            self.popitem(last=False)
        return self[key]


def engine_of(model: PreTrainedModel, drafter: Drafts, **settings: Any) -> Engine:
    """Return the model's engine for this drafter and these ``Engine`` arguments; create it on first use."""
    check_settings(settings.get("settings"))
    engines: _Engines = model.__dict__.setdefault("_forerun_engines", _Engines())
    changed = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    key = (drafter, model.dtype, model.device, *sorted(changed.items()))
    return engines.get_or_make(key, lambda: Engine(model, drafter, **changed))


def _rows(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, prepared: Prepared, options: RowOptions
) -> list[Request]:
    """Make one request per row. As in transformers, logits processors see the padding; the model does not."""
    returned = prepared.config.num_return_sequences or 1
    requests, seed = [], 0
    for row, (ids, keep) in enumerate(zip(input_ids.tolist(), mask.tolist(), strict=True)):
        start = keep.index(1) if 1 in keep else len(keep)
        if 0 in keep[start:]:
            raise ValueError(f"row {row} has padding inside or after its tokens; pad on the left")
        check_prompt(model, ids[start:])
        if row % returned == 0:
            seed = draw_seed() if options.seed is None else options.seed
        row_options = replace(options, seed=seed + row % returned)
        place = Place(row, len(input_ids))
        requests.append(make_request(model, ids[start:], prepared, row_options, place, ids[:start]))
    return requests


def _append(input_ids: torch.Tensor, requests: Sequence[Request], config: GenerationConfig) -> torch.Tensor:
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    new = input_ids.new_full((len(requests), max(len(r.generated) for r in requests)), pad)
    for row, request in zip(new, requests, strict=True):
        row[: len(request.generated)] = torch.from_numpy(request.generated)
    return torch.cat((input_ids, new), 1)
