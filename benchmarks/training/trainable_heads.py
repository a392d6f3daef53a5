"""Heads as torch modules, to be trained: EAGLE-3 (Li et al., 2025) and one MTP layer (DeepSeek-V3, section 2.2).

Both join a token's embedding with the hidden state before it, and run one decoder layer: EAGLE-3's attention reads them
side by side, an MTP layer projects them to one vector first. Both learn by training-time test (EAGLE-3, section 3.2):
after a step over the target's states, further steps run over the head's output, as in drafting.
"""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.training.hybrid import renamed
from forerun.models.heads.qwen_mtp import PREFIX, STATED

DECAY = 0.8  # weight of a step's loss relative to the previous step's; the authors' value
Earlier = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [B, H, n, d] of each earlier step


class Kind(enum.StrEnum):
    """What is trained."""

    EAGLE3 = "eagle3"
    EAGLE31 = "eagle3.1"
    MTP = "mtp"


class TrainableLayer(nn.Module):
    """A decoder layer, named as in Llama. ``wide`` is the size of the attention's input; ``normed`` queries and keys
    have norms, named as in LFM2."""

    def __init__(self, config: LlamaConfig, wide: int, normed: bool = False) -> None:
        super().__init__()
        size, self.dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        shapes = {"q": (wide, heads), "k": (wide, kv_heads), "v": (wide, kv_heads), "o": (heads, size)}
        self.self_attn = nn.ModuleDict({f"{part}_proj": nn.Linear(*each, bias=False) for part, each in shapes.items()})
        for part in "qk" if normed else "":
            self.self_attn[f"{part}_layernorm"] = LlamaRMSNorm(self.dim, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, angles: Any, earlier: Earlier) -> torch.Tensor:
        """Run a step over all entries, ``[B, n, wide]`` to ``[B, n, hidden]``; its keys and values are added to
        ``earlier``. An entry attends to the first step's entries up to itself, and to itself in later steps."""
        q, k, v = (self._projected(part, x).transpose(1, 2) for part in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *angles)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        earlier.append((k, v))
        n = x.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        scores = [(q @ earlier[0][0].transpose(-1, -2)).masked_fill(~causal, -torch.inf)]
        scores += [(q * own).sum(-1, keepdim=True) for own, _ in earlier[1:]]
        weights = (torch.cat(scores, -1) * self.dim**-0.5).softmax(-1)
        out = weights[..., :n] @ earlier[0][1]
        for number, (_, own) in enumerate(earlier[1:]):
            out = out + weights[..., n + number, None] * own
        hidden = residual + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _projected(self, part: str, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.self_attn[f"{part}_proj"](x).unflatten(-1, (-1, self.dim))
        norm = f"{part}_layernorm"
        return self.self_attn[norm](own) if norm in self.self_attn else own


class TrainableHead(nn.Module):
    """What both kinds share. Parameters have their names in files.

    Args:
        target: gives the sizes, and the output matrix at first, which stays if ``frozen``.
        known: the target's ids of the tokens to train on, ascending.
        layers: of the target that are read, as ``Scorer.score_rows`` numbers them.
        eps: of the norms.
        more: configuration entries beyond the target's, or in place of them.
    """

    feeds_normed: bool  # whether later steps run over normalised output

    def __init__(
        self, target: PreTrainedModel, known: torch.Tensor, layers: Sequence[int], frozen: bool, eps: float,
        more: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        base = target.config.get_text_config(decoder=True)
        size, heads = int(base.hidden_size), int(base.num_attention_heads)
        self.settings: dict[str, Any] = {
            "hidden_size": size, "num_attention_heads": heads, "num_key_value_heads": int(base.num_key_value_heads),
            "head_dim": int(getattr(base, "head_dim", None) or size // heads), "rms_norm_eps": eps,
            "intermediate_size": int(base.intermediate_size), "hidden_act": "silu", "num_hidden_layers": 1,
            "vocab_size": int(target.get_input_embeddings().weight.shape[0]),
            "max_position_embeddings": int(base.max_position_embeddings), **more,
        }  # fmt: skip
        self.layers, self.known = tuple(layers), known
        self.llama = LlamaConfig(**self.settings)
        self.norm = self.new_norm()
        self.lm_head = nn.Linear(size, len(known), bias=False)
        self.lm_head.weight.data.copy_(target.get_output_embeddings().weight[known].float())
        self.lm_head.requires_grad_(not frozen)
        self.rotary = LlamaRotaryEmbedding(self.llama)

    def new_norm(self) -> LlamaRMSNorm:
        return LlamaRMSNorm(self.llama.hidden_size, self.llama.rms_norm_eps)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Compute what the first step reads from the target's states, ``[..., layers * hidden]``."""
        raise NotImplementedError

    def step(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, number: int, earlier: Earlier
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run step ``number``, ``[B, n, hidden]``. Returns what the next one reads, and the output matrix' input."""
        places = torch.arange(hidden.shape[1], device=hidden.device)[None] + number
        out = self.run(embeddings, hidden, self.rotary(hidden, places), earlier)
        normed = self.norm(out)
        return normed if self.feeds_normed else out, normed

    def run(self, embeddings: torch.Tensor, hidden: torch.Tensor, angles: Any, earlier: Earlier) -> torch.Tensor:
        """Run the layer, ``[B, n, hidden]`` in and out."""
        raise NotImplementedError

    def losses(
        self, states: torch.Tensor, embeddings: torch.Tensor, last: torch.Tensor, mask: torch.Tensor,
        head: torch.Tensor, ahead: int,
    ) -> tuple[torch.Tensor, list[float]]:  # fmt: skip
        """Return the weighted loss of all steps, and how often each step's best token is the target's.

        Args:
            states, embeddings: the target's, ``[B, n, layers * hidden]``, and of the tokens, ``[B, n, hidden]``.
            last: the states that the target's output matrix multiplies, ``[B, n, hidden]``.
            mask: 1 where the next token is of an answer, ``[B, n]``.
            head: the target's rows of the known tokens, ``[D, hidden]``.
            ahead: number of steps.
        """
        rows, places = mask.nonzero(as_tuple=True)
        teacher = (last[rows, places] @ head.T).softmax(-1)
        total, n = states.new_zeros(()), states.shape[1] - ahead
        hidden, earlier, right = self.features(states[:, :n]), Earlier(), list[float]()
        for number in range(ahead):
            hidden, normed = self.step(embeddings[:, number + 1 : number + 1 + n], hidden, number, earlier)
            entries = places - number - 1
            kept = (entries >= 0) & (entries < n)
            logits = self.lm_head(normed[rows[kept], entries[kept]]).log_softmax(-1)
            aim = teacher[kept]
            total = total - DECAY**number * (aim * logits).sum(-1).mean()
            right.append(float((logits.argmax(-1) == aim.argmax(-1)).float().mean()))
        return total, right

    def learned(self) -> dict[str, torch.Tensor]:
        named = ((name, weight) for name, weight in self.named_parameters() if weight.requires_grad)
        return {name: weight.detach().cpu().contiguous() for name, weight in named}

    def export(self, target: PreTrainedModel, out: Path) -> None:
        raise NotImplementedError


class TrainableEagle3(TrainableHead):
    """An EAGLE-3 head, written in its authors' format; vLLM and SGLang load it, too. ``eagle31``: each state has a
    norm, and normalised output is fed back."""

    def __init__(
        self, target: PreTrainedModel, known: torch.Tensor, frozen: bool = False, eagle31: bool = False
    ) -> None:
        count = int(target.config.get_text_config(decoder=True).num_hidden_layers)
        # those that other engines read by default, if there are enough
        layers = (2, count // 2, count - 3) if count >= 6 else (1, max(1, count // 2), max(1, count - 1))
        super().__init__(target, known, layers, frozen, 1e-5, {"rope_theta": 10000.0})
        size, count, self.feeds_normed = self.llama.hidden_size, len(self.layers), eagle31
        self.fc_norm = nn.ModuleList(self.new_norm() for _ in self.layers if eagle31)
        self.fc = nn.Linear(count * size, size, bias=False)
        self.midlayer = TrainableLayer(self.llama, 2 * size)
        self.midlayer.hidden_norm = self.new_norm()
        start(self.midlayer)
        self.fc.weight.data = torch.cat([torch.zeros(size, (count - 1) * size), torch.eye(size)], -1)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        if self.feeds_normed:
            parts = states.chunk(len(self.layers), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def run(self, embeddings: torch.Tensor, hidden: torch.Tensor, angles: Any, earlier: Earlier) -> torch.Tensor:
        layer: Any = self.midlayer
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], -1)
        return layer(x, hidden, angles, earlier)

    def export(self, target: PreTrainedModel, out: Path) -> None:
        tensors, vocabulary, known = self.learned(), self.settings["vocab_size"], self.known.cpu()
        if not self.lm_head.weight.requires_grad:
            known = torch.arange(vocabulary)
        if len(known) < vocabulary:
            tensors["d2t"] = known - torch.arange(len(known))
            tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, known, True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **self.settings,
            "draft_vocab_size": len(known), "tie_word_embeddings": False, "torch_dtype": "float32",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers), "use_aux_hidden_state": True},
        }  # fmt: skip
        config |= {"fc_norm": True, "norm_output": True} if self.feeds_normed else {}
        save_file(tensors, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config, indent=2))


class TrainableMtp(TrainableHead):
    """An MTP layer for a Llama or an LFM2, written into a copy of the target's folder, named as Qwen's; raises
    ValueError for another target."""

    feeds_normed = True

    def __init__(self, target: PreTrainedModel, known: torch.Tensor) -> None:
        config = target.config
        if config.model_type not in ("llama", "lfm2") or not Path(target.name_or_path).is_dir():
            this = f"a {config.model_type} in {target.name_or_path}"
            raise ValueError(f"an MTP layer is trained for a Llama or an LFM2 in a folder; this is {this}")
        self.is_lfm2 = config.model_type == "lfm2"
        layers, more = (int(config.num_hidden_layers),), {"rope_parameters": config.rope_parameters}
        if self.is_lfm2:  # which may round its configuration's size
            more["intermediate_size"] = target.get_decoder().layers[-1].feed_forward.w1.out_features
        super().__init__(target, known, layers, True, config.norm_eps if self.is_lfm2 else config.rms_norm_eps, more)
        size = self.llama.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = self.new_norm(), self.new_norm()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = TrainableLayer(self.llama, size, normed=self.is_lfm2)
        start(self.layer)
        self.fc.weight.data = torch.cat([torch.zeros(size, size), torch.eye(size)], -1)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def run(self, embeddings: torch.Tensor, hidden: torch.Tensor, angles: Any, earlier: Earlier) -> torch.Tensor:
        parts = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        joined = self.fc(torch.cat(parts, -1))
        return self.layer(self.layer.input_layernorm(joined), joined, angles, earlier)

    def export(self, target: PreTrainedModel, out: Path) -> None:
        for file in Path(target.name_or_path).iterdir():
            if file.is_file():
                shutil.copyfile(file, out / file.name)
        layered = {name.replace("layer.", "layers.0.", 1): each for name, each in self.learned().items()}
        named = {renamed(name) if self.is_lfm2 else name: each.to(target.dtype) for name, each in layered.items()}
        save_file({f"{PREFIX}{name}": each for name, each in named.items()}, out / "mtp.safetensors")
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, STATED: 1}, indent=2))


def start(layer: nn.Module) -> None:
    """Initialise a layer's matrices, equally each time."""
    torch.manual_seed(0)
    for weight in layer.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
