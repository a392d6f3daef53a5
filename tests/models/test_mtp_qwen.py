"""MTP layers of Qwen's families: what they compute, beside the layer computed anew; and what their files must hold."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import saved_models
from support.gguf_hybrids import built, write
from support.head_reference import grow
from support.heads import one_by_one
from support.qwen_mtp import FAMILIES, empty_layer, mtp_tensors, qwen_target, reload
from support.saved_models import change
from transformers import PreTrainedModel

from forerun.kernels.runtime import vector_ir
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.mtp import MtpHead
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import StoredExperts, StoredLinear

TEXT = np.random.default_rng(3).integers(0, 48, 201)
BRANCHES = ([3, 4, 5, 6], [3, 4, 6], [3, 9], [11])
GGUF = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}


class Reference:
    """An MTP layer computed anew for each question: transformers' decoder layer and projections, no cache, no tree.

    Args:
        model: the target.
        tensors: of the layer, as ``mtp_tensors`` has them.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
        self.model, self.tensors, self.layer = model, tensors, empty_layer(model)
        at = "mtp.layers.0."
        self.layer.load_state_dict({name.removeprefix(at): t for name, t in tensors.items() if name.startswith(at)})

    def states(self, sequence: list[int], read: int) -> torch.Tensor:
        """What leaves the layer at each entry of a sequence, ``[len(sequence) - 1, hidden]``.

        An entry has a token and the state before it: the target's after its final norm for ``read`` tokens, then what
        left the layer itself. It has the position of the state, as in vLLM and SGLang.
        """
        decoder = self.model.get_decoder()
        hidden = decoder(torch.tensor([sequence[:read]])).last_hidden_state[0]
        embeddings = self.model.get_input_embeddings()(torch.tensor(sequence[1:]))
        while True:
            count = len(hidden)
            pair = self._norm(embeddings[:count], "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")
            x = torch.cat(pair, -1) @ self.tensors["mtp.fc.weight"].T
            angles = decoder.rotary_emb(x[None], torch.arange(count)[None])
            mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
            left = self._norm(self.layer(x[None], angles, mask)[0], "norm")
            if count == len(sequence) - 1:
                return left
            hidden = torch.cat([hidden, left[-1:]])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.tensors[f"mtp.{name}.weight"])


def states_of(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """The target's last hidden states, after its final norm."""
    return model.get_decoder()(torch.from_numpy(tokens[None])).last_hidden_state[0]


def check_close(found: torch.Tensor, exact: torch.Tensor, near: float, path: Any = ()) -> None:
    assert float((found.double() - exact.double()).norm() / exact.double().norm()) < near, path


@torch.inference_mode()
def check_sequence(model: PreTrainedModel, reference: Reference, near: float, step: int = 50) -> None:
    """Hidden states and logits at each place of a sequence that is read a few tokens at a time, then in a tree."""
    head, end = MtpHead(), len(TEXT) - 1
    head.bind(Scorer(model))
    states, left = states_of(model, TEXT[:end]), reference.states(TEXT.tolist(), end)
    expected = model.get_output_embeddings()(left)
    sequence, first = head.open(FullCache()), 0
    for last in (*range(step, end, step), end):
        head.record(sequence, TEXT[: last + 1], first, states[first:last])
        first = last
        growths, logits = head.start([sequence])
        check_close(growths[0].hidden[0], left[last - 1], near, last)
        check_close(logits[0], expected[last - 1], near, last)

    def check_node(row: int, node: int, path: tuple[int, ...], found: torch.Tensor) -> None:
        exact = reference.states([*TEXT.tolist(), *path], end)[-1]
        check_close(growths[0].hidden[node], exact, near, path)
        check_close(found, model.get_output_embeddings()(exact), near, path)

    grow(head, growths, BRANCHES, check_node, depth=4)


@pytest.mark.parametrize(("family", "step"), [
    (FAMILIES[0], 7), *(pytest.param(family, 1, marks=pytest.mark.matrix) for family in FAMILIES)
])  # fmt: skip
def test_the_layer_computes_what_its_tensors_say(family, step, tmp_path):
    model = qwen_target(tmp_path, family)
    check_sequence(model, Reference(model, mtp_tensors(model)), 1e-5, step)


def test_a_pair_of_sequences_is_read_together(tmp_path):
    """Each as if it were alone, bit for bit."""
    model = qwen_target(tmp_path, "qwen3_5_moe", torch.bfloat16)
    head = MtpHead()
    head.bind(Scorer(model))

    @torch.inference_mode()
    def read(ends: Sequence[int]) -> list[torch.Tensor]:
        sequences = [head.open(FullCache()) for _ in ends]
        for sequence, end in zip(sequences, ends, strict=True):
            head.record(sequence, TEXT[: end + 1], 0, states_of(model, TEXT[:end]))
        growths, logits = head.start(sequences)
        later = head.extend(growths, [[0, 0]] * len(ends), [[5, 9]] * len(ends))
        return [torch.cat([a[None], b]) for a, b in zip(logits, later.split(2), strict=True)]

    assert all(torch.equal(a, b) for a, b in zip(read([9, 30]), [*read([9]), *read([30])], strict=True))


def test_experts_may_lie_in_one_tensor_or_apart(tmp_path):
    """Whichever form those of the decoder have."""
    model = qwen_target(tmp_path, "qwen3_5_moe")
    save_file(one_by_one(load_file(tmp_path / "mtp.safetensors")), tmp_path / "mtp.safetensors")
    check_sequence(reload(tmp_path, type(model), torch.float64), Reference(model, mtp_tensors(model)), 1e-5)


def test_the_files_of_a_model_of_texts_and_pictures_are_read(tmp_path):
    """As Qwen3.5's are published: the decoder's tensors and configuration are inside of it, the layer's are not."""
    model = qwen_target(tmp_path, "qwen3_5")
    tensors = load_file(tmp_path / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): weight for name, weight in tensors.items()}
    save_file(inside, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    inner = model.config.to_dict() | {"mtp_num_hidden_layers": 1}
    change(tmp_path, **whole, text_config=inner)
    check_sequence(reload(tmp_path, type(model), torch.float64), Reference(model, mtp_tensors(model)), 1e-5)


@pytest.mark.one_in(3)
@pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("architecture", GGUF)
def test_a_gguf_file_holds_the_layer(architecture, beside, tmp_path):
    """As the last block, or in a file beside the model's; dequantised, or as it is stored."""
    exact, file = built(architecture), tmp_path / "model-F32.gguf"
    mtp = mtp_tensors(exact)
    write(file, architecture, "F32", None if beside else mtp)
    if beside:
        write(tmp_path / "mtp-model.gguf", architecture, "F32", mtp, decoder=False)
    for dtype in ("float32", "stored"):
        model, _ = load(str(file), dtype, activations="auto" if dtype == "float32" else "float32")
        assert len(model.get_decoder().layers) == 4
        check_sequence(model, Reference(exact, mtp), 2e-4)


@pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")
def test_a_stored_layer_is_what_is_dequantised(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "qwen35moe", "Q8_0", mtp_tensors(built("qwen35moe")))
    found = []
    for dtype in ("float32", "stored"):
        model, _ = load(str(file), dtype, activations="auto" if dtype == "float32" else "float32")
        head = MtpHead()
        head.bind(Scorer(model))
        with torch.inference_mode():
            sequence, states = head.open(FullCache()), torch.sin(torch.arange(30 * 64).view(30, 64))
            head.record(sequence, TEXT[:31], 0, states)
            found.append(head.start([sequence])[1])
    kinds = [type(module) for module in head._model.layers.modules()]
    assert (kinds.count(StoredLinear), kinds.count(StoredExperts)) == (8, 1)
    check_close(found[1], found[0], 1e-4)


weights = partial(saved_models.weights, file="mtp.safetensors")


def apart(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    save_file(one_by_one(load_file(folder / "mtp.safetensors")), folder / "mtp.safetensors")
    weights(folder, edit)


EXPERT = "mtp.layers.0.mlp.experts"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no fc": (lambda f: weights(f, lambda w: w.pop("mtp.fc.weight")), r"lacks mtp\.fc\.weight"),
    "no norm": (lambda f: weights(f, lambda w: w.pop("mtp.norm.weight")), r"lacks mtp\.norm\.weight"),
    "no matrix of the layer": (lambda f: weights(f, lambda w: w.pop("mtp.layers.0.self_attn.k_proj.weight")),
        r"lacks mtp\.layers\.0\.self_attn\.k_proj"),
    "another shape": (lambda f: weights(f, lambda w: w.update({"mtp.fc.weight": torch.zeros(32, 32)})),
        r"mtp\.fc\.weight of shape \[32, 32\]; the configuration says \[32, 64\]"),
    "another width of the layer": (
        lambda f: weights(f, lambda w: w.update({f"{EXPERT}.down_proj": torch.zeros(4, 32, 8)})),
        r"mtp\.layers\.0\.mlp\.experts\.down_proj of shape \[4, 32, 8\]; the configuration says \[4, 32, 16\]"),
    "an expert less": (lambda f: apart(f, lambda w: w.pop(f"{EXPERT}.2.down_proj.weight")),
        r"experts\.down_proj of shape \[3, 32, 16\]; the configuration says \[4, 32, 16\]"),
    "an expert without its gate": (lambda f: apart(f, lambda w: w.pop(f"{EXPERT}.2.gate_proj.weight")),
        r"experts\.gate_up_proj cannot be assembled"),
    "scales of a quantised layer": (
        lambda f: weights(f, lambda w: w.update({"mtp.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(1)})),
        r"unknown tensor, mtp\.layers\.0\.self_attn\.k_proj\.weight_scale_inv"),
    "embeddings of its own": (lambda f: weights(f, lambda w: w.update({"mtp.embed_tokens.weight": torch.ones(1)})),
        r"has an unknown tensor: mtp\.embed_tokens"),
    "a second layer": (lambda f: weights(f, lambda w: w.update({"mtp.layers.1.input_layernorm.weight": torch.ones(1)})),
        r"has an unknown tensor: mtp\.layers\.1\."),
    "no tensors": (lambda f: (f / "mtp.safetensors").unlink(), r"states an MTP layer, and .* has no tensors mtp\.\*"),
    "two layers": (lambda f: change(f, mtp_num_hidden_layers=2), "mtp_num_hidden_layers is 2"),
    "dedicated embeddings": (
        lambda f: change(f, mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings is true"),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_does_not_fit_is_refused_by_the_tensors_name(name, tmp_path):
    spoil, message = WRONG[name]
    family = qwen_target(tmp_path, "qwen3_5_moe")
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        MtpHead().bind(Scorer(reload(tmp_path, type(family), torch.float32)))


def test_qwen3_next_without_the_layer_has_none(tmp_path):
    model = qwen_target(tmp_path, "qwen3_next")
    saved_models.weights(tmp_path, lambda w: [w.pop(name) for name in [*w] if name.startswith("mtp.")])
    with pytest.raises(
        ValueError, match="no num_mtp_layers and no mtp_num_hidden_layers, and there are no tensors mtp"
    ):
        MtpHead().bind(Scorer(reload(tmp_path, type(model), torch.float32)))


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_a_gguf_layer_that_does_not_fit_is_refused(dtype, tmp_path):
    file, mtp = tmp_path / "model.gguf", mtp_tensors(built("qwen35"))

    def refused(message: str, beside: str = "qwen35", **tensors: Any) -> None:
        wrong = {name: weight for name, weight in (mtp | tensors).items() if weight is not None}
        write(tmp_path / "mtp-model.gguf", beside, "F32", wrong, decoder=False)
        with pytest.raises(ValueError, match=message):
            MtpHead().bind(Scorer(model))

    write(file, "qwen35", "F32")
    model, _ = load(str(file), dtype)
    with pytest.raises(ValueError, match="has no MTP layers"):
        MtpHead().bind(Scorer(model))
    refused("eh_proj", **{"mtp.fc.weight": None})
    refused(r"blk\.4|mlp\.up_proj", **{"mtp.layers.0.mlp.up_proj.weight": None})
    refused(r"eh_proj.*\[64, 64\].*\[64, 128\]", **{"mtp.fc.weight": torch.zeros(64, 64)})
    refused(r"embed_tokens", **{"mtp.embed_tokens.weight": torch.zeros(64, 64)})
    refused("is of qwen35moe, and the model is of qwen35", "qwen35moe")
    (tmp_path / "mtp-other.gguf").write_bytes((tmp_path / "mtp-model.gguf").read_bytes())
    (tmp_path / "mtp-model.gguf").rename(tmp_path / "mtp-third.gguf")
    with pytest.raises(ValueError, match=r"mtp-other.gguf, mtp-third.gguf; name the one of this model mtp-model.gguf"):
        MtpHead().bind(Scorer(model))
    for each in tmp_path.glob("mtp-*"):
        each.unlink()
    write(file, "qwen35", "F32", {})  # a file that states a layer and lacks it
    model, _ = load(str(file), dtype)
    with pytest.raises(ValueError, match=r"states an MTP layer, and neither .*model\.gguf nor a file mtp-\*\.gguf"):
        MtpHead().bind(Scorer(model))
