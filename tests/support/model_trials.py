"""What is tried with one tiny model of a family: its path, its bits, and its texts against ``transformers``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

import forerun
from forerun.core.long_context import LongContextConfig
from forerun.engine import kv_store
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.models.forward import gate
from forerun.models.forward.architecture import known_on_gpu
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.exactness import probe
from forerun.models.forward.inputs import position_limit
from support import compiled_models, tiny

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("models", "tensor_parallel")]
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
BITS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED_TOKENS = 64
"""Shortest text that a KV store takes in these trials, as the models have 128 positions; otherwise it is longer."""
BOOK = [*range(6, 46), *range(6, 46)]
"""A prompt that is stored, and offloaded."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Variant:
    """A tiny model of the tests.

    Attributes:
        name: of the tests.
        class_name: of transformers.
        make: builds it in float64.
        deeper: builds it with twice as many layers, so that some of them are offloaded; if none can be, it as it is.
    """

    name: str
    class_name: str
    make: Callable[[], PreTrainedModel]
    deeper: Callable[[], PreTrainedModel]


def variants() -> list[Variant]:
    """Return all that the tests build, without those that are refused."""
    found = []
    for group in (tiny.ARCHITECTURES, tiny.LAYOUTS, tiny.FAMILIES, tiny.HYBRIDS):
        found += [_tiny(name, *each) for name, each in group.items()]
    return found + [_compiled(name) for name in compiled_models.EVERY]


def _tiny(name: str, class_name: str, extra: dict[str, Any]) -> Variant:
    seed, deep = len(class_name), extra if name in tiny.HYBRIDS else _doubled(extra)
    return Variant(
        name, class_name, lambda: tiny.build(class_name, extra, seed), lambda: tiny.build(class_name, deep, seed)
    )


def _doubled(extra: dict[str, Any]) -> dict[str, Any]:
    kinds = {name: 2 * extra[name] for name in ("layer_types", "activation_sparsity_pattern") if name in extra}
    depth = {name: 2 * extra[name] for name in LAYERS if name in extra}
    return {**extra, "num_hidden_layers": 4, **depth, **kinds}


def _compiled(name: str) -> Variant:
    def make() -> PreTrainedModel:
        return compiled_models.build(name).double()

    return Variant(name, compiled_models.EVERY[name][0], make, make)


def look(variant: Variant) -> dict[str, str]:
    """Return its type, its path in float32 on a CPU, and its path on a GPU."""
    model = variant.make().float()
    scorer = gate.admit(model)
    path = "program" if isinstance(scorer, CompiledScorer) else "recurrent" if scorer.recurrent else "hooks"
    gpu = "recurrent" if scorer.recurrent else "program" if known_on_gpu(model) else "hooks"
    return {"type": model.config.get_text_config(decoder=True).model_type, "path": path, "gpu": gpu}


def bits(variant: Variant, dtype: torch.dtype) -> str:
    """Return the probe's level."""
    model = variant.make().to(dtype)
    return probe(gate.admit(model), position_limit(model)).level


def texts(variant: Variant) -> dict[str, str]:
    """Greedy in float64: whether texts are those of ``transformers`` with a trie and with a draft model, and those of
    one engine with keys and values from a store, or off the device."""
    model, deeper = variant.make(), variant.deeper()
    limit = position_limit(model)
    long = limit is None or limit >= len(BOOK) + 2 + GREEDY["max_new_tokens"]
    plain = tiny.texts_in_float64(model, **GREEDY)
    return {
        "trie": told(lambda: _drafted(model, "trie", plain)),
        "draft model": told(lambda: _drafted(model, "triforce", plain)),
        "store": told(lambda: _stored(model) if long else None),
        "offload": told(lambda: _offloaded(deeper) if long else None),
    }


def told(trial: Callable[[], bool | None]) -> str:
    """Return what came of a trial: ``equal``, ``not equal``, ``-`` if it was not made, or why it was refused."""
    try:
        result = trial()
    except ValueError as reason:
        return f"refused[{reason}]"
    return "-" if result is None else "equal" if result else "not equal"


def _drafted(model: PreTrainedModel, drafter: str, plain: Sequence[list[int]]) -> bool:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    small = tiny.tiny("llama") if vocabulary == tiny.VOCABULARY else compiled_models.build()
    settings = LongContextConfig(small, gamma1=2, gamma2=5, cache_budget=10, chunk=2, sinks=1, window=4, paced=False)
    engine = forerun.Engine(model, drafter, settings=settings, prefill_block=4, prune_drafts=False)
    if drafter == "trie":
        engine.warm(plain[1:])
    rows = engine.generate([list(prompt) for prompt in tiny.PROMPTS], **GREEDY).requests
    scored = sum(sum(request.stats.drafted) for request in rows)
    return scored > 0 and [request.tokens.tolist() for request in rows] == plain


def _stored(model: PreTrainedModel) -> bool | None:
    options: dict[str, Any] = {"prefill_block": 32, "prune_drafts": False}
    wanted = forerun.Engine(model, "none", **options).generate([*BOOK, 9, 8], **GREEDY).generated
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kv_store, "MIN_STORED_TOKENS", STORED_TOKENS):
        writer = forerun.Engine(model, "none", kv_store=folder, **options)
        writer.generate([*BOOK, 7], **GREEDY)
        writer.close()
        reader = forerun.Engine(model, "trie", kv_store=folder, **options)
        found = reader.generate([*BOOK, 9, 8], **GREEDY).generated
        hits = reader.prefixes.hits
        reader.close()
    return found == wanted if hits else None


def _offloaded(model: PreTrainedModel) -> bool | None:
    options: dict[str, Any] = {"prefill_block": 16, "prune_drafts": False}
    plain = forerun.Engine(model, "none", **options)
    memory = 1 if plain.target.recurrent else min_device_bytes(plain.target.kv, 128)
    away = forerun.Engine(model, "trie", kv_memory=KVMemory(memory), **options)
    found, wanted = (one.generate(list(BOOK), **GREEDY).generated for one in (away, plain))
    return found == wanted if away.tiers is not None and away.tiers.copy_engine.fetched else None


def refusals() -> dict[str, str]:
    return {name: _refusal(tiny.build(*each[:2], seed=3)) for name, each in tiny.REFUSED.items()}


def _refusal(model: PreTrainedModel) -> str:
    try:
        gate.admit(model)
    except gate.UnsupportedModelError as reason:
        return str(reason).partition(" is not supported: ")[2]
    return "not refused"
