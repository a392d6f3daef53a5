"""Check GGUF files before transformers reads them, and repair the result.

The header is read first, so a file that cannot be loaded is rejected before its weights are read and dequantised. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from forerun.core.install_command import install_command
from forerun.models.loading.quantised_checkpoints import make_ordinary

ItemT = TypeVar("ItemT")
GGUF_SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
NEEDED = ("gguf", "accelerate")
"""Packages that transformers needs to read GGUF files."""
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Vocabularies that split numbers into digits before merging; transformers does not."""
TOKENS = "tokenizer.ggml.tokens"
SKIPPED_TENSORS = {"llama": r"\.bias$", "mistral": r"\.bias$", "stablelm": r"attn_[qk]_norm"}
"""Tensors that transformers ignores even if a file has them, by architecture."""
NOT_READ = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes that transformers does not read: GGUF's names and its own."""
WINDOWED = ("phi3", "starcoder2")
"""Architectures whose window transformers does not read."""
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's 27B models, which alone scale attention by width; transformers uses the others' scale."""

SHORT_ARRAY = 1024
"""Longest array of numbers that is read: one per layer, but not one per token."""

_SCALARS = dict(enumerate("BbHhIif?", 0)) | dict(enumerate("Qqd", 10))
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Tensor:
    """A tensor's header entry: ``shape`` as in GGUF, fastest dimension first; ``offset`` in the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A GGUF file without its data. For arrays of strings, and long ones of numbers, the metadata has only lengths."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    end: int
    """Bytes of the header; the data starts at the next multiple of the alignment."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture", "none"))

    @property
    def data(self) -> int:
        """Offset of the data in bytes."""
        alignment: int = self.metadata.get("general.alignment", 32)
        return -(-self.end // alignment) * alignment


def check(file: Path) -> Header:
    """Read a file's header, and reject a file that cannot be loaded, or would be loaded wrongly.

    Raises:
        ValueError: not GGUF, damaged, truncated, an unsupported quantisation, or missing packages.
        OSError: if it cannot be read.
    """
    header = read_header(file)
    _check_installed(file)
    _check_content(file, header)
    for name, tensor in header.tensors.items():
        _check_tensor(file, header, name, tensor)
    return header


def read_header(file: Path) -> Header:
    """Read a GGUF file's header; raise ValueError for another, damaged or truncated file, and OSError."""
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data, len(MAGIC)).header()
            except (struct.error, IndexError, ValueError, OverflowError, ZeroDivisionError, RecursionError) as error:
                raise ValueError(f"the header of {file} is damaged or cut off: {error}") from error


@contextmanager
def alone(file: Path) -> Iterator[Path]:
    """Yield a folder with only this file, because transformers would load a tokenizer from the file's folder."""
    with tempfile.TemporaryDirectory(prefix="forerun-gguf-") as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


Progress = Callable[[int, int], None]
"""Called with tensors done and to do."""


def counted(items: Sequence[ItemT], progress: Progress) -> Iterator[ItemT]:
    """Yield the items, calling ``progress`` before each one and at the end."""
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item
    progress(len(items), len(items))


@contextmanager
def bar_to(progress: Progress) -> Iterator[None]:
    """Call ``progress`` instead of transformers' bar of dequantised tensors, which has no switch."""
    bar = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = lambda items, **options: counted(items, progress)
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar


@contextmanager
def read_by(header: Header) -> Iterator[None]:
    """Pass metadata already read to transformers, which would read it twice: 15 seconds each for 150,000 tokens."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = lambda path: _reader_of(header)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _reader_of(header: Header) -> SimpleNamespace:
    """Imitate gguf's reader for transformers, without arrays of strings: only the number of tokens counts."""
    fields = {key: _field(key, value) for key, value in header.metadata.items()}
    return SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=name) for name in header.tensors])


def _field(key: str, value: Any) -> SimpleNamespace:
    if key == TOKENS and not isinstance(value, list):
        value = [0] * value
    if isinstance(value, list):
        types = [_ARRAY, _type_of(value[0] if value else 0)]
        return SimpleNamespace(parts=[[each] for each in value], data=range(len(value)), types=types)
    parts = [value.encode() if isinstance(value, str) else [value]]
    return SimpleNamespace(parts=parts, data=[0], types=[_type_of(value)])


def _type_of(value: Any) -> int:
    return {bool: 7, int: 5, float: 6, str: _STRING}[type(value)]


def is_mixtral(header: Header) -> bool:
    """Return whether a file of Llama's architecture has experts."""
    return header.architecture == "llama" and header.metadata.get("llama.expert_count", 0) > 0


def with_what_is_not_read(config: PreTrainedConfig, header: Header) -> PreTrainedConfig:
    """Add to the configuration what transformers does not read from GGUF files."""

    def stated(key: str) -> Any:
        return header.metadata.get(f"{header.architecture}.{key}")

    windows = {"attention.sliding_window": "sliding_window"} if header.architecture in WINDOWED else {}
    for key, own in (NOT_READ | windows).items():
        if stated(key) is not None and hasattr(config, own):
            setattr(config, own, stated(key))
    rope = getattr(config, "rope_parameters", None) or {}
    if stated("rope.freq_base") is not None and "rope_theta" in rope:
        rope["rope_theta"] = stated("rope.freq_base")
    if (predictors := stated("nextn_predict_layers")) is not None:
        config.mtp_num_hidden_layers = predictors  # MTP layers; transformers does not count them as the decoder's
    if SCALED_BY_WIDTH.get(header.architecture) == stated("block_count") is not None:
        own = config.get_text_config()
        own.query_pre_attn_scalar = own.hidden_size // own.num_attention_heads
    return config


def finish(file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, header: Header) -> None:
    """Make the loaded model an ordinary one, which can be moved, cast and saved, and name it after its file."""
    make_ordinary(model)
    model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = str(file)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        _drop_additions(tokenizer, header.metadata[TOKENS])
        if header.metadata.get("tokenizer.ggml.pre") in DIGITS_APART:
            apart, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, words])


def _drop_additions(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    """Drop tokens that the file does not have: GPT-2's tokenizer adds an end token if there is none."""
    if max(tokenizer.added_tokens_decoder, default=0) < count:
        return
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    own = [token for token in described["added_tokens"] if token["id"] < count]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described | {"added_tokens": own}))


def quantisations(header: Header) -> str:
    """List a file's quantisations, most used first, such as ``Q4_1, F32``."""
    from gguf import GGMLQuantizationType

    kinds = [tensor.kind for tensor in header.tensors.values()]
    return ", ".join(GGMLQuantizationType(kind).name for kind in sorted(set(kinds), key=kinds.count, reverse=True))


def _check_installed(file: Path) -> None:
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ValueError(
            f"{file} is a GGUF file, which needs {' and '.join(missing)}; install it by: {install_command('real')}"
        )


def _check_content(file: Path, header: Header) -> None:
    """Reject tensors that transformers would silently skip or fail on."""
    metadata = header.metadata
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{file} is one of {metadata['split.count']} parts; merge them first (llama-gguf-split --merge)"
        )
    if not metadata.get(TOKENS):
        raise ValueError(f"{file} has no tokenizer ({TOKENS})")
    if not header.tensors:
        raise ValueError(f"{file} has no weights: there is no tensor in it")
    pattern = SKIPPED_TENSORS.get(header.architecture)
    left_out = next((name for name in header.tensors if pattern is not None and re.search(pattern, name)), None)
    if left_out is not None:
        raise ValueError(
            f"{file} has {left_out}, which transformers leaves out of GGUF files of {header.architecture}: the model "
            "would be another one; give the folder of its safetensors"
        )
    if metadata.get(f"{header.architecture}.attention.causal") is False:
        raise ValueError(f"{file} is not a decoder: its attention is not causal")
    rope = f"{header.architecture}.rope"
    factor = metadata.get(f"{rope}.scaling.factor", metadata.get(f"{rope}.scale_linear"))  # in older files
    scaling = metadata.get(f"{rope}.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    factors = next((name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))), None)
    if scaling != "none" or factors is not None:
        raise ValueError(
            f"{file} scales its rotary positions ({factors or scaling}), which transformers leaves out of GGUF files: "
            "the model would be another one; give the folder of its safetensors"
        )


def _check_tensor(file: Path, header: Header, name: str, tensor: Tensor) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    known = {kind.value: kind for kind in GGMLQuantizationType}
    if tensor.kind not in known:
        raise ValueError(f"{file}: tensor {name} has quantisation number {tensor.kind}, which is not supported")
    kind = known[tensor.kind]
    block, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        raise ValueError(f"{file}: tensor {name} is quantised as {kind.name}, which cannot be dequantised") from None
    if not tensor.shape or tensor.shape[0] % block:
        raise ValueError(
            f"{file} is damaged: rows of {tensor.shape} in tensor {name} are not a multiple of {kind.name} blocks"
        )
    end, there = header.data + tensor.offset + prod(tensor.shape) // block * size, file.stat().st_size
    if end > there:
        raise ValueError(f"{file} is cut off: tensor {name} ends at byte {end:,}, and the file has {there:,}")


@dataclass
class _Reader:
    data: mmap.mmap
    at: int
    metadata: dict[str, Any] = field(default_factory=dict)

    def header(self) -> Header:
        (version,) = self.take("I")
        if version not in VERSIONS:
            raise ValueError(f"the version is {version}; readable are {VERSIONS}, little-endian")
        tensors, entries = self.take("QQ")
        for _ in range(entries):
            key = self.string()
            self.metadata[key] = self.value(*self.take("I"))
        for name in ("general.alignment", "split.count"):
            if type(number := self.metadata.get(name, 1)) is not int or (number < 1 and name == "general.alignment"):
                raise ValueError(f"{name} is {number!r}; it must be an integer")
        described = dict(self.tensor() for _ in range(tensors))
        return Header(self.metadata, described, self.at)

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def skip(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise ValueError(f"it extends to byte {self.at + count:,}, and the file has {len(self.data):,}")
        self.at += count

    def string(self) -> str:
        (length,) = self.take("Q")
        start = self.at
        self.skip(length)
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(*self.take("IQ"))
        raise ValueError(f"the metadata holds a value of type {kind}")

    def array(self, kind: int, length: int) -> int | list[Any]:
        if kind in _SCALARS and length <= SHORT_ARRAY:
            return [self.take(_SCALARS[kind])[0] for _ in range(length)]
        if kind in _SCALARS:
            self.skip(length * struct.calcsize("<" + _SCALARS[kind]))
            return length
        for _ in range(length):
            if kind == _STRING:
                self.skip(*self.take("Q"))
            else:
                self.value(kind)
        return length

    def tensor(self) -> tuple[str, Tensor]:
        name = self.string()
        (dimensions,) = self.take("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = self.take(f"{dimensions}Q")
        return name, Tensor(shape, *self.take("IQ"))
