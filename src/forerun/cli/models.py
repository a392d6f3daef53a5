"""Load the target, the small model if a drafter needs one, and the engine, as a command's options say."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.cli.options import LongOptions
from forerun.cli.rank_check import ranks
from forerun.cli.terminal import preparing, stderr, working
from forerun.core.long_context import MTP, QUANTISATIONS, LongContextConfig
from forerun.decoding.recipes import DRAFTERS, Recipe, check_drafter
from forerun.engine.engine import BUDGET, Engine
from forerun.models.forward.runtime import default_runtime
from forerun.models.heads.mtp import stated_layers
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load, load_draft
from forerun.models.loading.yarn import stretch_model

log = logging.getLogger(__name__)


def check_drafters(names: Sequence[str], options: Any, recipes: Mapping[str, Recipe] = DRAFTERS) -> None:
    """Raise ValueError, before any work, for a drafter that is unknown or lacks its small model or head."""
    given = getattr(options, "draft_model", None)
    for name in names:
        check_drafter(name, recipes)
        if recipes[name].small and given is None and options.model != BUNDLED:
            raise ValueError(f"drafter {name} needs a small model: --draft-model")
        if name == "head" and given is None:
            raise ValueError("drafter head needs --draft-model, the folder of a trained head, or mtp")


def load_target(options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target of ``ModelOptions``, or of a server's settings, and its tokenizer, with progress. Both are
    excluded from garbage collection: collecting all of torch and transformers costs 0.25 seconds."""
    with working(stderr(), f"loading {options.model}") as progress:
        loaded = load(
            options.model, options.dtype or "auto", device=options.device, trust_remote_code=options.trust_remote_code,
            activations=options.activations, ranks=ranks(), quantize=getattr(options, "quantize", None),
            progress=progress,
        )  # fmt: skip
    gc.freeze()
    return loaded


def load_stretched(options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target of ``ModelOptions``, and stretch its positions by ``options.yarn`` if given; raise ValueError if
    that is not above 1."""
    if options.yarn is not None and not options.yarn > 1:
        raise ValueError(f"--yarn is {options.yarn:g}; it must be above 1")
    model, tokenizer = load_target(options)
    if options.yarn is not None:
        stretch_model(model, options.yarn)
    return model, tokenizer


def settings(
    options: Any,
    drafters: Sequence[str],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipes: Mapping[str, Recipe] = DRAFTERS,
) -> LongContextConfig:
    """Make the settings of the named drafters, from ``LongOptions`` if there are any. Load the small model, or the
    trained head that ``--draft-model`` names, if needed or named. The bundled target has a small model."""
    make = options.settings if isinstance(options, LongOptions) else LongContextConfig
    name = options.draft_model or (BUNDLED_DRAFT if options.model == BUNDLED else None)
    needed = options.draft_model is not None or any(recipes[each].small for each in drafters if each in recipes)
    if name is None or not needed:
        if "auto" in drafters and (count := stated_layers(target)):
            log.info("%s comes with %d MTP layer(s): --draft-model mtp lets auto use them", options.model, count)
        return make()
    if name in QUANTISATIONS:
        return make(name)
    # It loads transformers' code of the models that heads extend, which most commands do not need.
    from forerun.models.heads.loading import is_head, load_head

    if name == MTP or is_head(name):
        return make(name if name == MTP else load_head(name))
    return make(load_draft(name, target, tokenizer, trust_remote_code=options.trust_remote_code))


def make_engine(options: Any, memory: Callable[[torch.device], dict[str, Any]] = lambda device: {}) -> Engine:
    """Make a command's engine, from ``WriterOptions`` or a server's settings; ``memory`` limits keys and values."""
    model, tokenizer = load_target(options)
    with preparing(f"testing {options.model} and measuring its passes"):
        return Engine(
            model,
            options.drafter,
            settings=settings(options, [options.drafter], model, tokenizer),
            tokenizer=tokenizer,
            budget=BUDGET if options.budget is None else options.budget,
            kv_dtype=options.kv_dtype,
            _runtime=replace(default_runtime(), waits_for_code=False),
            **memory(model.device),
        )
