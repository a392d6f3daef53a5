"""One model as GGUF files of many formats, which llama.cpp writes once: a folder's model, or a random one of a known
shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.peers import weights
from benchmarks.peers.llamacpp_python import MIXED, PURE
from benchmarks.peers.process import Peer
from forerun.models.loading.load import BUNDLED, load

UNQUANTISED = "bfloat16"
FORMATS = (UNQUANTISED, *PURE, *MIXED)
POSITIONS = 32_768  # of random models
QUANTISER = "benchmarks.peers.llamacpp_python"
SHAPES = {name: ModelShape.parse(name) for name in ("qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-1.5b", "llama-3-8b")}
"""Of random models. The first one's rows are no multiple of 256, so llama.cpp replaces K-quants, as in its published
files."""


class ModelFiles:
    """The GGUF files of a model: a name of ``SHAPES`` or what ``load`` accepts. ``python`` has llama-cpp-python."""

    def __init__(self, model: str, folder: Path, python: str, say: Callable[[str], None] = lambda text: None) -> None:
        self._model, self._python, self._say = model, python, say
        self.folder = folder / Path(model).name

    def find(self, kind: str) -> Path:
        """Return the file in a format of ``FORMATS``; make it if there is none. Raise ValueError if the model cannot be
        written as a GGUF file, PeerError if llama.cpp cannot write the format."""
        file = self.folder / f"{self.folder.name}-{kind}.gguf"
        if file.exists():
            return file
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        source = None if kind == UNQUANTISED else self.find(UNQUANTISED)
        self._say(f"writing {file}")
        if source is None:
            if self._model in SHAPES:
                shape, tokenizer = SHAPES[self._model], load(BUNDLED)[1]
                model = random_model(shape, torch.bfloat16, "meta", max_position_embeddings=POSITIONS)
            else:
                model, tokenizer = load(self._model, "bfloat16", device="cpu")
            weights.check(model, tokenizer, None)
            weights.write(model, tokenizer, unfinished, dtype=torch.bfloat16)
        else:
            with Peer(QUANTISER, {"threads": torch.get_num_threads()}, self._python) as peer:
                peer.call("quantise", source=str(source), target=str(unfinished), kind=kind)
        return unfinished.replace(file)
