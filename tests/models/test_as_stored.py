"""GGUF models whose weights stay as they are stored: the bits of the dequantised model in every pass, or an error.

With activations of eight bits: the same bits in every pass, near the dequantised model.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import gguf_hybrids
from support.compiled_models import SHAPE, TEXT, kept, scored
from support.gguf_blocks import blocks
from support.gguf_files import finish, in_pairs, logits, names_of, separated, write
from support.qwen_mtp import mtp_tensors
from torch import nn
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel
from typer.testing import CliRunner

from benchmarks.peers import peer_libraries
from forerun import Engine
from forerun.audit.audit import Plan, audit
from forerun.cli import app
from forerun.core.long_context import LongContextConfig
from forerun.kernels.runtime import vector_ir
from forerun.models.forward import gate
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.compiled_scorer import CompiledScorer, fastest_scorer
from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.fingerprint import fingerprint, of_results
from forerun.models.forward.gate import admit
from forerun.models.forward.scorer import Scorer
from forerun.models.loading import as_stored
from forerun.models.loading import load as loading
from forerun.models.loading.gguf import read_header
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import InputOrder, StoredEmbedding, StoredExperts, StoredLinear

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

NAMES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""Model types, and what GGUF calls them."""
MIXTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama"}
KINDS = ("Q4_0", "Q8_0", "Q4_1", "F16", "Q5_0", "F32", "Q5_1", "BF16")
UNWRITTEN = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q6_K")
"""Kinds that gguf reads and cannot write, in part of 256 columns; files have random blocks of them."""
MIXED, RANDOM = "mixed", "random"


def store(file: Path, name: str, kind: str, eight_bits: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Write a tiny model of that type; gives it read as stored, and with the numbers that gguf dequantises.

    Args:
        kind: of all matrices; ``mixed`` for another kind from tensor to tensor; ``random`` for random blocks of
            ``UNWRITTEN``.
        eight_bits: whether the first one quantises activations.
    """
    exact, known = copy.deepcopy(kept(name, torch.float32)), {**NAMES, **MIXTURES, "llama, wide": "llama"}[name]
    writer = gguf.GGUFWriter(file, known)
    if name in MIXTURES:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    name_of = names_of(known, SHAPE["num_hidden_layers"])
    heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    for i, (ours, weight) in enumerate(separated(exact.named_parameters())):
        array, theirs = weight.detach().numpy(), name_of(ours)
        if array.ndim == 1 or ".mlp.gate." in ours:
            rows = in_pairs(ours, array, *heads) if known == "llama" else array
            writer.add_tensor(theirs, rows + (name == "gemma3_text" and "norm" in ours))
        elif len(array) == 1:
            writer.add_tensor(theirs, array[0])  # the gate of shared experts
        else:
            kinds = {MIXED: KINDS, RANDOM: UNWRITTEN}.get(kind, (kind,))
            number = gguf.GGMLQuantizationType[kinds[i % len(kinds)]]
            raw = quantised(array, number, kind == RANDOM)
            weight.data.copy_(torch.from_numpy(gguf.dequantize(raw, number).astype(np.float32)))
            writer.add_tensor(theirs, in_pairs(ours, raw, *heads) if known == "llama" else raw, raw_dtype=number)
    finish(writer)
    header = read_header(file)
    as_stored.check_formats(file, header)
    config = copy.deepcopy(exact.config)
    if name == "mixtral":  # transformers reads Llama's configuration from its files
        config = LlamaConfig(**{**SHAPE, "rms_norm_eps": config.rms_norm_eps, "rope_theta": 1e6})
    return as_stored.load_as_stored(file, header, config, quantised=eight_bits).eval(), exact


def quantised(array: np.ndarray, kind: Any, at_random: bool) -> np.ndarray:
    """A matrix in blocks, or random blocks for a matrix of that shape."""
    if not at_random:
        return gguf.quants.quantize(array, kind)
    _, weights = blocks(kind.name, *array.shape)
    return blocks(kind.name, *array.shape, scale=0.05 * 0.1 / float(weights.std()))[0].numpy()


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


CUTS = ([1] * 20 + [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 24, 25, 162], [255, 1, 44])
"""Passes over a text of 300 tokens."""


EXACT = [*itertools.product((*NAMES, *MIXTURES), ("Q4_1", MIXED), (False,)), ("llama, wide", RANDOM, False)]
EIGHT_BITS = [(name, "Q4_1", True) for name in ("llama", "qwen2", "qwen3_moe")]
EIGHT_BITS += [*itertools.product((*NAMES, *MIXTURES), (MIXED,), (True,)), ("llama, wide", RANDOM, True)]
FEW = [(name, "Q4_1", False) for name in ("llama", "gemma3_text", "qwen3_moe")] + [("qwen2", "Q4_1", True)]


@pytest.mark.parametrize(("name", "kind", "eight_bits"), [
    pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in FEW))
    for cell in (*EXACT, *EIGHT_BITS)
])  # fmt: skip
def test_logits_have_the_same_bits_in_every_pass(tmp_path, name, kind, eight_bits):
    """By floats, those of the dequantised model, and the model's own forward pass is near them."""
    model, exact = store(tmp_path / "m.gguf", name, kind, eight_bits)
    scorer, right = admit(model), scored(fastest_scorer(Scorer(exact)), [300])
    assert isinstance(scorer, CompiledScorer) == (name not in MIXTURES)
    whole = scored(scorer, [300])
    for sizes in CUTS:
        assert torch.equal(scored(scorer, sizes), whole)
    assert probe(scorer) == Exactness("bitwise")
    if eight_bits:
        wild = name in MIXTURES or kind == RANDOM  # a router may choose other experts
        assert 1e-5 < distance(whole, right) < (0.3 if wild else 0.1)
        return
    assert torch.equal(whole, right)
    if name in MIXTURES:
        blocks_of = [weight for weight in model.parameters() if weight.dim() == 3]
        assert type(model) is type(exact) and len(blocks_of) == 9
        assert {weight.dtype for weight in blocks_of} == {torch.uint8}
    ids = torch.from_numpy(TEXT[None, :40])
    with torch.inference_mode():
        found, expected = model(ids).logits, exact(ids).logits
    limit = 2e-5 if name == "llama, wide" else 1e-5  # of long sums in float32; the dequantised one is off by 5e-6
    assert distance(found, expected) < limit
    if name in NAMES:
        arguments: Any = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **arguments), exact.generate(ids, **arguments))


@pytest.mark.parametrize("kind", [pytest.param(MIXED, marks=pytest.mark.matrix), "Q4_1"])
def test_without_a_program_passes_are_bitwise_exact_too(tmp_path, kind):
    model, exact = store(tmp_path / "m.gguf", "llama", kind)
    assert torch.equal(scored(Scorer(model), [1, 5, 94]), scored(Scorer(exact), [100]))
    assert probe(Scorer(model)) == Exactness("bitwise")


def add_experts(writer: Any, inner: int = 64, odd: bool = False) -> None:
    """Two layers of three experts, one for each token, in place of gated linear units."""
    rng = np.random.default_rng(4)
    writer.add_expert_count(3)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(inner)
    writer.add_key_length(8)
    kind = gguf.GGMLQuantizationType.Q4_0
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", rng.standard_normal((3, 32)).astype(np.float32))
        for part, shape in (("gate", (3, inner, 32)), ("up", (3, inner, 32)), ("down", (3, 32, inner))):
            rows = gguf.quants.quantize((rng.standard_normal(shape) * 0.2).astype(np.float32), kind)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", rows, raw_dtype=kind)
        for part in ("attn_q_norm", "attn_k_norm") if odd else ():
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(8, np.float32))


UP = "blk.0.ffn_up.weight"
DENSE = [f"blk.{layer}.ffn_{part}.weight" for layer in range(2) for part in ("gate", "up", "down")]


def test_a_file_with_experts_is_loaded_with_the_sizes_that_it_states(tmp_path):
    """Not with transformers' defaults."""
    add = functools.partial(add_experts, inner=32, odd=True)
    file = write(tmp_path / "m.gguf", "Q4_1", change=add, without=DENSE, architecture="qwen3moe")
    (model, _), (plain, _) = load(str(file), "stored", activations="float32"), load(str(file), "float32", device="cpu")
    assert model.config.model_type == "qwen3_moe" and model.config.moe_intermediate_size == 32
    assert isinstance(model.model.layers[1].mlp.experts, StoredExperts)
    assert "3, gate=Q4_0, up=Q4_0, down=Q4_0" in repr(model.model.layers[1].mlp.experts)
    assert distance(logits(model), logits(plain)) < 1e-5


def test_a_file_of_mixtral_is_loaded_as_stored_only(tmp_path):
    file = write(tmp_path / "m.gguf", "Q4_1", change=add_experts, without=DENSE)
    model, _ = load(str(file), "stored")
    assert (model.config.model_type, model.config.num_local_experts) == ("mixtral", 3)
    assert len(Engine(model, "trie").generate([[5, 6, 7, 5, 6]], max_new_tokens=9).generated[0]) <= 9
    assert "a Mixtral model" in refused(lambda: load(str(file), "float32"))


def test_nothing_is_dequantised_or_kept_twice(tmp_path):
    model, _ = store(tmp_path / "m.gguf", "qwen3", "Q4_1")
    weights = {weight.data_ptr(): weight for weight in model.parameters()}
    assert {weight.dtype for weight in weights.values() if weight.dim() == 2} == {torch.uint8}
    assert sum(weight.nbytes for weight in weights.values() if weight.dim() == 1) < 3 * 6 * 96 * 4
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ours = model.model.layers[1].self_attn.q_proj.weight.numpy()
    header = read_header(tmp_path / "m.gguf")
    begin = header.data + header.tensors["blk.1.attn_q.weight"].offset
    there = np.frombuffer((tmp_path / "m.gguf").read_bytes()[begin : begin + ours.nbytes], np.uint8)
    assert np.array_equal(ours.ravel(), there)
    base = model.model.embed_tokens.weight.data_ptr() - header.tensors["token_embd.weight"].offset
    for layer, module in enumerate(model.model.layers):  # all lie where the file was mapped
        assert module.mlp.down_proj.weight.data_ptr() == base + header.tensors[f"blk.{layer}.ffn_down.weight"].offset


def test_a_file_is_loaded_with_its_tokenizer_and_says_that_weights_stay(tmp_path):
    file = write(tmp_path / "m.gguf", "Q4_1")
    model, tokenizer = load(str(file), "stored")
    plain, _ = load(str(file), "float32", device="cpu")
    floats, _ = load(str(file), "stored", activations="float32")
    assert distance(logits(floats), logits(plain)) < 1e-5 < distance(logits(model), logits(plain)) < 0.1
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == plain.generation_config.eos_token_id
    assert dtype_name(model) == "stored" and dtype_name(plain) == "float32"
    assert dtype_name(floats) == "stored, float32 activations"
    assert len({of_results(each) for each in (model, floats, plain)}) == 3  # costs of one are not those of another
    assert len({fingerprint(Scorer(each), Exactness("bitwise")) for each in (model, floats)}) == 2
    assert not model.training and model.dtype == torch.float32 and model.device.type == "cpu"
    arguments = ["generate", "-m", str(file), "--dtype", "stored", "--raw", "-p", "again and", "-n", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == f"{file}: the weights (Q4_1, F32) stay quantised\n"


DRAFTED = [
    *itertools.product(("llama", "qwen3_moe"), ("Q4_1",), (False, True), ("lookup", "trie", "retrieval", "low-rank")),
    *itertools.product(("llama",), (MIXED,), (False,), ("lookup", "trie", "retrieval", "low-rank")),
]
"""Model, kind of its matrices, whether activations have eight bits, drafter."""
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 3], [*range(3, 40)]]
FEW_DRAFTED = (("llama", False, "retrieval"), ("qwen3_moe", True, "trie"))


@pytest.mark.parametrize(("name", "kind", "eight_bits", "drafter"), [
    pytest.param(*cell, marks=[pytest.mark.matrix] * (cell[1] == MIXED or (cell[0], *cell[2:]) not in FEW_DRAFTED))
    for cell in DRAFTED
])  # fmt: skip
def test_texts_with_drafts_equal_those_without(tmp_path, name, kind, eight_bits, drafter):
    model, exact = store(tmp_path / "m.gguf", name, kind, eight_bits)
    settings = LongContextConfig(cache_budget=16, chunk=4, gamma2=4, paced=False)
    drafting, none = Engine(model, drafter, settings=settings, prune_drafts=False), Engine(model, "none")
    assert drafting.exactness.level == "bitwise"
    for more in ({}, {"do_sample": True, "seed": 3, "temperature": 0.9}):
        how: Any = {"max_new_tokens": 24, "eos_token_id": None, **more}
        plain = none.generate(PROMPTS, **how).generated
        assert eight_bits or plain == Engine(exact, "none").generate(PROMPTS, **how).generated
        found = drafting.generate(PROMPTS, **how)
        assert found.generated == plain and sum(sum(stats.drafted) for stats in found.stats) > 0
        assert none.generate(PROMPTS[0], **how).generated[0] == plain[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("eight_bits", [True, False])
def test_keys_and_values_may_be_bfloat16_beside_stored_weights(tmp_path, eight_bits):
    model, _ = store(tmp_path / "m.gguf", "qwen3", "Q4_1", eight_bits)
    how: Any = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    plain, lookup = (Engine(model, name, prune_drafts=False, kv_dtype="bfloat16") for name in ("none", "lookup"))
    assert lookup.exactness.level == "bitwise" and isinstance(lookup.target, CompiledScorer)
    found = lookup.generate(PROMPTS, **how)
    assert found.generated == [plain.generate(each, **how).generated[0] for each in PROMPTS]
    assert sum(sum(stats.drafted) for stats in found.stats) > 0
    assert {shape.width for shape in lookup.target.kv.layers.values()} == {2}


def test_the_gate_asks_floats_where_quantised_passes_differ(tmp_path, monkeypatch):
    """Nothing is refused for rounding; what is wrong is."""
    model, _ = store(tmp_path / "m.gguf", "qwen2", "Q4_1", eight_bits=True)
    monkeypatch.setattr(gate, "QUANTISED_TOLERANCE", 1e-4)
    scorer = fastest_scorer(Scorer(model))
    found = scored(scorer, [20])
    ids = [torch.from_numpy(TEXT[None, :20])]
    near = found * (1 + 2e-4)
    assert gate._error(model, ids, [near], [found]) < 1e-3
    assert all(layer.mlp.up_proj.quantised for layer in model.model.layers)
    assert gate._error(model, ids, [found.roll(1, 0)], [found]) > 0.1


def test_an_audit_with_quantised_activations_fails_nowhere(tmp_path):
    """The model's own passes quantise other numbers, where theirs differ by rounding; that is no failure."""
    model, _ = store(tmp_path / "m.gguf", "llama", "Q4_1", eight_bits=True)
    prompts = [np.random.default_rng(i).integers(6, 75, 12).tolist() for i in range(2)]
    report = audit(model, prompts, Plan(drafters=("lookup",), max_new_tokens=24))
    assert report.dtype == "stored" and report.exactness.level == "bitwise" and not report.failures


def test_other_activations_and_what_is_no_gguf_file_are_refused(tmp_path):
    file = str(write(tmp_path / "m.gguf", "Q4_1"))
    for dtype, activations, message in (
        ("stored", "int4", "activations is 'int4'; allowed are auto, int8, float32"),
        ("bfloat16", "int8", "activations is 'int8', and dtype 'bfloat16'; with other weights than 'stored' only auto"),
    ):
        assert message in refused(lambda dtype=dtype, how=activations: load(file, dtype, activations=how))
    assert "dtype is 'stored', which is for GGUF files, and" in refused(lambda: load("bundled", "stored"))
    kept("llama", torch.float32).save_pretrained(tmp_path / "folder")
    assert f"{tmp_path / 'folder'} is not one" in refused(lambda: load(str(tmp_path / "folder"), "stored"))


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "by a hook": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2),
    "of a module": lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[1].mlp)),
    "of a norm": lambda model: model.model.norm.weight.data.mul_(2),
    "of the head": lambda model: model.set_output_embeddings(nn.Linear(96, 75, bias=False).requires_grad_(False)),
    "of the type": lambda model: model.bfloat16(),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_look(tmp_path, change):
    model, _ = store(tmp_path / "m.gguf", "llama", "Q8_0")
    scorer = fastest_scorer(Scorer(model))
    before = scored(scorer, [20])
    CHANGES[change](model)
    scorer.refresh()
    after, own = scored(scorer, [20]), scored(Scorer(model), [20])
    assert distance(after, own) < (0.05 if change == "of the type" else 1e-5)
    assert not torch.equal(after, before)


def refused(how: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        how()
    return str(error.value)


def test_cuda_is_not_chosen_and_refused_as_a_processor_without_a_kernel_is(tmp_path, monkeypatch):
    file = write(tmp_path / "m.gguf", "Q4_1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(str(file), "stored")[0].device.type == "cpu"
    message = refused(lambda: load(str(file), "stored", device="cuda"))
    assert "no kernel for it on cuda" in message and "--dtype bfloat16" in message
    monkeypatch.setattr(as_stored, "unusable", lambda: "the processor has no fused multiply-add")
    message = refused(lambda: load(str(file), "stored"))
    assert "no kernel for stored weights here: the processor has no fused multiply-add" in message


def with_up(array: np.ndarray, **kind: Any) -> dict[str, Any]:
    """A file with another tensor in this place."""
    return {"without": (UP,), "change": lambda writer: writer.add_tensor(UP, array, **kind)}


UNKEPT: list[tuple[dict[str, Any], list[str]]] = [
    (with_up(np.zeros((64, 110), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ3_S),
        ["there is no kernel for IQ3_S, the format of tensor blk.0.ffn_up.weight",
            "there are kernels for F32, F16, BF16, Q4_0, ", "MXFP4; --dtype bfloat16"]),
    (with_up(np.zeros((64, 30), np.float16)), [f"{UP} have 30 numbers, and the kernel for F16"]),
    ({"without": ("blk.1.ffn_up.weight", "output_norm.weight")},
        ["incomplete and would be random: model.layers.1.mlp.up_proj.weight, model.norm.weight"]),
]  # fmt: skip


@pytest.mark.parametrize(("how", "said"), UNKEPT)
def test_a_file_that_cannot_be_kept_as_it_is_is_refused(tmp_path, monkeypatch, how, said):
    """Another format, before its tokenizer is read."""
    file = write(tmp_path / "m.gguf", "Q4_1", **how)
    if "change" in how:
        monkeypatch.setattr(loading, "_tokenizer", lambda *_: pytest.fail("it is read"))
    message = refused(lambda: load(str(file), "stored"))
    assert all(part in message for part in said), message


def test_experts_of_other_kinds_are_refused(tmp_path):
    """Those of gpt-oss have biases, and an activation of their own."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 3, "head_dim": 8}
    config = GptOssConfig(vocab_size=80, num_attention_heads=4, num_key_value_heads=4, **shape)
    file = write(tmp_path / "m.gguf", "Q4_1", change=add_experts, without=DENSE, architecture="gpt-oss")
    message = refused(lambda: as_stored.load_as_stored(file, read_header(file), config))
    assert "ffn_gate_exps.weight belongs to experts that are not gated linear units" in message


def test_stored_weights_say_what_they_are_and_are_not_saved(tmp_path):
    model, _ = store(tmp_path / "m.gguf", "llama", "Q4_1")
    assert "keep the file" in refused(lambda: model.save_pretrained(tmp_path))
    layer, embedding = model.model.layers[0].mlp.down_proj, model.model.embed_tokens
    assert isinstance(layer, StoredLinear) and isinstance(embedding, StoredEmbedding)
    assert "in_features=96, out_features=96, bias=True, kind=" in repr(layer)
    assert repr(embedding) == "StoredEmbedding(75, 96, kind=Q4_1)"


def test_llama_cpp_is_given_the_very_file_and_openvino_nothing(tmp_path):
    file = write(tmp_path / "m.gguf", "Q4_1")
    model, tokenizer = load(str(file), "stored")
    subject = peer_libraries.PeerSubject(model, tokenizer, file, 64)
    (tmp_path / "peer").mkdir()
    peer_libraries.write_gguf(subject, tmp_path / "peer")
    assert (tmp_path / "peer" / "model.gguf").resolve() == file.resolve()
    reads_floats = peer_libraries.PeerLibrary(
        "fake", {}, "fake_peer", peer_libraries.write_openvino, lambda subject: {}, {"fake": {}}
    )
    with peer_libraries.running_peers(subject, [reads_floats]) as found:
        assert found.absent == {"fake": "it cannot be given weights as a GGUF file stores them"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", gguf_hybrids.MODELS)
def test_a_hybrid_read_as_it_is_stored_is_what_transformers_dequantises(tmp_path, architecture):
    exact = gguf_hybrids.built(architecture)
    found, _ = load(str(gguf_hybrids.write(tmp_path / "exact.gguf", architecture, "F32")), "stored")
    torch.testing.assert_close(logits(found), logits(exact), atol=1e-4, rtol=1e-4)
    file = str(gguf_hybrids.write(tmp_path / "m.gguf", architecture, "Q8_0"))
    (stored, _), (dequantised, _) = load(file, "stored", activations="float32"), load(file, "float32")
    assert not torch.allclose(logits(dequantised), logits(exact), atol=1e-3)
    torch.testing.assert_close(logits(stored), logits(dequantised), atol=5e-4, rtol=1e-4)  # 1.2e-4 on some processors
    kinds = [type(module) for module in stored.modules()]
    assert StoredLinear in kinds
    assert kinds.count(InputOrder) == (0 if architecture == "lfm2" else 3)  # columns of each recurrent layer's outputs


@pytest.mark.parametrize("architecture", ["lfm2", "qwen35"])
def test_drafts_change_nothing_of_a_hybrid(tmp_path, architecture):
    mtp = mtp_tensors(gguf_hybrids.built(architecture)) if architecture == "qwen35" else None
    model, _ = load(str(gguf_hybrids.write(tmp_path / "m.gguf", architecture, "Q4_1", mtp)), "stored")
    texts = []
    for drafter in ("none", "trie", "auto" if mtp is None else "mtp"):
        engine = Engine(model, drafter)
        assert engine.exactness.level == "bitwise", engine.exactness.reason
        assert isinstance(engine.target, CompiledScorer) == (architecture == "lfm2")
        prompts = [[3, 20, 30, 41, 7, 3, 20, 30], [9, 9, 9]]
        texts.append(engine.generate(prompts, max_new_tokens=12, eos_token_id=None).generated)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("dtype", ["stored", "float32"])
def test_a_hybrid_that_is_no_decoder_is_refused(tmp_path, dtype):
    file = gguf_hybrids.write(tmp_path / "m.gguf", "lfm2", "F32", **{"attention.causal": False})
    assert "is not a decoder: its attention is not causal" in refused(lambda: load(str(file), dtype))
