"""The GPU's code on a CPU: kernels in Triton's interpreter, and recorded passes by running them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from forerun.kernels import gpu
from forerun.models.forward import exactness, pass_timing


class RunAgain:
    """Stands in for ``cuda_graphs.Recorder``."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``Recorder.record``."""
        result = work()

        def replay() -> None:
            result[0].logits.copy_(work()[0].logits)

        return replay, result


@contextmanager
def gpu_code(device: torch.device) -> Iterator[None]:
    """A context in which models on this device run as on a GPU. On a GPU it changes nothing.

    In the interpreter a program of a kernel runs for milliseconds, whatever it computes. So prompts' chunks, the texts
    by which exactness is tested and the passes that are timed are a few tokens long.

    Raises:
        ValueError: on a CPU, without Triton.
    """
    if device.type == "cuda":
        yield
        return
    try:
        from forerun.kernels.gpu import attend, decoder_ops
        from forerun.models.forward import cuda_graphs, gpu_scorer
    except ImportError as error:
        raise ValueError("there is no GPU, and no Triton to interpret its kernels: pip install triton") from error
    with ExitStack() as stack:
        for module, name, value in (
            (gpu, "runs_on", lambda device: True),
            (cuda_graphs, "Recorder", RunAgain),
            (gpu_scorer, "PROMPT_CHUNK_TOKENS", 4),
            (exactness, "PROBED_PASS_TOKENS", (1, 2, 5)),
            (exactness, "FAR_PASS_TOKENS", (1, 2)),
            (exactness, "LONG_TEXT_TOKENS", 12),
            (pass_timing, "PASS_SIZES", (1, 2)),
            (pass_timing, "NEAR_TOKENS", 8),
            (pass_timing, "FAR_TOKENS", 1 << 40),
            (pass_timing, "MAX_ROUNDS", 1),
            (attend, "GPU_COMBINE_SPLITS", 1),
            (decoder_ops, "PARTS_AHEAD", 1),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
