"""One model as GGUF files of many formats, which llama.cpp writes: a folder's model, or a random one of a known shape.

Files are made once. A random model's speed is that of a trained one of its shape; its output is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.peers import weights
from benchmarks.peers.llamacpp_python import MIXED, PURE
from benchmarks.peers.process import Peer
from forerun.models.loading.load import BUNDLED, load

UNQUANTISED = "bfloat16"
FORMATS = (UNQUANTISED, *PURE, *MIXED)
POSITIONS = 32_768
"""Of random models."""
SHAPES = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, 151_936),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151_936),
}
"""Layers, hidden size, intermediate size, heads, KV heads, head size, vocabulary; without biases and norms of heads.
Rows of the first are no multiple of 256, so that llama.cpp replaces K-quants by other formats, as in that model's
files."""


class ModelFiles:
    """The GGUF files of a model.

    Args:
        model: a name of ``SHAPES``, a folder, a GGUF file, or a name that ``load`` knows.
        folder: of all models' files.
        python: the interpreter of the environment with llama-cpp-python.
        say: is told what will be written.
    """

    def __init__(self, model: str, folder: Path, python: str, say: Callable[[str], None] = lambda text: None) -> None:
        self._model, self._python, self._say = model, python, say
        self.folder = folder / Path(model).name

    def find(self, kind: str) -> Path:
        """Return the file in a format of ``FORMATS``; make it if there is none.

        Raises:
            ValueError: if the model cannot be written as a GGUF file.
            PeerError: if llama.cpp cannot write the format.
        """
        file = self.folder / f"{self.folder.name}-{kind}.gguf"
        if file.exists():
            return file
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        source = None if kind == UNQUANTISED else self.find(UNQUANTISED)
        self._say(f"writing {file}")
        if source is None:
            model, tokenizer = self._made()
            weights.check(model, tokenizer, None)
            weights.write(model, tokenizer, unfinished, dtype=torch.bfloat16)
        else:
            with Peer(QUANTISER, {"threads": torch.get_num_threads()}, self._python) as peer:
                peer.call("quantise", source=str(source), target=str(unfinished), kind=kind)
        return unfinished.replace(file)

    def _made(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._model not in SHAPES:
            return load(self._model, "bfloat16", device="cpu")
        return random_model(self._model), load(BUNDLED)[1]


QUANTISER = "benchmarks.peers.llamacpp_python"


def random_model(shape: str) -> PreTrainedModel:
    """Make a model of a shape in ``SHAPES``, in bfloat16, with seeded weights."""
    layers, hidden, intermediate, heads, kv_heads, head, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, vocab_size=vocabulary, max_position_embeddings=POSITIONS,
        tie_word_embeddings=True, dtype=torch.bfloat16,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
