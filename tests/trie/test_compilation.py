"""The trie is compiled by other processes, all of it, and once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.core.compiling import COMPILES

pytestmark = [pytest.mark.matrix, pytest.mark.skipif(not COMPILES, reason="nothing is compiled")]

COMPILING = """
from forerun.trie.compilation import CALLED_FUNCTIONS, Compilation, compiled_before
assert not compiled_before()
seen = []
code = Compilation()
code.wait(lambda done, total: seen.append(done))
assert compiled_before() and not code.running and seen == sorted(seen) and seen[-1] <= len(CALLED_FUNCTIONS)
"""

AFTERWARDS = """
from forerun.trie import compilation
from forerun.trie.trie import Trie
Trie().warm_up()
compilation.recycled.best_of_rows(*compilation._rows())
each = [function for called in compilation.CALLED_FUNCTIONS for function in (called, called.inner)]
print(sum(function.stats.cache_misses.total() for function in each))
"""


def run(script: str, cache: Path) -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(forerun.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_to_compile(tmp_path):
    run(COMPILING, tmp_path)
    assert run(AFTERWARDS, tmp_path) == "0\n"
    files = [file.name.rpartition(".nbc")[0] for file in tmp_path.rglob("*.nbc")]
    assert len(files) == len(set(files)) and not list(tmp_path.rglob("*.lock"))
    versions = [name.rpartition(".")[0] for name in files]  # without the digest of the signature
    several = {name for name in versions if versions.count(name) > 1}
    assert len(several) <= 5  # of types of numbers that differ, such as unsigned ones
