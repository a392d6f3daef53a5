"""The GPU's code on a CPU: kernels in Triton's interpreter, and recorded passes by running them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from forerun.kernels import gpu


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

    Raises:
        ValueError: on a CPU, without Triton.
    """
    if device.type == "cuda":
        yield
        return
    try:
        from forerun.models.forward import cuda_graphs
    except ImportError as error:
        raise ValueError("there is no GPU, and no Triton to interpret its kernels: pip install triton") from error
    with mock.patch.object(gpu, "runs_on", lambda device: True), mock.patch.object(cuda_graphs, "Recorder", RunAgain):
        yield
