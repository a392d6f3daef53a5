"""Passes are measured in turns, compared with one token and with the bandwidth; no time is asserted."""

import itertools
import json

import pytest
from support.tiny import tiny
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.studies.passes import MATMUL, MEMORY, PassSizes, Work, measure, summarise, weight_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_every_pass_is_measured_for_every_dtype(name):
    clock = itertools.count(0.5, 0.5).__next__
    rows = measure([tiny(name), tiny(name)], PassSizes([1, 2, 4], 16, [32], rounds=2, buffer=4096), clock)
    ours = [(row["kind"], row["tokens"]) for row in rows if row["who"] == "forerun"]
    assert ours == [("pass", 1), ("pass", 2), ("pass", 4), ("prompt", 32)] * 2
    theirs = [(row["kind"], row["tokens"]) for row in rows if row["who"] == "transformers"]
    assert theirs == [("pass", 1), ("pass", 8), ("prompt", 32)] * 2
    assert {row["ratio_to_one_token"] for row in rows if row["kind"] == "pass"} == {1.0}
    assert rows[0] | {"who": MEMORY, "milliseconds": 500.0, "share_of_bandwidth": 1.0} == rows[0]


def test_ratios_and_shares_are_of_medians_without_the_first_round():
    def work(who: str, kind: str, tokens: int, nbytes: int, *seconds: float) -> Work:
        return Work("float32", who, kind, tokens, nbytes, run=list, seconds=[99.0, *seconds])

    rows = summarise([
        work(MEMORY, "read", 0, 1000, 0.5, 1.0, 7.0), work("forerun", "pass", 1, 500, 1.0, 1.0, 3.0),
        work("forerun", "pass", 8, 500, 1.5, 1.5, 1.0), work("forerun", "prompt", 32, 500, 4.0, 4.0, 4.0),
    ])  # fmt: skip
    assert [row["ratio_to_one_token"] for row in rows] == [None, 1.0, 1.5, None]
    assert [row["share_of_bandwidth"] for row in rows] == [1.0, 0.5, pytest.approx(1 / 3), None]
    assert rows[3]["tokens_per_second"] == 8
    assert {row["share_of_peak"] for row in rows} == {None}
    multiply = Work("float32", MATMUL, "multiply", 0, 0, list, operations=4_000_000_000, seconds=[9.0, 2.0, 2.0])
    two = Work("float32", "forerun", "pass", 2, 500, list, operations=1_000_000_000, seconds=[9.0, 1.0, 1.0])
    found = summarise([work(MEMORY, "read", 0, 1000, 1.0), multiply, two])
    assert [row["gigaflops"] for row in found] == [None, 2.0, 1.0]
    assert (found[2]["share_of_peak"], found[1]["share_of_bandwidth"]) == (0.5, None)
    assert (rows[1]["fastest"], rows[1]["slowest"]) == (1000, 3000)


def test_weights_that_are_only_looked_up_are_not_read():
    model = tiny("llama")
    rows = model.get_input_embeddings().weight.nbytes
    assert weight_bytes(model) == sum(weight.nbytes for weight in model.parameters()) - rows
    tied = tiny("gpt2")
    assert weight_bytes(tied) == sum(weight.nbytes for weight in tied.parameters())
    mixture = tiny("mixtral")
    experts = sum(weight.nbytes for name, weight in mixture.named_parameters() if ".experts." in name)
    read = sum(weight.nbytes for weight in mixture.parameters()) - mixture.get_input_embeddings().weight.nbytes
    assert experts and weight_bytes(mixture) == read - experts // 2  # two of four are used


def test_the_command_writes_a_report(tmp_path):
    arguments = ["--context", "8", "--passes", "1,2", "--prompt-tokens", "16", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["passes", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert {"machine", "settings", "parts"} <= set(written)
    assert {"processor", "torch", "transformers", "python"} <= set(written["machine"])
    assert [row["tokens"] for row in written["parts"]["prompts"]] == [16, 16]
    assert "of the bandwidth" in (tmp_path / "passes.md").read_text()
    assert (tmp_path / "passes-times.png").read_bytes()[:4] == b"\x89PNG"
