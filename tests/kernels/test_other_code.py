"""What kernels promise, in processes whose code is made for other registers or not at all."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.tiny import PROMPTS, tiny

import forerun
from forerun.kernels.runtime import vector_ir

TARGET = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx,+sse4.2"}
PROMISES = {
    "kernels/test_stored.py": (
        "test_the_bits_of_what_is_written_out", "test_rows_of_any_number_of_blocks",
        "test_gates_are_activated_and_multiplied", "test_rows_of_an_embedding_are_those_of_gguf",
        "test_scales_of_every_size_are_widened_rightly", "test_the_largest_integers_of_both_overflow_nothing",
        "test_matrices_of_several_formats_over_the_same_tokens"),
    "kernels/test_linear.py": (
        "test_near_the_sums_in_double_precision", "test_the_same_bits_for_any_number_of_tokens_at_any_place",
        "test_sums_go_from_the_bias_on_column_by_column", "test_bfloat16_sums_are_rounded_once_to_the_nearest",
        "test_gates_are_activated_and_multiplied"),
    "kernels/test_ordered_attention.py": (
        "test_near_softmax_written_out", "test_a_token_of_a_tree_has_the_bits_of_the_text",
        "test_grouped_heads_have_the_bits_of_heads_of_their_own"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("file", PROMISES)
def test_narrow_vectors_keep_the_promises_too(file):
    """No vectors wider than AVX2's."""
    if "+avx2" not in vector_ir.features():
        pytest.skip("made for AVX2")
    tests = [f"{file}::{name}" for name in PROMISES[file]]
    formats = "not test_the_bits_of_what_is_written_out or True or Q8_0 or Q4_K"
    command = [sys.executable, "-m", "pytest", "-qxk", formats, "-p", "no:cacheprovider", *tests]
    environment = os.environ | TARGET
    environment.pop("PYTEST_XDIST_WORKER", None)  # a worker compiles what all tests need, for these registers too
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


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


def run_as_python(script: str) -> str:
    """What a script prints where nothing is compiled."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_trie_drafts_the_same_without_a_compiler(capsys):
    with warnings.catch_warnings():
        exec(TRIE, {})
    compiled = capsys.readouterr().out
    assert run_as_python(TRIE) == compiled != ""


@pytest.mark.matrix
def test_engines_generate_the_same_without_a_compiler():
    expected = forerun.Engine(tiny("llama"), "none").generate(PROMPTS[1], max_new_tokens=6, do_sample=False).generated
    assert run_as_python(ENGINE) == f"{expected}\n" * 2
