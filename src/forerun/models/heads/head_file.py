"""A head's weights in a folder's safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


class HeadFile:
    """A head's weights by name, from a folder's safetensors files; raises ValueError if they cannot be read."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind, self._tensors = folder, kind, dict[str, torch.Tensor]()
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                        plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                        self._tensors[plain] = opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
        if not self._tensors:
            raise ValueError(f"{folder} has no weights: there is no .safetensors file in it")

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor; raise ValueError if it is missing or has another shape."""
        if name not in self._tensors:
            raise ValueError(f"the {self._kind} head in {self._folder} lacks the tensor {name}")
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ValueError(
                f"the {self._kind} head in {self._folder} has {name} of shape {list(tensor.shape)}; "
                f"its configuration says {list(shape)}"
            )
        return tensor

    def find(self, name: str, *shape: int) -> torch.Tensor | None:
        """Return a tensor, or None if it is missing."""
        return self.take(name, *shape) if name in self._tensors else None
