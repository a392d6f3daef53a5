"""The engines that Forerun is compared with, and how each is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
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

from benchmarks.peers import weights
from benchmarks.peers.process import Peer, PeerError
from forerun.bench.rounds import Contestant
from forerun.engine.result import ends
from forerun.models.forward.architecture import is_stored

DTYPES = (torch.float32, torch.bfloat16)  # types in which peers and transformers can have the same weights
FIND = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])"
"""A program that prints which of the modules in its arguments cannot be found."""
SPARE = 64  # positions for drafts after the longest request


@dataclass(frozen=True)
class PeerSubject:
    """The model to measure; ``source`` is the GGUF file that it came from, ``positions`` the length of the longest
    request."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Path | None
    positions: int

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PeerLibrary:
    """A library.

    Attributes:
        package: its name for pip.
        needs: modules that its environment must have, and the packages that contain them.
        module: has its ``Engine``, with the arguments ``options`` and, by contestant, ``variants``.
        prepare: writes the files that it reads into a folder.
    """

    package: str
    needs: Mapping[str, str]
    module: str
    prepare: Callable[[PeerSubject, Path], None]
    options: Callable[[PeerSubject], dict[str, Any]]
    variants: Mapping[str, dict[str, Any]]

    def missing(self, python: str = sys.executable) -> str:
        """Return the command that installs the packages that ``python`` lacks; empty if it has all."""
        told = subprocess.run([python, "-c", FIND, *self.needs], capture_output=True, text=True, check=True)
        absent = [self.needs[module] for module in told.stdout.split()]
        return f"{python} -m pip install {' '.join(absent)}" if absent else ""


@dataclass
class RunningPeers:
    """Running peers; those that could not be loaded, and why; and each one's version, precision and settings."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def write_gguf(subject: PeerSubject, folder: Path) -> None:
    """Write the model for llama.cpp; if its weights are stored, link the original file."""
    if is_stored(subject.model):
        (folder / "model.gguf").symlink_to(Path(subject.model.name_or_path).resolve())
        return
    weights.write(subject.model, subject.tokenizer, folder / "model.gguf", subject.source)


def write_openvino(subject: PeerSubject, folder: Path) -> None:
    """Write a float16 graph for OpenVINO, and the exact values to put into it; raise PeerError for stored weights."""
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


LIBRARIES = (
    PeerLibrary(
        "openvino-genai",
        {"openvino_genai": "openvino-genai", "safetensors": "safetensors"},
        "benchmarks.peers.openvino",
        write_openvino,
        lambda subject: {"dtype": subject.dtype, "ends": ends(subject.model.generation_config)},
        {"openvino": {}, "openvino prompt lookup": {"lookup": True}},
    ),
    PeerLibrary(
        "xllamacpp",
        {"xllamacpp": "xllamacpp"},
        "benchmarks.peers.llamacpp",
        write_gguf,
        lambda subject: {"dtype": subject.dtype, "positions": subject.positions + SPARE},
        {
            "llama.cpp": {},
            "llama.cpp ngram-simple": {"speculation": "NGRAM_SIMPLE"},
            "llama.cpp ngram-mod": {"speculation": "NGRAM_MOD"},
        },
    ),
    PeerLibrary(
        "llama-cpp-python",
        {"llama_cpp": "llama-cpp-python"},
        "benchmarks.peers.llamacpp_python",
        write_gguf,
        lambda subject: {
            "dtype": "float16" if is_stored(subject.model) else subject.dtype,
            "positions": subject.positions + SPARE,
            "ends": ends(subject.model.generation_config),
        },
        {"llama-cpp-python": {}, "llama-cpp-python prompt lookup": {"lookup": True}},
    ),
)


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | None) -> None:
    """Raise ValueError for a model that no peer can run unchanged."""
    if find_spec("gguf") is None:
        raise ValueError("--peers writes GGUF files; pip install gguf")
    if model.dtype not in DTYPES:
        allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"--peers compares in {allowed}, and the model is in {model.dtype}; add --dtype")
    if model.device.type != "cpu":
        raise ValueError(f"--peers compares on the CPU, and the model is on {model.device}; add --device cpu")
    weights.check(model, tokenizer, source)


@contextmanager
def running_peers(
    subject: PeerSubject, kinds: Sequence[PeerLibrary] = LIBRARIES, python: str = sys.executable
) -> Iterator[RunningPeers]:
    """Yield all peers that the environment of ``python`` has, each in a process."""
    found = RunningPeers()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="forerun-peers-")))
        for kind in kinds:
            if missing := kind.missing(python):
                found.absent[kind.package] = f"not installed ({missing})"
                continue
            own = folder / kind.package
            own.mkdir()
            try:
                kind.prepare(subject, own)
            except PeerError as error:
                found.absent[kind.package] = str(error)
                continue
            _load(kind, subject, own, found, stack, python)
        yield found


def _load(
    kind: PeerLibrary, subject: PeerSubject, folder: Path, found: RunningPeers, stack: ExitStack, python: str
) -> None:
    """Load a library's variants; note the reason for one that cannot be loaded."""
    said: dict[str, None] = {}
    for name, more in kind.variants.items():
        options = {"folder": str(folder), "threads": torch.get_num_threads(), **kind.options(subject), **more}
        try:
            peer = stack.enter_context(Peer(kind.module, options, python))
        except PeerError as error:
            found.absent[name] = f"cannot be loaded: {error}"
            continue
        found.contestants[name] = peer.contestant()
        said[peer.said] = None
    found.notes += said
