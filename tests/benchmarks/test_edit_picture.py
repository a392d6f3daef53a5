"""An edit's speeds over its answer: windows, medians, and the command; no time is asserted."""

import json

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.studies.edit_picture import WINDOW, Answer, over_the_answer, per_step, speed


def answer(steps: list[int], step_seconds: float) -> Answer:
    return Answer(range(len(steps)), [step * step_seconds for step in steps], steps, None)


def test_a_window_s_speed_and_tokens_per_step_are_medians_of_the_rounds():
    steps = [0, *(1 + token // 4 for token in range(4 * WINDOW))]
    rounds = [answer(steps, seconds) for seconds in (1.0, 2.0, 0.5)]
    found = over_the_answer("auto", rounds, per_step)
    assert len(found.xs) == len(found.ys) == 4 * WINDOW + 1 - WINDOW
    assert set(found.ys[::4]) == {4.0}
    speeds = over_the_answer("auto", rounds, speed)
    assert (speeds.ys[0], speeds.low[0], speeds.high[0]) == (4.0, 2.0, 8.0)


def test_a_window_within_one_step_begins_before_that_step():
    steps = [0, 1, *[2] * (WINDOW + 5)]
    found = over_the_answer("auto", [answer(steps, 0.5)], per_step)
    assert list(found.ys) == [WINDOW / 2, WINDOW / 1, *(WINDOW + more for more in range(1, 6))]


def test_the_command_writes_a_picture_of_two_equal_answers(tmp_path):
    code = tmp_path / "code.py"
    code.write_text("def add(a, b):\n    return a + b\n")
    done = CliRunner().invoke(
        app, ["edit", "--file", str(code), "--rounds", "1", "-n", "96", "--out", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["parts"]["edit"]
    assert [(row["drafter"], row["tokens"]) for row in rows] == [("none", 96), ("auto", 96)]
    assert rows[0]["tokens_per_step"] == 1
    assert (tmp_path / "edit-picture.png").read_bytes()[:4] == b"\x89PNG"
