"""GGUF files: loaded whole, dequantised and as ordinary models, or refused before their weights are touched."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_files import TEMPLATE, gguf, logits, model, write
from support.saved_models import save, small_tokenizer
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

import forerun.models.loading.gguf
from forerun.cli import app
from forerun.models.loading.gguf import Header, read_header, with_what_is_not_read
from forerun.models.loading.load import find, load


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "exact.gguf")


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    file = tmp_path / "damaged.gguf"
    return lambda data: (file.write_bytes(data), file)[1]


def test_a_gguf_file_holds_the_model_that_was_written_and_nothing_is_printed(exact, capfd):
    loaded, tokenizer = load(str(exact), device="cpu")
    assert torch.equal(logits(loaded), logits(model()))
    assert loaded.dtype == torch.float32 and not loaded.training
    text = "again and 12 fox  jumps<end>"
    assert tokenizer(text)["input_ids"] == small_tokenizer()(text)["input_ids"]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<end>", TEMPLATE)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_quantised_weights_are_dequantised(tmp_path, kind):
    loaded, _ = load(str(write(tmp_path / "m.gguf", kind)), device="cpu")
    weights, exact_ones = (m.model.layers[0].mlp.up_proj.weight.detach().numpy() for m in (loaded, model()))
    quantisation = gguf.GGMLQuantizationType[kind]
    assert np.array_equal(weights, gguf.dequantize(gguf.quants.quantize(exact_ones, quantisation), quantisation))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_dtype_that_was_asked_for_is_had(exact, dtype):
    loaded, _ = load(str(exact), dtype, device="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert loaded.config.dtype == getattr(torch, dtype)


def test_a_loaded_file_is_an_ordinary_model_that_can_be_saved_and_is_named_after_its_file(exact, tmp_path):
    loaded, tokenizer = load(str(exact), device="cpu")
    assert loaded.name_or_path == tokenizer.name_or_path == str(exact)
    again, same = load(str(save(loaded, tmp_path / "saved", tokenizer)), device="cpu")
    assert torch.equal(logits(again), logits(loaded))
    assert same("again and")["input_ids"] == tokenizer("again and")["input_ids"]
    assert same.chat_template == TEMPLATE


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_progress_is_told_tensor_by_tensor_and_gguf_s_slow_reader_is_not_used(tmp_path, dtype, monkeypatch):
    file, calls = write(tmp_path / "m.gguf", "Q4_1"), list[tuple[int, int]]()
    if dtype == "stored":
        monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *_: pytest.fail("it was used"))
    load(str(file), dtype, device="cpu", progress=lambda done, total: calls.append((done, total)))
    count = len(read_header(file).tensors)
    assert calls == [(done, count) for done in range(count + 1)]


def test_a_tokenizer_that_lies_beside_the_file_is_not_taken(exact, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(exact.read_bytes())
    other = small_tokenizer()
    other.add_tokens(["fox"])
    other.save_pretrained(tmp_path)
    assert load(str(file), device="cpu")[1].get_vocab() == small_tokenizer().get_vocab()


def test_the_configuration_and_the_tokenizer_are_those_that_transformers_reads(tmp_path):
    file = write(tmp_path / "m.gguf", change=lambda writer: writer.add_array("llama.numbers", [1, 2, 3]))
    header = read_header(file)
    assert header.metadata["llama.numbers"] == [1, 2, 3]

    def read() -> tuple[Any, Any]:
        config = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        return config.to_dict(), (tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map)

    with forerun.models.loading.gguf.read_by(header):
        ours = read()
    assert ours == read()


def test_digits_are_split_where_the_vocabulary_was_learned_so_and_a_scale_of_no_kind_is_none(tmp_path):
    def scale(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)

    _, tokenizer = load(str(write(tmp_path / "m.gguf", pre="smollm", change=scale)), device="cpu")
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠĠ", "1", "2"]


def test_the_command_line_says_so_in_one_line_on_stderr(exact):
    arguments = ["generate", "-m", str(exact), "--raw", "-p", "again and", "-n", "4", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    first, *others = result.stderr.splitlines()
    assert first == f"{exact}: the weights (F32) are dequantised to float32"
    assert all(line.startswith("compiling the trie, once") for line in others)


# --- refused


def refused(file: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(str(file), device="cpu")
    assert str(file) in str(error.value)
    return str(error.value)


def test_what_is_no_gguf_file_or_one_that_is_cut_off_anywhere_is_refused(tmp_path, exact, damaged):
    with pytest.raises(ValueError, match="there is no file"):
        find(str(tmp_path / "nowhere.gguf"))
    for none in (b"hello", b""):
        assert "is not a GGUF file: it does not begin with GGUF" in refused(damaged(none))
    data, header = exact.read_bytes(), read_header(exact)
    for end in (*range(4, header.end, 97), header.end - 1):
        assert "is damaged or cut off" in refused(damaged(data[:end])), end
    for end in (header.end, header.data + 10, len(data) - 64):
        assert "is cut off: tensor" in refused(damaged(data[:end])), end


def test_a_damaged_header_is_refused_or_read_but_never_ends_in_another_error(exact, damaged):
    for at in np.random.default_rng(0).integers(4, read_header(exact).end, 150):
        changed = bytearray(exact.read_bytes())
        changed[at] ^= 0xFF
        file = damaged(bytes(changed))
        try:
            forerun.models.loading.gguf.check(file)
        except ValueError as error:
            assert str(file) in str(error)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_and_byte_orders_are_refused(exact, damaged, version):
    data = exact.read_bytes()
    message = refused(damaged(data[:4] + struct.pack("<I", version) + data[8:]))
    assert f"the version is {version}; readable are (2, 3), little-endian" in message


def test_an_unknown_quantisation_is_refused(exact, damaged):
    data, name = bytearray(exact.read_bytes()), b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = struct.pack("<I", 255)
    assert "tensor token_embd.weight has quantisation number 255" in refused(damaged(bytes(data)))


def tensor(name: str, *shape: int, dtype: Any = np.float32) -> Callable[[Any], Any]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, dtype))


def alignment(value: Any) -> Callable[[Any], Any]:
    return lambda w: w.add_float32("general.alignment", value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture": ({"architecture": "magic"}, "architecture magic is not supported"),
    "a quantisation": ({"change": tensor("more", 8, dtype=np.int8)}, "tensor more is quantised as I8, which cannot be"),
    "missing weights": (
        {"without": ("blk.1.ffn_up.weight",)}, "incomplete and would be random: model.layers.1.mlp.up_proj.weight"),
    "no tokenizer": ({"tokenizer": False}, "has no tokenizer"),
    "biases": ({"change": tensor("blk.0.attn_q.bias", 32)}, "has blk.0.attn_q.bias, which transformers leaves out"),
    "norms": ({"change": tensor("blk.0.attn_q_norm.weight", 32), "architecture": "stablelm"},
              "has blk.0.attn_q_norm.weight, which transformers leaves out"),
    "scaled angles": ({"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
                      "scales its rotary positions (yarn)"),
    "an older scale": ({"change": lambda w: w.add_float32("llama.rope.scale_linear", 4.0)},
                       "scales its rotary positions (linear)"),
    "a scale alone": ({"change": lambda w: w.add_rope_scaling_factor(4.0)}, "scales its rotary positions (linear)"),
    "factors": ({"change": tensor("rope_freqs.weight", 4)}, "scales its rotary positions (rope_freqs.weight)"),
    "an alignment by name": (
        {"change": lambda w: w.add_string("general.alignment", "x")}, "general.alignment is 'x'"),
    "an infinite alignment": ({"change": alignment(float("inf"))}, "general.alignment is inf"),
    "no number": ({"change": alignment(float("nan"))}, "general.alignment is nan"),
    "parts in words": ({"change": lambda w: w.add_string("split.count", "two")}, "split.count is 'two'"),
    "a part": ({"change": lambda w: w.add_uint16("split.count", 3)}, "is one of 3 parts; merge them"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_as_the_model_that_it_is_is_refused(tmp_path, name):
    how, message = REFUSED[name]
    assert message in refused(write(tmp_path / "m.gguf", **how))


@pytest.mark.parametrize(("kind", "stated", "wanted"), [
    ("starcoder2", {"rope.freq_base": 999999.4, "attention.sliding_window": 4096}, {"sliding_window": 4096}),
    ("phi3", {"attention.sliding_window": 2047, "rope.freq_base": 10000.0}, {"sliding_window": 2047}),
    ("gemma2", {"block_count": 46}, {"query_pre_attn_scalar": 144}),
    ("gemma2", {"block_count": 42}, {"query_pre_attn_scalar": 256}),
    ("stablelm", {"rope.freq_base": 5e5}, {}),
])  # fmt: skip
def test_what_transformers_does_not_read_is_taken_from_the_header(kind, stated, wanted):
    config = AutoConfig.for_model(kind, hidden_size=4608, num_attention_heads=32)
    header = Header({f"{kind}.{key}": value for key, value in stated.items()} | {"general.architecture": kind}, {}, 0)
    config = with_what_is_not_read(config, header)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.rope_parameters["rope_theta"] == stated.get("rope.freq_base", 10000.0)


def test_arrays_in_arrays_without_end_and_packages_that_are_not_installed_are_refused(exact, damaged, monkeypatch):
    name = b"deep"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name + struct.pack("<I", 9)
    assert "is damaged or cut off" in refused(damaged(head + struct.pack("<IQ", 9, 1) * 5000))
    monkeypatch.setattr(forerun.models.loading.gguf, "find_spec", lambda package: None)
    assert "which needs gguf and accelerate; install it by: " in refused(exact)
