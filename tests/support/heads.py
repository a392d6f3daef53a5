"""Random heads in folders, as other programs write them, and a head that knows what comes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from forerun.core.tree import IntArray
from forerun.kv.cache import Cache
from forerun.models.heads.head import Growth, Head, HeadSequence
from forerun.models.loading.load import quiet
from support.tiny import FAMILIES, build


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name or "scalar" in name else 0.0)
        for name, shape in shapes.items()
    }


def _layer_shapes(size: int, wide: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer with four heads on two, whose projections read ``wide`` numbers."""
    narrow = size // 4 * 2
    return {
        "input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (size, wide), "self_attn.k_proj.weight": (narrow, wide),
        "self_attn.v_proj.weight": (narrow, wide), "self_attn.o_proj.weight": (size, size),
        "mlp.gate_proj.weight": (40, size), "mlp.up_proj.weight": (40, size), "mlp.down_proj.weight": (size, 40),
    }  # fmt: skip


def _layer_config(target: PreTrainedModel, layers: int = 1) -> dict[str, Any]:
    size = int(target.config.hidden_size)
    return {
        "hidden_size": size, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size // 4,
        "intermediate_size": 40, "vocab_size": int(target.get_input_embeddings().weight.shape[0]),
        "rms_norm_eps": 1e-5, "num_hidden_layers": layers, "max_position_embeddings": 512, "rope_theta": 1e4,
        "hidden_act": "silu",
    }  # fmt: skip


def _token_maps(known: int, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    """Which tokens a head knows, in both directions; nothing for one that knows all."""
    chosen = np.sort(np.random.default_rng(seed).permutation(vocabulary)[:known])
    maps = {
        "d2t": torch.from_numpy(chosen - np.arange(known)),
        "t2d": torch.from_numpy(np.isin(np.arange(vocabulary), chosen)),
    }
    return maps if known < vocabulary else {}


def _eagle(
    folder: Path, target: PreTrainedModel, form: str, config: dict[str, Any], entries: dict[str, Any], seed: int,
    more: dict[str, tuple[int, ...]], maps: dict[str, torch.Tensor],
) -> Path:  # fmt: skip
    """Write a head with EAGLE-3's tensors and more: the layer's configuration is inside, or beside the rest."""
    size = int(target.config.hidden_size)
    layer = {f"midlayer.{name}": shape for name, shape in _layer_shapes(size, 2 * size).items()}
    shapes: dict[str, tuple[int, ...]] = {
        **layer, "fc.weight": (size, 3 * size), "midlayer.hidden_norm.weight": (size,), "norm.weight": (size,),
        "lm_head.weight": (config["draft_vocab_size"], size),
        **{f"fc_norm.{n}.weight": (size,) for n in range(3 * bool(entries.get("fc_norm")))},
        **({"input_norm.weight": (3 * size,)} if entries.get("norm_before_fc") else {}), **more,
    }  # fmt: skip
    tensors = _random(shapes, seed) | maps
    if form != "authors":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return _write(folder, config | entries, tensors)


def eagle3(
    folder: Path, target: PreTrainedModel, form: str = "authors", known: int | None = None, seed: int = 0,
    **entries: Any,
) -> Path:  # fmt: skip
    """A random EAGLE-3 head: the authors' form, with a part of the vocabulary; or that of ``speculators``, with all.

    Further entries of its configuration bring the tensors that they need.
    """
    layer, authors = _layer_config(target), form == "authors"
    known = known or layer["vocab_size"] // (2 if authors else 1)
    states = {"eagle_aux_hidden_state_layer_ids": [0, 1, int(target.config.num_hidden_layers)]}
    if authors:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "eagle_config": states}
    else:
        inner = {"transformer_layer_config": {"model_type": "llama", **layer}}
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], **states, **inner}
        config["norm_before_residual"] = True
    maps = _token_maps(known, layer["vocab_size"], seed)
    return _eagle(folder, target, form, config | {"draft_vocab_size": known}, entries, seed, {}, maps)


def eagle31(folder: Path, target: PreTrainedModel) -> Path:
    """A random EAGLE-3 head with the norms of EAGLE-3.1."""
    return eagle3(folder, target, fc_norm=True, norm_output=True)


def peagle(folder: Path, target: PreTrainedModel, form: str = "authors", seed: int = 0, **entries: Any) -> Path:
    """A random P-EAGLE head of two layers that predicts four tokens a pass."""
    layer, authors, size = _layer_config(target, 2), form == "authors", int(target.config.hidden_size)
    vocabulary = layer["vocab_size"]
    known = vocabulary if authors else vocabulary // 2
    states = [0, 1, int(target.config.num_hidden_layers)]
    config: dict[str, Any] = {"draft_vocab_size": known, "eagle_aux_hidden_state_layer_ids": states}
    if authors:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer, "ptd_token_id": 2, "para_depths": 4}
        maps = {"d2t": torch.zeros(known, dtype=torch.int64), "t2d": torch.ones(vocabulary, dtype=torch.bool)}
    else:
        config |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 2,
                   "norm_before_residual": True, "norm_output": True,
                   "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
                   "transformer_layer_config": {"model_type": "llama", **layer}}  # fmt: skip
        maps = _token_maps(known, vocabulary, seed)
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 1, 3 * size)}
    shapes |= {f"layers.1.{name}": shape for name, shape in _layer_shapes(size, size).items()}
    shapes["embed_tokens.weight"] = vocabulary, size
    return _eagle(folder, target, form, config, entries, seed, shapes, maps)


def _dflash_parts(target: PreTrainedModel, sliding: bool) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The configuration of two layers, and the shapes of DFlash's tensors."""
    size = int(target.config.hidden_size)
    layer = _layer_config(target, 2)
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    if sliding:
        layer |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size), "hidden_norm.weight": (size,), "norm.weight": (size,),
    }  # fmt: skip
    for number in range(2):
        at = f"layers.{number}."
        shapes |= {f"{at}{name}": shape for name, shape in _layer_shapes(size, size).items()}
        shapes |= {f"{at}self_attn.{part}_norm.weight": (size // 4,) for part in "qk"}
    return layer, shapes


def _dflash_config(
    layer: dict[str, Any], form: str, kind: str, architecture: str, entries: dict[str, Any], nested: dict[str, Any]
) -> dict[str, Any]:
    """A configuration in the authors' form, or in that of ``speculators``."""
    if form == "authors":
        inner = {"target_layer_ids": [0, 1], "mask_token_id": 2, **nested}
        return {"architectures": [architecture], "model_type": "qwen3", **layer, **entries, "dflash_config": inner}
    return {"speculators_model_type": kind, "architectures": [architecture], "aux_hidden_state_layer_ids": [1, 2],
            "mask_token_id": 2, **entries, **nested,
            "transformer_layer_config": {"model_type": "qwen3", **layer}}  # fmt: skip


def dflash(
    folder: Path, target: PreTrainedModel, block: int = 5, sliding: bool = False, seed: int = 0, form: str = "authors",
    inner: dict[str, Any] | None = None, **entries: Any,
) -> Path:  # fmt: skip
    """A random DFlash head of two layers; in the form of ``speculators``, one that knows a part of the vocabulary."""
    layer, shapes = _dflash_parts(target, sliding)
    authors = form == "authors"
    architecture, vocabulary = "DFlashDraftModel" if authors else "DFlashSpeculator", layer["vocab_size"]
    known = vocabulary if authors else vocabulary // 2
    if not authors:
        entries = {"draft_vocab_size": known, "sample_from_anchor": False, **entries}
        shapes["lm_head.weight"] = known, layer["hidden_size"]
    config = _dflash_config(layer, form, "dflash", architecture, {"block_size": block, **entries}, inner or {})
    return _write(folder, config, _random(shapes, seed) | _token_maps(known, vocabulary, seed))


def dflash2(
    folder: Path, target: PreTrainedModel, sliding: bool = False, seed: int = 0, form: str = "authors", **entries: Any
) -> Path:
    """A random DFlash2 head of two layers, whose kernels have three taps and whose selector has six candidates."""
    layer, shapes = _dflash_parts(target, sliding)
    size, vocabulary = layer["hidden_size"], layer["vocab_size"]
    for at in (f"layers.{number}.{part}_conv." for number in range(2) for part in ("attention", "mlp")):
        shapes |= {f"{at}base_kernel": (2, 3, size), f"{at}kernel_projection.weight": (2 * 3 * size // 8, size)}
    shapes["candidate_selector.hidden_projection.weight"] = 4, size
    codebook = "" if form == "authors" else ".weight"
    shapes |= {
        f"candidate_selector.{side}_codebook{codebook}": (vocabulary, 4) for side in ("predecessor", "successor")
    }
    nested = {"block_size": 5, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
    config = _dflash_config(layer, form, "dflash2", "DFlash2DraftModel", entries, nested)
    return _write(folder, config, _random(shapes, seed))


GEMMA4_LAYERS = ["sliding_attention", "full_attention"] * 3


def gemma4(dtype: torch.dtype = torch.float64, shared: int = 2, unified: bool = False, **more: Any) -> PreTrainedModel:
    """A random Gemma 4 of six layers, the last ``shared`` of which have no keys of their own."""
    class_name, extra = FAMILIES["gemma4"]
    layers = {"num_hidden_layers": 6, "num_kv_shared_layers": shared, "layer_types": GEMMA4_LAYERS}
    extra = {**extra, **layers, "max_position_embeddings": 512, **more}
    return build("Gemma4UnifiedForCausalLM" if unified else class_name, extra, seed=6).to(dtype)


def _assistant_config(target: PreTrainedModel, kinds: list[str], unified: bool = False, **inner: Any) -> dict[str, Any]:
    theirs, form = target.config.get_text_config(), "gemma4_unified" if unified else "gemma4"
    shape: dict[str, Any] = {
        "model_type": f"{form}_text", "vocab_size": theirs.vocab_size, "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": len(kinds), "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "global_head_dim": 16, "sliding_window": theirs.sliding_window,
        "rope_parameters": theirs.rope_parameters, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    name = "Gemma4UnifiedAssistantForCausalLM" if unified else "Gemma4AssistantForCausalLM"
    config = {"architectures": [name], "model_type": f"{form}_assistant", "backbone_hidden_size": theirs.hidden_size}
    return config | {"text_config": shape | inner}


def gemma4_assistant(
    folder: Path, target: PreTrainedModel, centroids: int = 0, unified: bool = False, seed: int = 0
) -> Path:
    """A random assistant of three layers, in the names and shapes of Google's files."""
    vocabulary, wide, size = int(target.config.vocab_size), int(target.config.hidden_size), 24
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = _assistant_config(target, kinds, unified, hidden_size=size, intermediate_size=40)
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (size, 2 * wide), "post_projection.weight": (wide, size),
        "model.embed_tokens.weight": (vocabulary, size), "model.norm.weight": (size,),
    }  # fmt: skip
    for layer, kind in enumerate(kinds):
        at, dim = f"model.layers.{layer}.", 8 if kind == "sliding_attention" else 16
        norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        shapes |= {f"{at}{norm}.weight": (size,) for norm in norms}
        shapes |= {f"{at}layer_scalar": (1,), f"{at}self_attn.q_norm.weight": (dim,)}
        shapes |= {f"{at}self_attn.q_proj.weight": (4 * dim, size), f"{at}self_attn.o_proj.weight": (size, 4 * dim)}
        shapes |= {f"{at}mlp.{part}_proj.weight": (40, size) for part in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = size, 40
    tensors = _random(shapes, seed)
    if centroids:
        config |= {"use_ordered_embeddings": True, "num_centroids": centroids, "centroid_intermediate_top_k": 3}
        tensors |= _random({"masked_embedding.centroids.weight": (centroids, size)}, seed)
        order = np.random.default_rng(seed).permutation(vocabulary)
        tensors["masked_embedding.token_ordering"] = torch.from_numpy(order)
    return _write(folder, config, tensors)


def gemma4_and_its_last_layers(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A Gemma 4 whose last two layers, in the folder, are an assistant that is often right.

    The layers with keys of their own add nothing to the residual stream. So the last two compute the next token from an
    embedding and these keys, of which the assistant lacks the last token's and those of drafts.
    """
    model = gemma4(tie_word_embeddings=False)
    for number, layer in enumerate(model.model.layers):
        parts = [layer.per_layer_projection] + [layer.self_attn.o_proj, layer.mlp.down_proj] * (number < 4)
        for part in parts:
            part.weight.data.zero_()
    for layer in model.model.layers[4:]:  # flat attention: a query's own key hardly counts
        layer.self_attn.q_norm.weight.data.fill_(0.3)
    config = _assistant_config(
        model, GEMMA4_LAYERS[4:], hidden_size=32, intermediate_size=48, tie_word_embeddings=False
    )
    tensors = {"pre_projection.weight": torch.eye(32, 64).double(), "post_projection.weight": torch.eye(32).double()}
    for name, weight in model.state_dict().items():
        plain = name.replace("layers.4.", "layers.0.").replace("layers.5.", "layers.1.") if ".layers." in name else name
        read = plain != name and "per_layer" not in name
        if read or name in ("model.norm.weight", "lm_head.weight"):
            tensors[plain] = weight.clone()
    _write(folder, config | {"tie_word_embeddings": False}, tensors)
    return model.to(dtype)


def dspark(
    folder: Path, target: PreTrainedModel, markov: str = "vanilla", sliding: bool = False, seed: int = 0,
    form: str = "authors", **entries: Any,
) -> Path:  # fmt: skip
    """A random DSpark head of two layers, with a Markov head of rank 4."""
    layer, shapes = _dflash_parts(target, sliding)
    size, vocabulary, authors = layer["hidden_size"], layer["vocab_size"], form == "authors"
    known = vocabulary if authors else vocabulary // 2
    shapes |= {"markov_head.markov_w1.weight": (vocabulary, 4), "markov_head.markov_w2.weight": (known, 4)}
    shapes |= {"confidence_head.proj.weight": (1, size + 4), "confidence_head.proj.bias": (1,)}
    made = {"gated": ("gate_proj", 4, size + 4), "rnn": ("joint_proj", 12, size + 8)}
    if markov in made:
        name, out, wide = made[markov]
        shapes |= {f"markov_head.{name}.weight": (out, wide), f"markov_head.{name}.bias": (out,)}
    shapes["lm_head.weight"] = known, size
    entries = {"block_size": 4, "markov_rank": 4, "markov_head_type": markov, "enable_confidence_head": True,
               "confidence_head_with_markov": True, **entries}  # fmt: skip
    if authors:  # DeepSpec's entries stand beside the layers', and its file has all matrices
        shapes["embed_tokens.weight"] = vocabulary, size
        config = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **layer, "num_anchors": 8,
                  "target_layer_ids": [-1, 1], "mask_token_id": 2, **entries}  # fmt: skip
    else:
        entries = {"draft_vocab_size": known, "sample_from_anchor": True, **entries}
        config = _dflash_config(layer, form, "dspark", "DSparkSpeculator", entries, {})
    return _write(folder, config, _random(shapes, seed) | _token_maps(known, vocabulary, seed))


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class OracleHead(Head):
    """Knows the sequences: its first choice is right, its others are wrong. Past them it says nothing in particular.

    It checks that the states that it gets are those of the sequence, in order.
    """

    layers = (1,)

    def __init__(self, sequences: Sequence[Sequence[int]], target: PreTrainedModel) -> None:
        self._sequences = [np.array(sequence) for sequence in sequences]
        self._vocabulary = int(target.get_input_embeddings().weight.shape[0])
        with torch.inference_mode():
            ids = [torch.tensor([list(sequence)]) for sequence in sequences]
            self._states = [target(row, output_hidden_states=True).hidden_states[1][0] for row in ids]
        self._seen: dict[HeadSequence, list[int]] = {}
        self._paths: dict[Growth, list[list[int]]] = {}

    def open(self, cache: Cache) -> HeadSequence:
        sequence = HeadSequence(1, cache)
        self._seen[sequence] = []
        return sequence

    def needs(self, tokens: int) -> int:
        return 0

    def record(self, sequence: HeadSequence, tokens: IntArray, start: int, states: torch.Tensor) -> None:
        if sequence.next != start:
            sequence.first = start
        if tokens.tolist() != list(range(len(tokens))):  # those are the tokens with which a head is measured
            known = next(i for i, own in enumerate(self._sequences) if own[: len(tokens)].tolist() == tokens.tolist())
            exact = self._states[known][start : start + len(states)].double()
            assert float((states.double() - exact).norm() / exact.norm()) < 0.05
        end = min(start + len(states), len(tokens) - 1)
        self._seen[sequence] = tokens[:end].tolist()
        sequence.next, sequence.pending = end, [(states[:0], tokens[end : end + 1].copy())]

    def read(self, sequences: Sequence[HeadSequence]) -> None:
        pass

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        growths = [Growth(sequence, torch.zeros(1, 1)) for sequence in sequences]
        for growth, sequence in zip(growths, sequences, strict=True):
            self._paths[growth] = [[*self._seen[sequence], int(sequence.pending[0][1][0])]]
        return growths, torch.stack([self._logits(self._paths[growth][0]) for growth in growths])

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        logits = []
        for growth, above, new in zip(growths, parents, tokens, strict=True):
            paths = [[*self._paths[growth][parent], token] for parent, token in zip(above, new, strict=True)]
            self._paths[growth] += paths
            growth.add(above)
            logits += [self._logits(path) for path in paths]
        return torch.stack(logits)

    def _logits(self, path: list[int]) -> torch.Tensor:
        logits = torch.zeros(self._vocabulary)
        for sequence in self._sequences:
            if sequence[: len(path)].tolist() == path and len(path) < len(sequence):
                logits[sequence[len(path)]] = 30.0
        return logits


def one_by_one(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with each expert's matrices apart, as files of DeepSeek and Qwen3-Next have them."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        owner, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        if not parts or not owner.endswith("experts"):
            found[name] = weight
            continue
        for part, rows in zip(parts, weight.chunk(len(parts), 1), strict=True):
            found |= {f"{owner}.{e}.{part}.weight": each.clone() for e, each in enumerate(rows)}
    return found


def mtp_target(
    folder: Path, count: int, dtype: torch.dtype = torch.float64, kind: str = "deepseek_v3"
) -> PreTrainedModel:
    """A random target whose checkpoint has ``count`` heads for further tokens, as its files have them."""
    class_name, extra = FAMILIES[kind]
    whole = build(class_name, {**extra, "num_mtp_layers": count}, seed=4)
    whole.save_pretrained(folder)
    torch.manual_seed(count)
    heads, first = MtpModel(whole, count), int(whole.config.num_hidden_layers)
    for weight in heads.layers.parameters():
        weight.data = torch.randn(weight.shape) * 0.3 + (1.0 if weight.dim() == 1 else 0.0)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in heads.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors |= one_by_one({f"model.layers.{first + int(number)}.{rest}": weight.double()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with quiet():
        model = type(whole).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    model._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.[{first}-9].*"}  # real ones name their own numbers
    return model
