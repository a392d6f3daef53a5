"""Which models are supported: what their configuration says, and what a numerical self-test shows.

Silently wrong output is the worst a lossless accelerator can do. So a model passes only if its logits over a draft
tree, with a cache and in a packed batch, equal those of its own forward pass over each branch written out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.block import Block
from forerun.caches.full import FullCache
from forerun.model.native import native
from forerun.model.scorer import Scorer
from forerun.tree import DraftTree

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative error (norms over the vocabulary) that rounding explains; many models normalise in float32 in any case."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModelError(ValueError):
    """The model cannot be accelerated without risking its output."""


def check(model: PreTrainedModel) -> None:
    """Let a supported model pass.

    Raises:
        UnsupportedModelError: naming the reason.
    """
    admit(model)


def admit(model: PreTrainedModel) -> Scorer:
    """The fastest way through a model whose logits are the model's own.

    Raises:
        UnsupportedModelError: if there is none, naming the reason.
    """
    reason = _reason_in_config(model)
    if reason is None:
        plain = Scorer(model)
        program = native(plain)
        if program is not plain and _reason_in_numbers(program) is None:
            return program
        reason = _reason_in_numbers(plain)
        if reason is None:
            return plain
    raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def _reason_in_config(model: PreTrainedModel) -> str | None:
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ())
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {str(rope.get("rope_type"))} | {str(r.get("rope_type")) for r in rope.values() if isinstance(r, dict)}
    findings = (
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder; only decoders are"),
        (not model.can_generate(), "it has no language-modelling head; load it with AutoModelForCausalLM"),
        (model._is_stateful, "its layers are recurrent (a state that cannot be rolled back to an accepted draft)"),
        (bool(layer_types - LAYER_TYPES), f"it has layers of type {sorted(layer_types - LAYER_TYPES)}"),
        (_has_alibi(config), "its positions are encoded by ALiBi, a bias on every score"),
        ("dynamic" in rope_types, "its rotary embedding depends on the length of the text (rope type 'dynamic')"),
        (model.training, "it is in training mode, where dropout changes the output; call model.eval() first"),
    )
    return next((why for found, why in findings if found), None)


def _has_alibi(config: PreTrainedConfig) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False))


@torch.inference_mode()
def _reason_in_numbers(scorer: Scorer) -> str | None:
    try:
        error = _tree_error(scorer)
    except (RuntimeError, TypeError, KeyError, AttributeError) as exception:
        return f"its forward pass fails with Forerun's attention ({type(exception).__name__}: {exception})"
    limit = TOLERANCE[next(scorer.model.parameters()).dtype]
    if not error <= limit:
        return f"its logits over a draft tree differ from its own by {error:.2g} (relative; {limit:g} is allowed)"
    return None


def _tree_error(scorer: Scorer) -> float:
    """Largest relative error between tree scoring and the model's own forward pass, over two packed rows."""
    tokens = np.random.default_rng(0).integers(0, scorer.vocabulary, 32).tolist()
    tree = DraftTree(np.array(tokens[:5]), np.array([-1, 0, 0, 2, -1]))
    prompts = [tokens[8:15], tokens[20:31]]
    caches = [FullCache(), FullCache()]
    first = [Block(np.array(prompt[:4]), DraftTree.empty(), 0) for prompt in prompts]
    scorer.score(first, caches)
    for cache, block in zip(caches, first, strict=True):
        cache.commit(block, [])
    second = [Block(np.array(prompt[4:]), tree, 4) for prompt in prompts]
    scored = scorer.score(second, caches)
    return max(_row_error(scorer.model, prompt, tree, logits) for prompt, logits in zip(prompts, scored, strict=True))


def _row_error(model: PreTrainedModel, prompt: Sequence[int], tree: DraftTree, logits: torch.Tensor) -> float:
    """Over each branch written out: the model's own logits from the prompt's last token on, against the tree's."""
    errors = []
    for leaf in sorted(set(range(len(tree))) - set(tree.parents.tolist())):
        path = tree.ancestors[leaf].nonzero()[0]
        ids = torch.tensor([[*prompt, *tree.tokens[path].tolist()]], device=model.device)
        own = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
        scored = logits[[0, *(path + 1).tolist()]].double()
        errors.append(((scored - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12)).max())
    return float(torch.stack(errors).max())
