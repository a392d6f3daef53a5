"""A busy machine is noticed, and no ratio is printed of what was timed on it."""

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.bench import disturbance, report
from forerun.bench.disturbance import BUSY, LoadMeter, fastest
from forerun.bench.rounds import BASELINE, PLAIN, Run, Series


def series(contestant: str, others: float | None, task: str = "code") -> Series:
    return Series(contestant, task, [[Run([[1, 2]], 1.0, 2, cores=1.5, others=others)]])


@pytest.mark.parametrize(
    ("base", "plain", "refused"),
    [(0.0, 0.0, []), (None, None, []), (0.0, BUSY + 0.1, [PLAIN]), (BUSY + 0.1, 0.0, [BASELINE, PLAIN])],
)
def test_a_ratio_is_refused_if_either_side_was_disturbed(base, plain, refused):
    rows = report.summarise([series(BASELINE, base), series(PLAIN, plain)])
    assert [row["contestant"] for row in report.undisturbed(rows) if row["speed_up"] is None] == refused
    assert ("The machine was busy" in " ".join(report.warnings(rows))) == bool(refused)
    assert ("1.00x" in report.speed_table(rows)) == (not refused)
    assert rows[0]["cores"] == 1.5 and rows[0]["others"] == base


def test_own_work_is_not_the_others_and_a_child_s_is_own(tmp_path, monkeypatch):
    (tmp_path / "stat").write_text("cpu  100 0 0 1000 0 0 0 0 0 0\ncpu0 100 0 0 1000 0 0 0 0 0 0\n")
    monkeypatch.setattr(disturbance, "PROC", tmp_path)
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(disturbance.os, "sysconf", lambda _: 100)
    now, own = [0.0], [0.0]
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(disturbance, "_own_seconds", lambda: own[0])
    meter = LoadMeter()
    now[0], own[0] = 10.0, 12.0  # of 10 seconds on two cores, 12 were ours and 4 of another process
    (tmp_path / "stat").write_text("cpu  1500 200 0 1000 0 0 0 0 0 0\n")
    load = meter.stop()
    assert (load.own, load.others) == (1.2, pytest.approx(0.2))
    (tmp_path / "stat").unlink()
    assert LoadMeter().stop().others is None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
def test_a_child_s_work_counts_as_own():
    before = disturbance._own_seconds()
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline()
        assert disturbance._own_seconds() - before > 0.25
        child.communicate(b"\n")


def test_the_fastest_number_of_threads_is_that_of_the_best_turn():
    times = iter([3.0, 2.0, 1.0, 2.0, 9.0, 2.0])
    assert fastest([2, 1], lambda _: next(times)) == 2
