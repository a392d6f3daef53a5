"""What kernels promise, in a process with no vectors wider than AVX2's: code is made for other registers there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        "test_sums_go_from_the_bias_on_column_by_column", "test_bfloat16_is_summed_as_floats_column_by_column",
        "test_bfloat16_sums_are_rounded_once_to_the_nearest", "test_gates_are_activated_and_multiplied"),
    "kernels/test_ordered_attention.py": (
        "test_near_softmax_written_out", "test_a_token_of_a_tree_has_the_bits_of_the_text",
        "test_grouped_heads_have_the_bits_of_heads_of_their_own"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("file", PROMISES)
def test_narrow_vectors_keep_the_promises_too(file):
    if "+avx2" not in vector_ir.features():
        pytest.skip("made for AVX2")
    tests = [f"{file}::{name}" for name in PROMISES[file]]
    formats = "not test_the_bits_of_what_is_written_out or True or Q8_0 or Q4_K"
    command = [sys.executable, "-m", "pytest", "-qxk", formats, "-p", "no:cacheprovider", *tests]
    environment = os.environ | TARGET
    environment.pop("PYTEST_XDIST_WORKER", None)  # a worker compiles what all tests need, for these registers too
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
