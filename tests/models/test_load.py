"""Models are loaded whole, safely and quietly, or not at all."""

import shutil
from pathlib import Path

import pytest
import torch
from support.saved_models import change, save_model, small_tokenizer
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from forerun import Engine
from forerun.models.loading.load import find, load, load_draft


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_model_is_loaded_in_evaluation_mode_with_its_tokenizer_and_nothing_is_printed(saved, capfd):
    model, tokenizer = load(str(saved))
    assert not model.training
    assert tokenizer.decode(tokenizer("again and")["input_ids"]) == "again and"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32", "float64"])
def test_weights_have_the_dtype_that_was_asked_for_and_those_of_a_small_model_the_targets(saved, dtype):
    target, tokenizer = load(str(saved), dtype, device="cpu")
    assert load_draft(str(saved), target, tokenizer).dtype == target.dtype
    assert target.dtype == (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))


def test_the_bundled_model_is_loaded_in_float32():
    assert load("bundled", device="cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(("settings", "message"), [
    ({"dtype": "int8"}, r"dtype is 'int8'; allowed are auto, float32"), ({"device": "gpu"}, "device is 'gpu'"),
])  # fmt: skip
def test_wrong_settings_are_named(saved, settings, message):
    with pytest.raises(ValueError, match=message):
        load(str(saved), **settings)


def test_a_missing_folder_and_one_without_a_model_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere' is neither a folder nor in the Hugging Face cache"):
        find("of/nowhere")
    for folder in (str(tmp_path / "nowhere"), "./nowhere", "~/nowhere"):
        with pytest.raises(ValueError, match=f"^there is no folder {folder}$"):
            find(folder)
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize(("kind", "size", "message"), [
    ("bert", {"num_hidden_layers": 1}, "not a decoder: model type 'bert'"),
    ("t5", {"num_layers": 1}, r"encoder-decoder \(t5\)"), ("vit", {}, "'vit' does not generate text"),
])  # fmt: skip
def test_encoders_and_encoder_decoders_are_refused(kind, size, message, tmp_path):
    AutoConfig.for_model(kind, **size).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))


def test_missing_and_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load(str(copy))
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights only"):
        load(str(copy))


def test_weights_that_would_be_random_or_are_damaged_are_refused(copy, tmp_path):
    headless = AutoModel.from_pretrained(copy)
    headless.save_pretrained(tmp_path / "headless")
    (tmp_path / "headless" / "tokenizer.json").write_bytes((copy / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"incomplete and would be random: lm_head\.weight"):
        load(str(tmp_path / "headless"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(str(copy))


def test_a_token_that_was_added_beyond_the_models_is_no_obstacle(copy):
    """As Gemma 3's for pictures, in its text models."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    tokenizer.save_pretrained(copy)
    model, tokenizer = load(str(copy), "float32")
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0] + 1
    engine = Engine(model, "trie", tokenizer=tokenizer)
    free = engine.generate("again and", max_new_tokens=8)
    bound = engine.generate("again and", max_new_tokens=8, response_format={"type": "regex", "regex": "[ab]{20}"})
    plain = Engine(model, "none").generate(tokenizer("again and")["input_ids"], max_new_tokens=8)
    assert free.generated == plain.generated
    assert set(tokenizer.decode(bound.generated[0])) <= {"a", "b"}
    with pytest.raises(ValueError, match=r"token id \d+ is out of range"):
        engine.generate("again <picture>", max_new_tokens=8)


def test_a_missing_or_foreign_tokenizer_is_refused(copy):
    words = {str(i): i for i in range(5000)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words))).save_pretrained(copy)
    with pytest.raises(ValueError, match=r"has \d+ tokens and the model \d+: not a pair"):
        load(str(copy))
    for file in copy.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        load(str(copy))


def test_code_that_comes_with_a_model_is_not_run(copy):
    change(copy, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (copy / "mine.py").write_text(f"open({str(copy / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(str(copy))
    assert not (copy / "ran").exists()
