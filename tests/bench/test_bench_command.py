"""``forerun bench`` on a model from a folder: what it measures, writes, refuses and keeps when a later round fails."""

import copy
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.prompt_files import tokenizer, written
from support.tiny import tiny
from typer.testing import CliRunner, Result

from forerun.bench import never_slower as slower_bench
from forerun.bench.contestants import Bench
from forerun.bench.never_slower import TableCell, broken, summarise
from forerun.bench.rounds import Series
from forerun.cli import app
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache

pytestmark = pytest.mark.usefixtures("called_again")
SHORT = ("-d", "lookup", "--rounds", "1", "-n", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    copy.deepcopy(tiny("llama")).float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def called(arguments: Sequence[str], plot: bool = False) -> Result:
    """Unless it is to plot, without matplotlib: drawing after each round costs as much as all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        if not plot:
            patch.setattr("forerun.bench.report.find_spec", lambda name: None)
        return CliRunner().invoke(app, ["bench", *arguments])


def bench(model: str, tmp_path: Path, *more: str) -> Result:
    chat = {"task": "mine", "messages": [{"role": "user", "content": "a b a b"}]}
    file = written(tmp_path, {"task": "mine", "prompt": "c d c d"}, chat, {"task": "other", "prompt": "e"})
    few = ["--rounds", "2", "-n", "12", "--dtype", "float64", "--out", str(tmp_path / "out")]
    return called(["-m", model, "--prompts-file", str(file), *few, *more])


def test_own_prompts_are_measured_on_any_model(model, tmp_path):
    done = bench(model, tmp_path, "-d", "trie", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    contestants = ("transformers greedy", "transformers prompt lookup", "forerun none", "forerun trie")
    assert {(row["task"], row["contestant"]) for row in found["rows"]} == {*product(("mine", "other"), contestants)}
    assert {row["same_output"] for row in found["rows"]} == {1.0}
    assert found["settings"]["dtype"] == "float64" and found["settings"]["rounds"] == 2
    markdown = (tmp_path / "out" / "speed.md").read_text()
    assert "geometric mean" in markdown and "ranks may be noise" in markdown and "max new tokens 12" in markdown


def test_without_matplotlib_there_is_no_plot_and_turns_with_other_settings_are_not_gone_on_with(model, tmp_path):
    assert bench(model, tmp_path, *SHORT).exit_code == 0
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".jsonl", ".md"]
    done = bench(model, tmp_path, *SHORT, "--cache-budget", "77", "--resume")
    assert done.exit_code == 2 and "cache_budget" in done.stderr and "give another --out" in done.stderr


@pytest.mark.parametrize(("wrong", "message"), [
    (("-d", "triforce"), "drafter triforce needs a small model: --draft-model"),
    (("-d", "magic"), "drafter is 'magic'"), (("--skip", "forerun magic"), "--skip has 'forerun magic'"),
    (("--prompts-file", "nowhere.jsonl"), "--prompts-file is nowhere.jsonl; there is no such file"),
    (("-n", "9000"), "more than the model's 128 positions"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")  # fmt: skip
def test_what_is_wrong_is_named_before_any_work_and_leaves_a_journal(model, tmp_path, wrong, message):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "speed-turns.jsonl").write_text("hours of work")
    done = bench(model, tmp_path, *wrong)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
    assert (tmp_path / "out" / "speed-turns.jsonl").read_text() == "hours of work"


def test_what_was_measured_is_kept_when_a_later_round_fails(model, tmp_path, monkeypatch):
    run = Bench.run

    def fails_later(self: Bench, *arguments: Any) -> Iterator[list[Series]]:
        rounds = run(self, *arguments)
        yield next(rounds)
        raise ValueError("contestant forerun lookup: the power failed")

    monkeypatch.setattr(Bench, "run", fails_later)
    done = bench(model, tmp_path, "-d", "lookup")
    assert done.exit_code == 2 and "contestant forerun lookup: the power failed" in done.stderr
    assert "| forerun lookup |" in done.stdout
    rows = json.loads((tmp_path / "out" / "speed.json").read_text())["rows"]
    assert [row["rounds"] for row in rows] == [1, 1, 1, 1]


def full(*given: Any) -> Any:
    raise OSError("the disk is full")


@pytest.mark.parametrize(("name", "fault", "status", "said"), [
    ("write", full, 2, "the disk is full"),
    ("changed", lambda rows: ["forerun lookup"], 1,
        "forerun lookup: some texts differ from plain Forerun's, and none may"),
], ids=["report", "text"])  # fmt: skip
def test_what_is_wrong_at_the_end_is_said_in_one_line_after_the_table(
    model, tmp_path, monkeypatch, name, fault, status, said
):
    monkeypatch.setattr(f"forerun.cli.bench.{name}", fault)
    done = bench(model, tmp_path, *SHORT)
    assert done.exit_code == status and said in done.stderr and "| forerun lookup |" in done.stdout


def never_slower(model: str, tmp_path: Path, *more: str, attempts: int = 1, plot: bool = False) -> Result:
    file = written(tmp_path, {"task": "mine", "prompt": "c d c d"}, {"task": "mine", "prompt": "a b"})
    few = ["--draws", "2", "-n", "6", "--dtype", "float64", "--context", "4", "--against", "trie"]
    given = ["never-slower", "-m", model, "--out", str(tmp_path / "slow"), "--prompts-file", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.bench.never_slower.ATTEMPTS", attempts)  # runs of milliseconds are never steady
        return called([*given, *few, *more], plot)


def test_never_slower_measures_every_cell_and_goes_on_from_its_journal(model, tmp_path):
    cells = ["--batch", "2", "-t", "0.8", "-k", "random", "-k", "tasks", "--json"]
    done = never_slower(model, tmp_path, *cells, attempts=2)
    found = json.loads(done.stdout)
    places = {(row["kind"], row["batch"], row["temperature"]) for row in found["rows"]}
    assert places == {("random", 2, 0.8), ("tasks", 2, 0.8)} and not found["left_out"]
    for row in found["rows"]:
        assert row["drafter"] == "auto" and row["texts_differ"] == 0 and row["worst"] <= row["median"]
        assert set(row["medians"]) == {"auto", "trie"} and len(row["plain_against_itself"]) == 2
    assert done.exit_code == int(any(row["broken"] for row in found["rows"]))
    again = json.loads(never_slower(model, tmp_path, *cells, "--resume", plot=True).stdout)
    assert again["rows"] == found["rows"]
    assert (tmp_path / "slow" / "never-slower.png").read_bytes()[:4] == b"\x89PNG"
    assert "no median under 0.97" in (tmp_path / "slow" / "never-slower.md").read_text()


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A long text for prompts."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(random.Random(1).choices("abcdefgh", k=90)))
    return str(file)


def undecoded(engine: Engine, drafters: Iterable[str], *given: Any) -> dict[str, dict[str, Any]]:
    """A draw for tests of what is prefilled for it: nobody decodes."""
    run = {"seconds": 1.0, "steps": 1, "texts": [[1]], "plain": [1.0, 1.0], "texts_differ": 0}
    return dict.fromkeys(drafters, run)


def test_never_slower_reads_what_prompts_of_a_draw_begin_with_once(model, tmp_path, text, monkeypatch):
    read, prefill = list[int](), Engine.prefill

    def counted(engine: Engine, tokens: Sequence[int], *more: Any, cache: FullCache | None = None) -> FullCache:
        read.append(len(tokens) - 1 - (cache.length if cache else 0))
        engine.prefill_block = 8
        return prefill(engine, tokens, *more, cache=cache)

    monkeypatch.setattr(Engine, "prefill", counted)
    monkeypatch.setattr(slower_bench, "_draw", undecoded)
    monkeypatch.setattr(slower_bench, "SAMPLED_QUERIES", 2)
    cells = f"--batch 2 -t 0 -t 0.8 -k tasks -k novel --context 40 --text {text}".split()
    rows = json.loads(never_slower(model, tmp_path, *cells, "--json").stdout)["rows"]
    places = {(row["kind"], row["context"], row["temperature"]) for row in rows}
    assert places == {*product(("tasks", "novel"), (4, 40), (0, 0.8))}
    long = read[8:]  # those of 40 tokens; before them come those of 4
    for draw in (long[:4], long[4:]):
        assert min(draw[:2]) > 30  # of 39; two texts may begin alike
        assert draw[2:] == [7, 7]  # the novel goes on at the last whole chunk before tasks of 6 and 4 tokens
    read.clear()
    never_slower(model, tmp_path, *cells, "--resume", "--json")
    assert not read
    never_slower(model, tmp_path, *cells, "--texts", "1", "--json")
    assert read[6:] == [7, 7]  # the second draw's prompts are the first one's


def test_prompts_leave_the_queries_that_sparse_caches_choose_by(model, tmp_path, text, monkeypatch):
    sizes = list[set[int]]()

    def watched(engine: Engine, drafters: Any, prefilled: Sequence[Any], *more: Any) -> Any:
        caches = [each.rewind() for each in prefilled]
        sizes.extend({q.shape[2] for of in (cache.sample, cache.queries) for q in of.values()} for cache in caches)
        return undecoded(engine, drafters)

    monkeypatch.setattr(slower_bench, "_draw", watched)
    cells = f"--batch 1 -t 0 -k tasks -k novel --context 40 --against low-rank --cache-budget 8 --text {text}"
    never_slower(model, tmp_path, *cells.split(), "--json")
    assert sizes[4:] == [{39}] * 4  # those of 40 tokens, with which low-rank begins


def test_a_draw_has_distinct_prompts_and_noise_and_every_run_s_text_is_compared(model, tmp_path, text, monkeypatch):
    asked: list[tuple[list[int], int | None]] = []
    requests, run = Engine.requests, Engine.run

    def noted(engine: Engine, prompts: Any, **options: Any) -> Any:
        built = requests(engine, prompts, **options)
        asked.extend((each.prompt.tolist(), each.seed) for each in built)
        return built

    runs = 0

    def wrong_once(engine: Engine, requests: Any, **more: Any) -> Any:
        nonlocal runs
        yield from run(engine, requests, **more)
        runs += 1
        if runs == 1:  # untimed
            requests[0].generated[-1] ^= 1

    monkeypatch.setattr(Engine, "requests", noted)
    monkeypatch.setattr(Engine, "run", wrong_once)
    cells = f"--batch 5 -t 0.8 -k tasks --draws 1 --text {text} --json".split()
    found = json.loads(never_slower(model, tmp_path, *cells).stdout)
    assert found["rows"][0]["texts_differ"] == 1
    first = asked[:5]
    assert len({tuple(prompt) for prompt, _ in first}) == len({seed for _, seed in first}) == 5


def test_never_slower_says_which_cells_it_leaves_out_and_why(model, tmp_path):
    done = never_slower(model, tmp_path, "--batch", "1", "-t", "0", "--context", "100000", "-k", "random", "--json")
    (why,) = json.loads(done.stdout)["left_out"].values()
    assert "positions" in why and "--yarn" in why


@pytest.mark.parametrize(("options", "message"), [
    (["--kind", "prose"], "'prose' is not one of 'tasks', 'novel'"),
    (["--yarn", "1"], "--yarn is 1; it must be above 1"), (["--text", "none.txt"], "'none.txt' does not exist"),
    (["-d", "fast"], "drafter is 'fast'"), (["-d", "none"], "drafter is none; name another one"),
])  # fmt: skip
def test_never_slower_refuses_wrong_options(model, tmp_path, options, message):
    done = never_slower(model, tmp_path, *options)
    assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", "").split())  # typer draws a box


def test_options_before_the_name_of_a_command_below_are_refused():
    done = CliRunner().invoke(app, ["bench", "--rounds", "2", "never-slower"])
    assert done.exit_code == 2 and "give its options after its name" in done.stderr


def test_a_cell_says_what_it_breaks():
    def run(auto: float, trie: float, text: int = 1) -> dict[str, dict[str, Any]]:
        seconds, same = {"none": 1.0, "auto": auto, "trie": trie}, {"steps": 4, "texts": [[1]], "plain": [0.9, 1.1]}
        made: dict[str, dict[str, Any]] = {name: {"seconds": value, **same} for name, value in seconds.items()}
        made["auto"]["texts"], made["none"]["texts_differ"] = [[text]], int(text != 1)
        return made

    cell = TableCell(1, 100, 0.0, "tasks")
    fine = summarise(cell, ["auto", "trie"], [run(0.5, 0.51)] * 3)
    assert fine["median"] == 2 and fine["best_other"] is None and not broken(fine)
    lost = summarise(cell, ["auto", "trie"], [run(1.1, 0.5), run(1.1, 0.5), run(0.9, 0.5, 2)])
    assert [what.split()[0] for what in broken(lost)] == ["median", "worst", "0.46", "1"]
