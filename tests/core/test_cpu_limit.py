"""How many cores a process may use, by control groups written out."""

import os
from pathlib import Path

import pytest
import torch
from support.processes import status_of_a_child

from forerun.core.cpu_limit import usable_cores
from forerun.kernels.runtime.thread_cap import cap_threads

CORES = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(CORES)), raising=False)


def cores(folder: Path, group: str, **files: str) -> int:
    """Cores of a process in a group; a file's name has ``__`` for each slash."""
    (folder / "cgroup").write_text(group)
    for name, text in files.items():
        file = folder / "mount" / name.replace("__", "/").replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return usable_cores(folder / "mount", folder / "cgroup")


NONE = "max 100000\n"


@pytest.mark.parametrize(("wanted", "group", "files"), [
    pytest.param(2, "0::/", {"cpu_max": "200000 100000\n"}, id="two cores of many"),
    pytest.param(2, "0::/", {"cpu_max": "250000 100000\n"}, id="a part of a core does not count"),
    pytest.param(1, "0::/", {"cpu_max": "50000 100000\n"}, id="one thread is left"),
    pytest.param(3, "0::/a/b", {"a__b__cpu_max": NONE, "a__cpu_max": "300000 100000\n", "cpu_max": "400000 100000\n"},
                 id="the least one of the groups above"),
    *((CORES, "0::/", {"cpu_max": text}) for text in (NONE, "", "nonsense\n", "-1 100000\n", "0 0\n")),
])  # fmt: skip
def test_whole_cores_of_the_least_quota_count_and_without_one_the_affinity(tmp_path, wanted, group, files):
    assert cores(tmp_path, f"{group}\n", **files) == wanted
    assert usable_cores(tmp_path / "none", tmp_path / "none") == CORES


def test_quotas_of_the_first_version_of_control_groups(tmp_path):
    groups = "12:memory:/m\n4:cpu,cpuacct:/docker/x\n"
    folder = tmp_path / "mount/cpu/docker/x"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path, groups) == CORES
    (folder / "cpu.cfs_quota_us").write_text("600000\n")
    assert cores(tmp_path, groups) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_torch_gets_no_more_threads_than_the_quota_and_keeps_fewer(tmp_path):
    cores(tmp_path, "0::/\n", cpu_max="200000 100000\n")

    def capped() -> bool:
        """In a process of its own, as it is a setting of the process."""
        usable_cores.__defaults__ = (tmp_path / "mount", tmp_path / "cgroup")
        left = []
        for threads in (8, 1):
            torch.set_num_threads(threads)
            cap_threads()
            left.append(torch.get_num_threads())
        return left == [2, 1]

    assert status_of_a_child(capped) == 0
