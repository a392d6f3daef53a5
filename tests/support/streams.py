"""CUDA's streams on a CPU, where all work is done when it is requested."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from forerun.kernels import gpu
from forerun.kv.offloaded import CopyEngine


class Stream:
    """A stream, and its own event. ``waits`` has what made the CPU wait."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waits: list[str] = []

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Stream") -> None: ...

    def record_event(self) -> "Stream":
        return self

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waits.append("synchronize")


def use_streams(monkeypatch: pytest.MonkeyPatch, engine: CopyEngine) -> Stream:
    """Let an engine on a CPU copy as on a GPU, and address the host's memory."""
    stream: Any = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda own: nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: True)
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    engine._thread, engine._stream = None, stream
    return stream
