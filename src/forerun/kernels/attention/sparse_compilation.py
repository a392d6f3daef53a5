"""Compile the kernels of sparse attention, which only long sequences need, in a separate process."""

from __future__ import annotations

from forerun.core.compile_process import start, step_back
from forerun.core.compiling import can_be_kept, is_kept
from forerun.kernels.attention.topk_attention import ATTEND_TOPK
from forerun.kernels.attention.topk_rank import PROJECT_QUERIES, RANK_CHUNKS
from forerun.kernels.runtime.addresses import address_of

OPERATIONS = (PROJECT_QUERIES, RANK_CHUNKS, ATTEND_TOPK)


def compile_sparse(wait: bool) -> None:
    """Compile, or load from the cache; unless ``wait``, in another process, for which earlier long sequences wait."""
    if wait or not can_be_kept(ATTEND_TOPK.run) or all(is_kept(operation.run) for operation in OPERATIONS):
        for operation in OPERATIONS:
            address_of(operation.run, 5)
    else:
        start(__name__)


if __name__ == "__main__":
    step_back()
    compile_sparse(wait=True)
