"""With ``NUMBA_DISABLE_JIT`` everything runs as Python: slowly, and with the same results to rounding."""

import os
import subprocess
import sys
import warnings

import pytest
from support.tiny import PROMPTS, tiny

import forerun

TRIE = """
import warnings

warnings.simplefilter("error")
from forerun.trie.trie import Trie

trie = Trie()
trie.warm("", [[1, 2, 3, 4]])
trie.begin(0, "", [1, 2, 3, 1, 2])
trie.extend(0, [3, 1])
print([part.round(6).tolist() for part in trie.retrieve(0, 8, 4)])
trie.finish(0)
trie.withdraw("")
print(trie.tokens(""))
"""
ENGINE = """
import pytest
from support.tiny import PROMPTS, tiny
import forerun
from forerun.core.long_context import LongContextConfig

settings = LongContextConfig(paced=False, cache_budget=8, chunk=4)
for drafter in ("trie", "triforce-trie"):
    engine = forerun.Engine(tiny("llama"), drafter, settings=settings, prune_drafts=False)
    result = engine.generate(PROMPTS[1], max_new_tokens=6, do_sample=False)
    assert sum(result.stats[0].drafted)
    print(result.generated)
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_trie_drafts_the_same(capsys):
    with warnings.catch_warnings():
        exec(TRIE, {})
    compiled = capsys.readouterr().out
    assert run(TRIE, NUMBA_DISABLE_JIT="1", PYTHONPATH=os.pathsep.join(sys.path)) == compiled != ""


@pytest.mark.matrix
def test_engines_generate_the_same():
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = forerun.Engine(tiny("llama"), "none").generate(PROMPTS[1], **options).generated
    path = os.pathsep.join(sys.path)
    assert run(ENGINE, NUMBA_DISABLE_JIT="1", PYTHONPATH=path) == f"{expected}\n" * 2
