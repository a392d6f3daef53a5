"""Heads in the target's checkpoint (MTP: DeepSeek-V3, section 2.2): layers that each predict a token further ahead.

transformers' ``MtpModel`` computes them; loading the target leaves them out. A layer reads a token's hidden state
(first the target's, after its final norm) and the next token's embedding; embeddings and output matrix are the
target's. Beyond their number, layers take turns again, each over its keys and values. Qwen's are in ``qwen_mtp.py``.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import ATTENTION_NAME, Scorer, experts, use_implementations
from forerun.models.heads.qwen_mtp import STATED, load_qwen_mtp
from forerun.models.heads.recurrent_head import RecurrentHead
from forerun.models.heads.shortlist import OutputMatrix
from forerun.models.loading.load import quiet

TRANSFORMERS_NAME = "num_mtp_layers"
"""transformers' configuration entry with the number of layers."""
THE_TARGETS = ("embed_tokens", "shared_head", "rotary_emb")
"""Parts of transformers' MTP model that belong to the target."""


class MtpHead(RecurrentHead):
    """The heads in the target's checkpoint, read when bound."""

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        model = target.model
        self._model = _layers_of(model).eval()
        config, name = text_config(model), type(model).__name__
        kinds = set(getattr(self._model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(f"the MTP layers of {name} are of type {sorted(kinds)}, which is not supported")
        for name, part in self._model.named_children():
            if name not in THE_TARGETS:  # a cast would round the angles that the target reads
                part.to(model.dtype)
        self._matrix = self.output = OutputMatrix.of_target(target, getattr(config, "unpadded_vocab_size", None))
        self.depth_layers, self.layers = len(self._model.layers), (int(config.num_hidden_layers),)
        self.token_bytes = self.depth_layers * max(layer.nbytes for layer in target.kv.layers.values())

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return states.to(self._model.dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._model.embed_tokens(tokens)
        return embedded

    def forward(
        self, layer: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        model, places = self._model, positions[None]
        with use_implementations(model, attn=ATTENTION_NAME, experts=experts(model)):
            angles = self._angles(layer, embeddings[None], places)
            mask = cache = None  # positional: transformers 5.23 names the cache past_key_values, later versions cache
            out = model.layers[layer](embeddings[None], hidden[None], angles, mask, places, cache)
        out = model.shared_post_norm(out) if model.use_shared_post_norm else out
        left: torch.Tensor = out[0]
        return left

    def _angles(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> object:
        model = self._model
        if model.rotary_emb is None:
            return None
        kind = {"layer_type": model.config.layer_types[layer]} if model.has_per_layer_rope else {}
        return model.rotary_emb(x, position_ids=positions, **kind)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        multiplier = getattr(self._model.config, "logits_mup_width_multiplier", None)
        return self._matrix(hidden if multiplier is None else hidden / multiplier)


def stated_layers(model: PreTrainedModel) -> int:
    """Return the number of MTP layers that a model's configuration states, 0 if none."""
    return next((n for name in (TRANSFORMERS_NAME, STATED) if (n := getattr(text_config(model), name, None))), 0)


def _layers_of(model: PreTrainedModel) -> MtpModel:
    """Load the layers from the target's files; raise ValueError with the reason if that fails."""
    config, name = text_config(model), type(model).__name__
    place = model.name_or_path or config.name_or_path or "memory"
    count = getattr(config, TRANSFORMERS_NAME, None)
    if not count:
        with quiet():
            heads = load_qwen_mtp(model)
        if heads is None:
            raise ValueError(
                f"{name} has no MTP layers: its configuration has no {TRANSFORMERS_NAME} and no "
                f"{STATED}, and there are no tensors mtp.* or blk.*.nextn.* in {place}"
            )
        return heads
    try:
        with quiet():
            return MtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:
        raise ValueError(
            f"{name} states {count} MTP layers ({TRANSFORMERS_NAME}), and they cannot be read from {place}: {error}"
        ) from error
