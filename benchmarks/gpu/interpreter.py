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
    """Stands in for ``cuda_graphs.Recorder``: a replay overwrites the recording's result with that of another run."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = work()
        return lambda: _overwrite(result, work()), result


class Idle:
    """Stands in for ``cuda_graphs.Recorder``: a replay does nothing, as the host's share of one."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = work()
        return lambda: None, result


@contextmanager
def host_code() -> Iterator[None]:
    """Run models on a CPU as on a GPU whose kernels cost and compute nothing: only the host's part remains, and outputs
    have no meaning."""
    from forerun.kernels.gpu import attend, token_choice
    from forerun.models.forward import cuda_graphs, gate
    from forerun.models.forward.scorer import Scorer

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gpu, "runs_on", lambda device: True))
        stack.enter_context(mock.patch.object(gate, "_reason_in_numbers", lambda scorer: None))
        stack.enter_context(mock.patch.object(Scorer, "rotation", lambda scorer: None))
        stack.enter_context(mock.patch.object(cuda_graphs, "Recorder", Idle))
        stack.enter_context(mock.patch.object(type(attend._scan), "__getitem__", lambda *_: lambda *_, **__: None))
        stack.enter_context(mock.patch.object(token_choice, "choose", lambda logits, noise: logits.argmax(-1)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False))
        yield


def _overwrite(to: Any, source: Any) -> None:
    if isinstance(to, torch.Tensor):
        to.copy_(source)
    elif isinstance(to, dict):
        for key, value in to.items():
            _overwrite(value, source[key])
    elif isinstance(to, tuple):
        for value, new in zip(to, source, strict=True):
            _overwrite(value, new)


@contextmanager
def gpu_code(device: torch.device) -> Iterator[None]:
    """Run models on this device as on a GPU; raise ValueError on a CPU without Triton. On a GPU, change nothing.

    A program runs for milliseconds in the interpreter, so prompts' chunks, exactness tests and timed passes have few
    tokens.
    """
    if device.type == "cuda":
        yield
        return
    try:
        from triton import language as tl

        from forerun.kernels.gpu import attend, decoder_ops
        from forerun.models.forward import cuda_graphs, gpu_scorer
    except ImportError as error:
        raise ValueError("there is no GPU, and no Triton to interpret its kernels: pip install triton") from error
    with ExitStack() as stack:
        for module, name, value in (
            (gpu, "runs_on", lambda device: True),
            (cuda_graphs, "Recorder", RunAgain),
            (gpu_scorer, "PROMPT_CHUNK_TOKENS", 4),
            (gpu_scorer, "RECORDED_TOKENS", 1),
            (exactness, "PROBED_PASS_TOKENS", (1, 2, 5)),
            (exactness, "FAR_PASS_TOKENS", (1, 2)),
            (exactness, "LONG_TEXT_TOKENS", 12),
            (pass_timing, "PASS_SIZES", (1, 2)),
            (pass_timing, "NEAR_TOKENS", 8),
            (pass_timing, "FAR_TOKENS", 1 << 40),
            (pass_timing, "MAX_ROUNDS", 1),
            (attend, "GPU_COMBINE_SPLITS", 1),
            (decoder_ops, "PARTS_AHEAD", tl.constexpr(1)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
