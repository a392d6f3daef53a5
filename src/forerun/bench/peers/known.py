"""The engines that Forerun is measured beside, and what each of them is loaded from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.bench.contestants import end_tokens
from forerun.bench.peers import weights
from forerun.bench.peers.process import Peer, PeerError
from forerun.bench.speed import Contestant
from forerun.model.stored import is_stored

DTYPES = (torch.float32, torch.bfloat16)
"""In which peers and transformers can be given the same weights."""
SPARE = 64
"""Positions for drafts behind the longest text."""


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        source: the GGUF file that the model came from, or None.
        positions: of the longest text.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Path | None
    positions: int

    @property
    def dtype(self) -> str:
        """By its name."""
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Kind:
    """A library.

    Attributes:
        package: what pip calls it.
        needs: modules that must be importable, and the packages that bring them.
        module: holds its ``Engine``.
        prepare: writes what it reads into a folder.
        options: the engine's arguments.
        variants: further arguments, by the contestant's name.
    """

    package: str
    needs: Mapping[str, str]
    module: str
    prepare: Callable[[Subject, Path], None]
    options: Callable[[Subject], dict[str, Any]]
    variants: Mapping[str, dict[str, Any]]

    @property
    def missing(self) -> str:
        """The command that installs what is missing; empty if nothing is."""
        absent = [package for module, package in self.needs.items() if find_spec(module) is None]
        return f"pip install {' '.join(absent)}" if absent else ""


@dataclass
class Loaded:
    """Peers that wait for work.

    Attributes:
        contestants: by name.
        absent: those that are not here, and why.
        notes: what each says of itself.
    """

    contestants: dict[str, Contestant] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def write_gguf(subject: Subject, folder: Path) -> None:
    """For llama.cpp; where weights are as they are stored, the very file."""
    if is_stored(subject.model):
        (folder / "model.gguf").symlink_to(Path(subject.model.name_or_path).resolve())
        return
    weights.write(subject.model, subject.tokenizer, folder / "model.gguf", subject.source)


def write_openvino(subject: Subject, folder: Path) -> None:
    """For OpenVINO, which reads float16: the graph, and exact values to put into it.

    Raises:
        PeerError: if weights are as they are stored.
    """
    if is_stored(subject.model):
        raise PeerError("it cannot be given weights as a GGUF file stores them")
    model = subject.model
    head = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    exact = {name: tensor.detach().float().cpu().clone() for name, tensor in model.state_dict().items()}
    exact["inv_freq"] = model.model.rotary_emb.inv_freq.float().cpu().clone()
    save_file(exact, folder / "model.safetensors")
    scalars = {"epsilon": model.config.rms_norm_eps, "scale": head**-0.5}
    (folder / "scalars.json").write_text(json.dumps(scalars))
    weights.write(model, subject.tokenizer, folder / "graph.gguf", subject.source, torch.float16)


KINDS = (
    Kind(
        "openvino-genai",
        {"openvino_genai": "openvino-genai", "gguf": "gguf"},
        "forerun.bench.peers.openvino",
        write_openvino,
        lambda subject: {"dtype": subject.dtype, "ends": end_tokens(subject.model)},
        {"openvino": {}, "openvino prompt lookup": {"lookup": True}},
    ),
    Kind(
        "xllamacpp",
        {"xllamacpp": "xllamacpp", "gguf": "gguf"},
        "forerun.bench.peers.llamacpp",
        write_gguf,
        lambda subject: {"dtype": subject.dtype, "positions": subject.positions + SPARE},
        {
            "llama.cpp": {},
            "llama.cpp ngram-simple": {"speculation": "NGRAM_SIMPLE"},
            "llama.cpp ngram-mod": {"speculation": "NGRAM_MOD"},
        },
    ),
)


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | None) -> None:
    """Refuse a model that no peer can be given as it is.

    Raises:
        ValueError: saying why.
    """
    if model.dtype not in DTYPES:
        allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"--peers compares in {allowed}, and the model is in {model.dtype}; add --dtype")
    if model.device.type != "cpu":
        raise ValueError(f"--peers compares on the CPU, and the model is on {model.device}; add --device cpu")
    weights.check(model, tokenizer, source)


@contextmanager
def loaded(subject: Subject, kinds: Sequence[Kind] = KINDS) -> Iterator[Loaded]:
    """All peers that are installed, each in its process, until the end of the block."""
    found = Loaded()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="forerun-peers-")))
        for kind in kinds:
            if kind.missing:
                found.absent[kind.package] = f"not installed ({kind.missing})"
                continue
            own = folder / kind.package
            own.mkdir()
            try:
                kind.prepare(subject, own)
            except PeerError as error:
                found.absent[kind.package] = str(error)
                continue
            _load(kind, subject, own, found, stack)
        yield found


def _load(kind: Kind, subject: Subject, folder: Path, found: Loaded, stack: ExitStack) -> None:
    """Its variants; one that cannot be loaded says why."""
    said: dict[str, None] = {}
    for name, more in kind.variants.items():
        options = {"folder": str(folder), "threads": torch.get_num_threads(), **kind.options(subject), **more}
        try:
            peer = stack.enter_context(Peer(kind.module, options))
        except PeerError as error:
            found.absent[name] = f"cannot be loaded: {error}"
            continue
        found.contestants[name] = peer.contestant()
        said[peer.said] = None
    found.notes += said
