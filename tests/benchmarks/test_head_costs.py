"""The commands that measure heads: they count what they say they count; no time is asserted."""

import json

from support.heads import eagle3

from benchmarks.capacity.shapes import ModelShape
from benchmarks.studies import head_costs
from benchmarks.studies.head_costs import HeadsOptions
from benchmarks.training import evaluate_head
from benchmarks.training.evaluate_head import EvaluateHeadOptions
from forerun.models.heads import shortlist
from forerun.models.loading.load import load


def test_what_a_head_costs_is_counted_in_plain_passes(tmp_path, monkeypatch):
    monkeypatch.setitem(head_costs.MODELS, "tiny", ModelShape(9, 64, 64, 4, 2, 16384, 16))
    head_costs.run(HeadsOptions(models="tiny", rounds=2, out=tmp_path))
    rows = json.loads((tmp_path / "heads.json").read_text())["parts"]["heads"]
    assert [(row["model"], row["matrix"]) for row in rows] == [("tiny", "all"), ("tiny", "shortlist")]
    assert all(isinstance(row[part], float) for row in rows for part in ("read", "level", "tree", "plain_ms"))
    assert "| tiny | all |" in (tmp_path / "heads.md").read_text()


def test_costs_are_scaled_to_all_layers(monkeypatch):
    """By a clock on which everything takes 1 s, a layer takes no time and a pass as long as a level."""
    monkeypatch.setitem(head_costs.MODELS, "tiny", ModelShape(9, 64, 64, 4, 2, 16384, 16))
    ticks = iter(range(10_000))
    for row in head_costs.measure("tiny", 1, lambda: float(next(ticks))):
        assert (row["plain_ms"], row["layer_ms"], row["read"], row["level"]) == (1000.0, 0.0, 1.0, 1.0)


def test_a_head_is_compared_with_the_trie(tmp_path, monkeypatch):
    """With and without shortlists, greedy and sampled; no text differs."""
    monkeypatch.setattr(shortlist, "OWN_TOKENS", 64)
    monkeypatch.setattr(evaluate_head, "load", lambda *args: load("bundled-draft", "float32"))
    monkeypatch.setattr(shortlist, "LISTED_TOKENS", 128)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": f"What is {i} and {i}? "}) for i in range(2)))
    target, _ = load("bundled-draft", "float32")
    eagle3(tmp_path / "head", target, known=4096)
    evaluate_head.run(
        EvaluateHeadOptions(
            model="bundled-draft", head=tmp_path / "head", texts=texts, tokens=12, threads=1, out=tmp_path, context=16
        )
    )
    rows = json.loads((tmp_path / "evaluate-head.json").read_text())["parts"]["heads"]
    names = ["none", "trie", "auto", "head", "head, all logits", "auto with head", "auto with head, all logits",
             *(f"{name}, all nodes" for name in ("trie", "head", "both"))]  # fmt: skip
    assert [(row["temperature"], row["drafter"]) for row in rows] == [(t, name) for t in (0.0, 0.8) for name in names]
    assert all(row["differing"] == 0 and row["tokens_per_step"] >= 1 for row in rows)
    assert [row["speed"] for row in rows if row["drafter"] == "none"] == [1.0, 1.0]
