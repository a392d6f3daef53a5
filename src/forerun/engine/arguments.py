"""Check an engine's arguments, and build its parts from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.decoding.level import Level
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Setup, build
from forerun.decoding.source import Source
from forerun.models.forward.gate import admit, kv_type
from forerun.models.forward.scorer import Scorer, SelfTest, is_sharded

if TYPE_CHECKING:
    from forerun.engine.kv_store import KVStore
    from forerun.kv.kv_tiers import KVMemory, Tiers

Drafts = str | Source | Callable[[Setup], Source]
"""A drafter: a recipe's name, a source of trees, or a function that makes one for a model (a ``Level`` is a source)."""


def check_model(model: object) -> None:
    """Raise TypeError for what is not a loaded transformers model."""
    if isinstance(model, str | Path):
        raise TypeError(
            f"model is {str(model)!r}; it must be a loaded model, such as "
            f"AutoModelForCausalLM.from_pretrained({str(model)!r}).eval()"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; it must be a transformers decoder (PreTrainedModel)")


def check_drafts(drafter: object) -> None:
    """Raise TypeError for what cannot be a drafter."""
    if isinstance(drafter, type):
        raise TypeError(f"drafter is the class {drafter.__name__}; it must be an object, such as {drafter.__name__}()")
    if not (isinstance(drafter, Source | str) or callable(drafter)):
        raise TypeError(f"drafter is a {type(drafter).__name__}; it must be a name, or derive from forerun.Source")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
    """Raise ValueError for a tokenizer with more tokens than the model."""
    if tokenizer is not None and tokenizer.vocab_size > vocabulary:  # see ``load``
        known = f"{tokenizer.vocab_size} tokens and the model {vocabulary}"
        raise ValueError(f"the tokenizer has {known}: they do not match")


def admitted(model: PreTrainedModel, self_test: SelfTest, kv_dtype: str, **single_process: object) -> Scorer:
    """Admit a model in this process or in several; ``single_process`` has arguments that need a single one."""
    held = kv_type(model, kv_dtype)
    if not is_sharded(model):
        return admit(model, self_test, held)
    from forerun.tensor_parallel import ranks  # only for a model in several processes

    return ranks.admit(model, kv_dtype=held, **single_process)


def level_of(drafter: Drafts, setup: Setup) -> Level:
    """Return the level that a drafter's name stands for, or one over a source, which drafts as much as it is told to.
    Raise TypeError if a function does not return a source."""
    if isinstance(drafter, str):
        return build(drafter, setup)
    source = drafter if isinstance(drafter, Source) else drafter(setup)
    if not isinstance(source, Source):
        raise TypeError(f"the drafter's function returned a {type(source).__name__}; it must return a Source")
    if isinstance(source, Level):
        return source if source.model is setup.target and source.makes_none else setup.over(Planner(chains=source))
    return setup.over(setup.planner(source))


def warm_up_sources(level: Level) -> None:
    """Warm up a level and the sources that it drafts with."""
    level.warm_up()
    for source in level.planner.sources:
        source.warm_up()


def open_store(folder: str | Path | None, options: dict[str, Any], fingerprint: Callable[[], str]) -> KVStore | None:
    """Open the store in a folder for a model with this fingerprint; raise ValueError for options without a folder."""
    if folder is None:
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"kv_store_{name} is set, and there is no kv_store")
        return None
    from forerun.engine.kv_store import KVStore  # imported only if used

    return KVStore(folder, fingerprint(), **options)


def tiers_of(memory: int | KVMemory, target: Scorer) -> Tiers:
    """Return where a model's keys and values are placed; raise ValueError for a model with recurrent layers."""
    from forerun.kv.kv_tiers import Tiers  # imported only if used

    if target.recurrent:
        raise ValueError("kv_memory cannot offload states of recurrent layers; leave it unset")
    return Tiers(memory, target.device, target.kv, target.kv_dtype or target.model.dtype)
