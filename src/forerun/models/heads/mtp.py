"""Heads that come in a checkpoint (MTP: DeepSeek-V3, section 2.2): further decoder layers, each a token further ahead.

transformers builds and reads them (``MtpModel``); the target's own loading leaves them out. A layer reads the hidden
state of a token, at first the target's last, and the embedding of a token behind it. Embeddings and the head are the
target's. Beyond as many tokens as there are layers, the layers take turns again, each over its own keys and values.
"""

from __future__ import annotations

import torch
from transformers.modeling_layers import MtpModel

from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import ATTENTION_NAME, Scorer, experts, use_implementations
from forerun.models.heads.head import RecurrentHead
from forerun.models.heads.shortlist import OutputMatrix
from forerun.models.loading.load import quiet

THE_TARGETS = ("embed_tokens", "shared_head", "rotary_emb")
"""Parts of transformers' model of the heads that are the target's own."""


class MtpHead(RecurrentHead):
    """The heads in the target's own checkpoint; they are read when the target is known."""

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        model = target.model
        config, name = text_config(model), type(model).__name__
        count = getattr(config, "num_mtp_layers", None)
        if not count:
            raise ValueError(f"{name} has no heads for further tokens: its configuration has no num_mtp_layers")
        try:
            with quiet():
                heads = MtpModel.from_pretrained(model, device_map={"": target.device})
            self._model = heads.eval()
        except Exception as error:
            raise ValueError(
                f"{name} says that it has {count} heads for further tokens (num_mtp_layers), and they cannot be read "
                f"from {config.name_or_path or model.config.name_or_path or 'memory'}: {error}"
            ) from error
        kinds = set(getattr(self._model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(
                f"the heads for further tokens of {name} are of type {sorted(kinds)}, which is not supported"
            )
        for name, part in self._model.named_children():
            if name not in THE_TARGETS:  # a cast would round the angles that the target itself reads
                part.to(model.dtype)
        self._matrix = self.output = OutputMatrix.of_target(target, getattr(config, "unpadded_vocab_size", None))
        self.depth_layers, self.layers = int(count), (int(config.num_hidden_layers),)
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
            mask = cache = None  # by position: the cache is named past_key_values in transformers 5.23, then cache
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
