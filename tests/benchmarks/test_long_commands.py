"""``python -m benchmarks triforce`` on a model from a folder: what it reads, refuses and has written when it is cut
off."""

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.saved_models import save_model
from support.tiny import tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.papers import triforce
from benchmarks.papers.triforce import TriforceBench
from forerun.engine.engine import Engine
from forerun.kv.kv_tiers import min_device_bytes
from forerun.models.forward.gate import admit
from forerun.models.loading.load import load
from forerun.models.loading.yarn import stretch, stretch_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def books(folder: Path, words: int, count: int = 2) -> list[str]:
    """So many texts as options, the first of them long enough for anything."""
    for index in range(count):
        lines = "\n\n".join(f"{index} again and again and so on" for _ in range(words if index else 999))
        (folder / f"{index}.txt").write_text(lines)
    return [part for index in range(count) for part in ("--text", str(folder / f"{index}.txt"))]


FEW = ["--contexts", "200", "--temperatures", "0", "--drafters", "low-rank,retrieval", "--rounds", "1", "-n", "6"]
LITTLE = ["--cache-budget", "32", "--window", "16", "--gamma2", "3", "--batch-budgets", "32"]


def measured(saved: str, texts: list[str], out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["papers", "triforce", "-m", saved, *FEW, *LITTLE, *texts, "--out", str(out), *more])


def test_rows_of_a_batch_are_of_equal_context_if_asked_for(saved, tmp_path):
    texts = books(tmp_path, 400)
    more = ["--batches", "2,3", "--batch-context", "150", "--batch-temperatures", "0", "--json"]
    done = measured(saved, texts, tmp_path / "out", "--parts", "temperatures,batches", *more)
    assert done.exit_code == 0, done.output
    assert [
        f"prefilling row {row + 1} of {size}: 150 tokens" in done.stderr for row, size in ((0, 2), (1, 2), (2, 3))
    ] == ([True] * 3)
    assert "prefilling row 1 of 3" not in done.stderr  # it is in memory
    assert "longer than the specified maximum" not in done.stderr
    found = json.loads(done.stdout)["parts"]
    for row in found["batches"]:
        assert row["context"] == 150 and row["batch"] in (2, 3) and row["same_output"] == 1


def test_what_was_measured_is_written_when_a_later_prompt_or_part_fails(saved, tmp_path, monkeypatch):
    texts = books(tmp_path, 400)
    monkeypatch.setattr(TriforceBench, "_rows", Mock(side_effect=ValueError("the power failed")))
    done = measured(saved, texts, tmp_path / "out", "--parts", "temperatures,batches", "--batches", "2")
    assert done.exit_code == 2 and "the power failed" in done.stderr
    assert "## Speed-up, and acceptance in brackets, by temperature" in done.stdout
    found = json.loads((tmp_path / "out" / "triforce.json").read_text())
    assert {row["contestant"] for row in found["parts"]["temperatures"]} == {"none", "low-rank", "retrieval"}
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_model_stretched_by_yarn_reads_beyond_its_positions(saved, tmp_path):
    plain, _ = load(saved)
    model, _ = load(saved)
    stretch_model(model, 2.5)
    assert (plain.config.max_position_embeddings, model.config.max_position_embeddings) == (2048, 5120)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["original_max_position_embeddings"] == 2048
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    made = AutoModelForCausalLM.from_pretrained(saved, config=copy.deepcopy(model.config)).eval()
    ids = torch.arange(3, 90)[None]
    assert torch.equal(model(ids).logits, made(ids).logits)
    texts = [*books(tmp_path, 400), "--contexts", "2500", "--parts", "temperatures"]
    done = measured(saved, texts, tmp_path / "out")
    assert done.exit_code == 2 and "the model has 2,048; give a shorter context, or --yarn 2 " in done.stderr
    done = measured(saved, texts, tmp_path / "out", "--yarn", "2")
    assert done.exit_code == 0 and "Every output equals" in done.stdout


def test_a_model_without_plain_rotary_positions_is_not_stretched():
    for name, found in (("gpt2", "it has none"), ("llama, yarn", "it has rope_type 'yarn'")):
        with pytest.raises(ValueError, match=f"YaRN needs a model with plain rotary positions .*{found}"):
            stretch(tiny(name).config, 2)
    with pytest.raises(ValueError, match="factor is 1; it must be above 1"):
        stretch(tiny("llama").config, 1)


def test_keys_and_values_off_the_device_change_no_output(tmp_path, monkeypatch):
    engines: list[Engine] = []

    def engine(*given: Any, **options: Any) -> Engine:
        engines.append(Engine(*given, **options))
        return engines[-1]

    monkeypatch.setattr(triforce, "Engine", engine)
    texts = [*books(tmp_path, 400), "--parts", "contexts", "--json", "--needle-tokens", "6"]
    least = min_device_bytes(admit(load("bundled")[0]).kv, 200 + 6 + 3 + 128)
    few = measured("bundled", texts, tmp_path / "out", "--kv-memory", str(least - 1))
    assert few.exit_code == 2 and f"these prompts need at least {least:,}" in few.stderr
    memory = ["--kv-memory", str(least), "--simulate-bandwidth", "1GB"]
    done = measured("bundled", texts, tmp_path / "out", *memory)
    assert done.exit_code == 0, done.output
    assert {row["same_output"] for row in json.loads(done.stdout)["parts"]["contexts"]} == {1}
    assert engines[-1].tiers is not None and engines[-1].tiers.copy_engine.fetched > 0
