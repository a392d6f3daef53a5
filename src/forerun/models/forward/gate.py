"""Decide which models are supported, by configuration and a numerical self-test.

Silently wrong output would be the worst bug of a lossless accelerator. So a model is admitted only if its logits over a
draft tree, with a cache and in a packed batch, equal those of its plain forward pass over each branch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.linear import ordered_modules
from forerun.kernels.runtime.vector_ir import unusable
from forerun.kv.full_cache import FullCache
from forerun.models.forward import recurrent_layers
from forerun.models.forward.architecture import dtype_name, quantises
from forerun.models.forward.compiled_scorer import fastest_scorer
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.scorer import (
    Scorer,
    SelfTest,
    experts,
    gather_logits,
    is_sharded,
    tested,
    use_implementations,
)

log = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error (norm over the vocabulary) that rounding explains; many float64 models normalise in float32."""

RECURRENT_TOLERANCE = 1e-3
"""Minimum tolerance for recurrent layers: transformers computes them in float32 and in chunks, whatever the model's
type, and a state carries rounding from token to token. A sibling's state causes errors of 0.1 and more."""

QUANTISED_TOLERANCE = 5e-2
"""Minimum tolerance for activations of eight bits, where rounding moves some inputs to another integer. SmolLM2 in Q4_1
has errors of 0.024 to 0.038, and tiny models up to 0.021."""

KV_DTYPES = ("auto", "bfloat16")

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
UNWIDENED = frozenset({"__get__", "__set__", "__setitem__", "to", "type", "type_as", "bfloat16", "half"})
"""Functions that read or write a tensor's properties, or change its type."""

ROUTED_TEXTS = 4
"""Sequences that a model with experts is tested on. A router may choose differently in any pass between experts that
are equal up to rounding. So all positions must agree on one sequence; if a pass is wrong, none agrees."""

ONE_TOKEN_WINDOW = (
    "its sliding_window is 1, with which transformers' own text with a cache is not the one without: "
    "DynamicSlidingWindowLayer then keeps all tokens"
)
FOREIGN = "its attention does not go through transformers' attention interface"


class UnsupportedModelError(ValueError):
    """The model cannot be accelerated without risking its output."""


def kv_type(model: PreTrainedModel, name: str) -> torch.dtype | None:
    """Return the type of cached keys and values by name, None for the model's; raise ValueError if unsupported."""
    if name not in KV_DTYPES:
        raise ValueError(f"kv_dtype is {name!r}; allowed are {', '.join(KV_DTYPES)}")
    if name == "auto" or model.dtype == torch.bfloat16:
        return None
    given = f"kv_dtype is {name!r}, and the model is"
    if model.dtype != torch.float32:
        raise ValueError(f"{given} in {dtype_name(model)}; allowed are float32 and stored weights")
    if model.device.type != "cpu":
        raise ValueError(
            f"{given} on {model.device}, where attention reads keys of the model's type; load it in bfloat16"
        )
    if (reason := unusable()) is not None:
        raise ValueError(f"kv_dtype is {name!r}, and there is no kernel for it here: {reason}")
    return torch.bfloat16


def admit(model: PreTrainedModel, self_test: SelfTest = tested, kv_dtype: torch.dtype | None = None) -> Scorer:
    """Return the fastest scorer whose logits are the model's own; raise ``UnsupportedModelError`` with the reason."""
    reason = _reason_in_config(model)
    if reason is None:
        lay_out(model)
        recurrent_layers.adapt(model)
        plain = Scorer(model, kv_dtype)
        for scorer in dict.fromkeys((fastest_scorer(plain), plain)):
            reason = self_test(scorer, partial(_reason_in_numbers, scorer))
            if reason is None:
                return scorer
            if type(scorer) is not Scorer:
                log.warning(
                    "%s does not run %s, so it is slower: %s", type(scorer).__name__, type(model).__name__, reason
                )
    raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def lay_out(model: PreTrainedModel) -> None:
    """Change transposed weights to the kernels' memory layout, once: GPT-2 and gpt-oss's experts keep ``[K, O]`` and
    compute ``x @ weight``. Shape and numbers, and so results and saved files, do not change."""
    for weight in () if is_sharded(model) else _transposed(model):
        ordered_modules.lay_out(weight)


def _transposed(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Conv1D):
            yield module.weight
        elif getattr(module, "is_transposed", False):  # experts; transformers marks them with this attribute
            yield from (weight for weight in module.parameters(recurse=False) if weight.dim() == 3)


def _reason_in_config(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    recurrent = recurrent_layers.unsupported(model)
    findings = (
        (getattr(model.config, "is_encoder_decoder", False), "it is an encoder-decoder; only decoders are"),
        (
            type(model.config).is_encoder_decoder,
            "it is the decoder of an encoder-decoder, whose positions differ",
        ),
        (not model.can_generate(), "it has no language-modelling head; load it with AutoModelForCausalLM"),
        (recurrent is not None, recurrent or ""),
        (getattr(config, "sliding_window", None) == 1, ONE_TOKEN_WINDOW),
        (_has_alibi(config), "its positions are encoded by ALiBi, a bias on every score"),
        (model.training, "it is in training mode, where dropout changes the output; call model.eval() first"),
    )
    return next((why for found, why in findings if found), None)


def _has_alibi(config: PreTrainedConfig) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False))


@torch.inference_mode()
def _reason_in_numbers(scorer: Scorer) -> str | None:
    try:
        return _reason_in_trees(scorer) or _reason_in_chunk(scorer)
    except _PassError as failure:
        return str(failure) if scorer.model._can_set_attn_implementation() else FOREIGN


def _tolerance(scorer: Scorer) -> float:
    return max(rounding_error(scorer.model, scorer.kv_dtype), RECURRENT_TOLERANCE * scorer.recurrent)


def rounds(model: PreTrainedModel) -> bool:
    """Return whether a model's own logits need float32 logits as a judge: in 16 bits, or with quantised activations."""
    return model.dtype in SIXTEEN_BIT or quantises(model)


def rounding_error(model: PreTrainedModel, kv_dtype: torch.dtype | None = None) -> float:
    """Return the relative error that rounding alone explains. Keys and values in bfloat16 round as a bfloat16 model
    does, so they have its tolerance: SmolLM2 in float32 has errors of up to 0.016, tiny models 0.019."""
    return max(TOLERANCE[kv_dtype or model.dtype], QUANTISED_TOLERANCE * quantises(model))


@contextmanager
def unrounded(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's own forward pass compute in float32, without quantising."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "quantised", False)]
    for module in modules:
        module.quantised = False
    try:
        with Float32View():
            yield
    finally:
        for module in modules:
            module.quantised = True


def _reason_in_trees(scorer: Scorer) -> str | None:
    limit, errors = _tolerance(scorer), list[float]()
    several = _has_experts(scorer.model) or quantises(scorer.model)
    for text in range(ROUTED_TEXTS if several else 1):
        errors.append(_tree_error(scorer, text))
        if errors[-1] <= limit:
            return None
    return f"its logits over a draft tree differ from its own by {min(errors):.2g} (relative; {limit:g} is allowed)"


def _reason_in_chunk(scorer: Scorer) -> str | None:
    count, limit = scorer.prompt_chunk, position_limit(scorer.model)
    if count is None or (limit is not None and limit < 2 * count):
        return None
    tokens = np.random.default_rng(0).integers(0, scorer.vocabulary, 2 * count)
    last: list[torch.Tensor] = []
    for whole_chunk in (True, False):
        cache = FullCache()
        for start in (0, count):
            block = Block(tokens[start : start + count], DraftTree.empty(), start, whole_chunk)
            with _naming("a pass over a complete prompt chunk"):
                logits = scorer.score([block], [cache])[0]
            cache.commit(block, [])
        last.append(logits)
    error = _error(scorer.model, [torch.tensor(tokens[None], device=scorer.model.device)], last[:1], last[1:])
    if error <= _tolerance(scorer):
        return None
    return f"logits of a complete prompt chunk are off by {error:.2g} (relative)"


def _has_experts(model: PreTrainedModel) -> bool:
    return any("Expert" in type(module).__name__ for module in model.modules())


class _PassError(Exception):
    """A forward pass that raised an error or skipped a required call."""


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except _PassError:
        raise
    except Exception as error:
        raise _PassError(f"{what} fails ({type(error).__name__}: {error})") from error


def _tree_error(scorer: Scorer, text: int) -> float:
    tokens = np.random.default_rng(text).integers(0, scorer.vocabulary, 32).tolist()
    tree = DraftTree(np.array(tokens[:5]), np.array([-1, 0, 0, 2, -1]))
    prompts = [tokens[8:15], tokens[20:31]]
    with _naming("a pass over two packed sequences"):
        scored = _score(scorer, prompts, tree)
    model = scorer.model
    with _naming("the model's own forward pass"), use_implementations(model, experts=experts(model)):
        rows = zip(prompts, scored, strict=True)
        texts, found = zip(*(each for prompt, logits in rows for each in _branches(prompt, tree, logits)), strict=True)
        ids = [torch.tensor([tokens], device=model.device) for tokens in texts]
        own = [_own(model, each, len(logits)) for each, logits in zip(ids, found, strict=True)]
        return _error(model, ids, found, own)


def _score(scorer: Scorer, prompts: Sequence[Sequence[int]], tree: DraftTree) -> list[torch.Tensor]:
    """Return logits after each prompt and over its tree. First tokens come from caches, two as nodes of a tree."""
    caches = [FullCache(), FullCache()]
    first = [Block(np.array(prompt[:2]), _around(prompt[2:4]), 0) for prompt in prompts]
    scorer.score(first, caches)
    if not all(cache.layers or scorer.recurrent for cache in caches):
        raise _PassError(FOREIGN)
    _check_windows(scorer.model, caches[0])
    for cache, block in zip(caches, first, strict=True):
        cache.commit(block, [1, 3])
    return scorer.score([Block(np.array(prompt[4:]), tree, 4) for prompt in prompts], caches)


def _around(tokens: Sequence[int]) -> DraftTree:
    """Make a tree in which two tokens are the nodes 1 and 3, each after a sibling."""
    first, second = tokens
    return DraftTree(np.array([second, first, first, second]), np.array([-1, -1, 1, 1]))


def _check_windows(model: PreTrainedModel, cache: FullCache) -> None:
    """Reject a model whose window is only in its mask: the sequences here are too short to show that it is missing."""
    config = model.config.get_text_config(decoder=True)
    window, limit = getattr(config, "sliding_window", None), position_limit(model)
    if not window or (limit is not None and window >= limit):
        return
    kinds = getattr(config, "layer_types", None)
    for layer, spec in cache.specs.items():
        if spec.window is None and (kinds is None or kinds[layer] == "sliding_attention"):
            raise _PassError(
                f"layer {layer} has a window of {window} tokens only in its mask, which Forerun does not read"
            )


def _branches(prompt: Sequence[int], tree: DraftTree, logits: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield each branch of a tree as a sequence after the prompt, and its nodes' logits, ``[nodes, V]``."""
    for leaf in sorted(set(range(len(tree))) - set(tree.parents.tolist())):
        path = tree.ancestors[leaf].nonzero()[0]
        yield [*prompt, *tree.tokens[path].tolist()], logits[[0, *(path + 1).tolist()]]


def _error(
    model: PreTrainedModel, ids: Sequence[torch.Tensor], scored: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
) -> float:
    """Return the largest relative error of logits at the last tokens of sequences ``[1, t]``, against the model's own.

    If the two differ in 16 bits, or with quantised activations, both are compared with float32 logits, and the model's
    largest error is subtracted from ours: over all sequences, because rounding affects different ones in each pass.
    """
    error = max(map(relative_error, scored, own))
    if rounds(model) and error > rounding_error(model):
        with unrounded(model), use_implementations(model, experts=experts(model)):
            wide = [_own(model, each, len(logits)) for each, logits in zip(ids, scored, strict=True)]
        error = max(map(relative_error, scored, wide)) - max(map(relative_error, own, wide))
    return error


def _own(model: PreTrainedModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return gather_logits(model, model(input_ids=ids, attention_mask=mask, use_cache=False).logits)[0, -count:]


def relative_error(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest relative error of any row ``[..., V]``, by norms over the vocabulary."""
    off = (logits.double() - right.double()).norm(dim=-1) / right.double().norm(dim=-1).clamp_min(1e-12)
    return float(off.max())


class Float32View(TorchFunctionMode):
    """A context in which functions get 16-bit floats widened to float32, one tensor at a time, and so return float32.

    A 16-bit model then computes in float32 without a second copy. Functions that change a tensor in place and
    conversions are excluded: where a model rounds on purpose, it still rounds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in UNWIDENED or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN_BIT else value
