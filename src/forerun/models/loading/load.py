"""Load a model and its tokenizer from a folder or a GGUF file.

Only safe weight formats are read, nothing is downloaded, and code from the model's folder needs permission. Missing
weights, an encoder loaded as a decoder, and another model's tokenizer are errors; transformers accepts them.
"""

from __future__ import annotations

import logging as log
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from forerun.core.install_command import install_command
from forerun.core.long_context import QUANTISATIONS
from forerun.kernels.runtime.vector_ir import unusable
from forerun.models.forward.architecture import STORED
from forerun.models.loading import gguf
from forerun.models.loading.packed_checkpoints import PackedLayout, check_unused, type_of_scales, unpacked
from forerun.models.loading.quantised_checkpoints import make_ordinary, name_after, prepare
from forerun.reference import bundled

LOG = log.getLogger(__name__)
BUNDLED = "bundled"
BUNDLED_DRAFT = "bundled-draft"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", STORED)
ACTIVATION_TYPES = ("auto", "int8", "float32")


@dataclass(frozen=True)
class _ModelFile:
    """A model's name in messages, and where and how transformers reads it."""

    name: Path
    folder: Path
    options: dict[str, Any]


def load(
    name_or_path: str,
    dtype: str = "auto",
    *,
    device: str = "auto",
    activations: str = "auto",
    trust_remote_code: bool = False,
    ranks: int = 1,
    quantize: str | None = None,
    progress: gguf.Progress = lambda done, total: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder in evaluation mode and its tokenizer.

    Args:
        name_or_path: ``bundled``, ``bundled-draft``, a folder, a GGUF file, or a hub name in the Hugging Face cache.
        dtype: one of ``DTYPES``. ``auto``: the file's own type; float32 for the bundled models and for GGUF files,
            which are dequantised. ``stored``: a GGUF file's weights stay quantised, mapped from the file.
        device: of the weights. ``auto``: CUDA if there is one, else the CPU; always the CPU for ``stored``.
        activations: inputs of quantised layers: ``int8`` (default; per token, in blocks of 32) or ``float32``.
        ranks: processes, started by torchrun, that each load a part of every layer.
        quantize: one of ``QUANTISATIONS``, for a folder and the CPU: its matrices are quantised once and kept as a file
            in the user's cache; activations are float32.
        progress: called with tensors done and to do, for a GGUF file and for quantising.

    Raises:
        ValueError: with what is missing or does not fit.
        FileNotFoundError: if the bundled model has no weights.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    _check_activations(activations, dtype)
    if ranks > 1 and device != "auto":
        raise ValueError(
            f"device is {device!r}; in {ranks} processes each uses its own device, so only auto is allowed"
        )
    place = _device("cpu" if (dtype == STORED or quantize) and device == "auto" else device)
    source = find(name_or_path)
    if quantize is not None:
        _check_quantize(quantize, source, dtype, place, ranks)
    in_file = source.is_file()
    if ranks > 1 and in_file:
        raise ValueError(f"{source} is a GGUF file, which one process loads; in {ranks} only a folder can be shared")
    if dtype == STORED:
        _check_stored(source, place)
    if dtype == "auto" and (in_file or name_or_path in (BUNDLED, BUNDLED_DRAFT)):
        dtype = "float32"
    with quiet():
        model, tokenizer = (
            _from_file(source, dtype, progress, activations != "float32")
            if in_file
            else _from_folder(source, dtype, trust_remote_code, ranks, quantize, progress)
        )
    rows = int(model.get_input_embeddings().weight.shape[0])
    if (size := tokenizer.vocab_size) > rows:  # an added token may be beyond, as Gemma 3's for pictures in text models
        raise ValueError(f"the tokenizer in {source} has {size} tokens and the model {rows}: not a pair")
    return model.eval() if ranks > 1 else model.eval().to(place), tokenizer


def load_draft(
    name_or_path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a small model to draft for ``target``; raise ValueError as ``load``, or if the vocabularies disagree."""
    dtype = str(target.dtype).removeprefix("torch.")
    model, own = load(name_or_path, dtype, device=str(target.device), trust_remote_code=trust_remote_code)
    ours, theirs = (dict(map(reversed, t.get_vocab().items())) for t in (tokenizer, own))
    different = next((i for i in sorted(theirs) if ours.get(i) != theirs[i]), None)
    if different is not None:
        raise ValueError(
            f"{name_or_path} has a different tokenizer from the target's: id {different} is {theirs[different]!r} "
            f"there and {ours.get(different)!r} here; a draft model's vocabulary must be the target's or a prefix of it"
        )
    return model


def find(name_or_path: str) -> Path:
    """Find a model's folder or GGUF file. Raise ValueError if there is none, or it has no ``config.json`` or is not
    GGUF; FileNotFoundError if the bundled model has no weights."""
    if name_or_path in (BUNDLED, BUNDLED_DRAFT):
        return bundled("target" if name_or_path == BUNDLED else "draft")
    folder = Path(name_or_path).expanduser()
    if folder.is_file():
        gguf.read_header(folder)
        return folder
    if folder.suffix == gguf.GGUF_SUFFIX and not folder.is_dir():
        raise ValueError(f"there is no file {folder}")
    if not folder.is_dir():
        if name_or_path.startswith((".", "~")) or folder.is_absolute():  # no hub repository has such a name
            raise ValueError(f"there is no folder {name_or_path}")
        folder = _cached(name_or_path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model: it has no config.json")
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log lines, warnings and progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _cached(name: str) -> Path:
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        raise ValueError(
            f"model {name!r} is neither a folder nor in the Hugging Face cache; "
            f"give a folder, a GGUF file, 'bundled', or download it first (hf download {name})"
        ) from None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; allowed are auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, and torch finds no CUDA device here; use cpu")
    return device


def _check_activations(activations: str, dtype: str) -> None:
    if activations not in ACTIVATION_TYPES:
        raise ValueError(f"activations is {activations!r}; allowed are {', '.join(ACTIVATION_TYPES)}")
    if activations != "auto" and dtype != STORED:
        raise ValueError(
            f"activations is {activations!r}, and dtype {dtype!r}; with other weights than '{STORED}' "
            "only auto is allowed"
        )


def _check_quantize(quantize: str, source: Path, dtype: str, place: torch.device, ranks: int) -> None:
    if quantize not in QUANTISATIONS:
        more = "; a file with K-quants, made by llama.cpp's tool, can be given in the model's place"
        raise ValueError(f"quantize is {quantize!r}; allowed are {', '.join(QUANTISATIONS)}{more}")
    if source.is_file():
        raise ValueError(f"quantize is {quantize!r}, and {source} is a GGUF file already; use --dtype {STORED}")
    if dtype != "auto":
        raise ValueError(f"quantize is {quantize!r} and dtype is {dtype!r}; give only one of them")
    if place.type != "cpu" or ranks > 1:
        raise ValueError(f"quantize is {quantize!r}, which is for one process on the CPU; use --device cpu")
    if (reason := unusable()) is not None:
        raise ValueError(f"there is no kernel for quantised weights here: {reason}; use --dtype bfloat16")
    if find_spec("gguf") is None:
        raise ValueError(f"--quantize needs gguf; install it by: {install_command('real')}")


def _check_stored(source: Path, place: torch.device) -> None:
    if not source.is_file():
        raise ValueError(f"dtype is '{STORED}', which is for GGUF files, and {source} is not one; use auto or bfloat16")
    if place.type != "cpu":
        raise ValueError(
            f"dtype is '{STORED}', and there is no kernel for it on {place}; use --device cpu, or --dtype bfloat16, "
            "which dequantises"
        )


def _from_folder(
    folder: Path, dtype: str, trust_remote_code: bool, ranks: int, quantize: str | None, progress: gguf.Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = _ModelFile(folder, folder, {"local_files_only": True, "trust_remote_code": trust_remote_code})
    config = _check_config(source)
    _check_weights(folder)
    _check_tokenizer(folder)
    tokenizer = _tokenizer(source)
    more: dict[str, Any] = {} if ranks == 1 else {"distributed_config": DistributedConfig(tp_size=ranks)}
    method, packing = prepare(folder, config)
    if method is not None:
        LOG.info("%s: the weights (%s) are dequantised", folder, method)
        more["config"] = config
    if packing is not None and ranks > 1:
        raise ValueError(f"{folder} is quantised by {method}, which one process dequantises; {ranks} cannot share it")
    load_model = partial(_model, source, dtype, config.model_type, packing, use_safetensors=True, **more)
    if quantize is None:
        return load_model(), tokenizer
    from forerun.models.loading.quantised import load_quantised  # needs gguf, which may not be installed

    return load_quantised(folder, quantize, config, load_model, progress), tokenizer


def _from_file(
    file: Path, dtype: str, progress: gguf.Progress, quantised: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    header = gguf.check(file)
    from forerun.models.loading.gguf_layout import has_operations  # needs gguf, which may not be installed

    if dtype == STORED:
        from forerun.models.loading.as_stored import check_formats, load_as_stored  # need gguf

        check_formats(file, header)
    elif gguf.is_mixtral(header):
        raise ValueError(
            f"{file} is a Mixtral model, which transformers cannot read from GGUF files; use --dtype {STORED}"
        )
    done = "stay quantised" if dtype == STORED else f"are dequantised to {dtype}"
    LOG.info("%s: the weights (%s) %s", file, gguf.quantisations(header), done)
    with gguf.alone(file) as folder, gguf.bar_to(progress):
        source = _ModelFile(file, folder, {"local_files_only": True, "gguf_file": file.name})
        with gguf.read_by(header):
            config = gguf.with_what_is_not_read(_check_config(source), header)
            tokenizer = _tokenizer(source)
        if dtype == STORED:
            model = load_as_stored(file, header, config, progress, quantised=quantised)
        else:
            more = {"quantization_config": GgufConfig(dequantize=True)} if has_operations(header.architecture) else {}
            # transformers takes seconds to read the configuration again
            model = _model(source, dtype, config.model_type, config=config, **more)
    gguf.finish(file, model, tokenizer, header)
    return model, tokenizer


def _check_config(source: _ModelFile) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source.folder, **source.options)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"the configuration in {source.name} cannot be read: {error}") from error
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{source.name} is an encoder-decoder ({kind}); only decoders are supported")
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if encoder or not (known or own_code):
        raise ValueError(f"{source.name} is not a decoder: model type {kind!r} does not generate text")
    return config


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} has pickled weights only, which can run code when they are loaded; "
            "convert them to safetensors (model.save_pretrained writes it)"
        )
    raise ValueError(f"{folder} has no weights: there is no .safetensors file in it")


def _check_tokenizer(folder: Path) -> None:
    if not any(any(folder.glob(pattern)) for pattern in ("*token*.json", "*.model", "vocab.*", "*.tiktoken")):
        raise ValueError(f"{folder} has no tokenizer (tokenizer.json or the like)")


def _tokenizer(source: _ModelFile) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.options)
    except Exception as error:
        raise ValueError(f"the tokenizer in {source.name} cannot be read: {error}") from error
    if len(tokenizer) == 0:
        raise ValueError(f"the tokenizer in {source.name} is empty; tokenizer.json or the like is missing")
    return tokenizer


def _model(
    source: _ModelFile, dtype: str, kind: str, packing: PackedLayout | None = None, **more: Any
) -> PreTrainedModel:
    wrapper = kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM  # given text only
    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    tensors = {} if packing is None else unpacked(packing)
    try:
        if packing is None:
            model, info = auto.from_pretrained(
                source.folder, dtype=chosen, output_loading_info=True, **source.options, **more
            )
        else:
            if dtype == "auto":
                chosen = more["config"].dtype or type_of_scales(tensors)
            with torch.device("meta"):
                shell = auto.from_config(more["config"], trust_remote_code=source.options["trust_remote_code"])
            model, info = type(shell).from_pretrained(
                None, config=shell.config, dtype=chosen, state_dict=tensors, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"the weights in {source.name} cannot be loaded: {error}") from error
    check_complete(source.name, sorted(info["missing_keys"]))
    if source.folder == source.name:  # a GGUF file is finished by ``gguf.finish``
        make_ordinary(model)
    if packing is not None:
        check_unused(packing, tensors, info["unexpected_keys"])
        name_after(model, source.folder)
    return model


def check_complete(source: Path, missing: Sequence[str]) -> None:
    """Raise ``ValueError`` with the first names of missing weights, if any."""
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"the weights in {source} are incomplete and would be random: {listed}")
