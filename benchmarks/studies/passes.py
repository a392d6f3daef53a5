"""``python -m benchmarks passes``: passes over 1 to 64 tokens, Forerun's and the model's own.

Decoding is bound by reading the weights. A pass over several tokens that reads them once costs little more than a pass
over one; that is why drafts pay. All take turns in one process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.reporting import plots
from benchmarks.reporting.common_options import ListOptions, list_option, names_of, numbers_of
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report, listing
from benchmarks.reporting.turns import in_turns
from forerun.bench.machine import Row
from forerun.cli.options import AnyTypeModelOptions, Dtype, Out, OutputOptions, Rounds, option
from forerun.cli.terminal import progress_bar, stderr
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import STORED, dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import ACTIVATION_TYPES, load

BUFFER = 1 << 30  # bytes that are read for the bandwidth: many times a processor's caches
SIDE = 1024  # rows and columns of the multiplied matrices; larger ones are no faster
FORERUN, TRANSFORMERS, MEMORY, MATMUL = "forerun", "transformers", "memory", "torch's matmul"
PEAKS = {"float32": torch.float32, "bfloat16": torch.bfloat16, STORED: torch.int8}
"""The arithmetic that bounds a pass, by the type of the weights."""
THEIR_SIZES = (1, 8)  # tokens of the model's own passes
DTYPES = get_args(Dtype)
TIMES = {"dtype": "dtype", "who": "by", "tokens": "tokens", "milliseconds": "ms", "fastest": "fastest",
         "slowest": "slowest"}  # fmt: skip
PASSES = TIMES | {"ratio_to_one_token": "ratio to one token", "megabytes": "weights read, MB",
                  "gigabytes_per_second": "GB/s", "share": "of the bandwidth", "gigaflops": "GFLOP/s",
                   "peak": "of torch's matmul"}  # fmt: skip
PROMPTS = TIMES | {"tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class PassesOptions(ListOptions, OutputOptions, AnyTypeModelOptions):
    """Time of passes over 1 to 64 tokens, compared with the model's own call and the machine's bandwidth.

    Also measures prefill. All take turns in one process; medians count. Writes JSON, Markdown and a plot.
    """

    dtypes: Annotated[str, list_option("Model", f"Of {', '.join(DTYPES)}.")] = "auto"
    activations: Annotated[str, list_option("Model", "Of stored weights: auto, int8, float32.")] = "auto"
    passes: Annotated[str, list_option("Text", "Tokens of the passes.")] = "1,2,4,8,16,32,64"
    context: Annotated[int, option(panel="Text", help="Tokens in the cache.", min=0)] = 512
    prompt_tokens: Annotated[str, list_option("Text", "Lengths of prompts to prefill, or 0.")] = "512,2048"
    rounds: Rounds = 7
    out: Out = Path("runs/passes")

    types, activation_types = names_of("dtypes", DTYPES), names_of("activations", ACTIVATION_TYPES)
    sizes, prompts = numbers_of("passes", int, 1), numbers_of("prompt_tokens", int, 0)


def run(options: PassesOptions) -> None:
    plots.check()
    some: dict[str, Any] = {"device": options.device, "trust_remote_code": options.trust_remote_code}
    models = list[PreTrainedModel]()
    for dtype in dict.fromkeys(options.types):
        types = options.activation_types if dtype == STORED else ["auto"]
        models += [load(options.model, dtype, activations=each, **some)[0] for each in types]
    prompts = sorted(filter(None, options.prompts))
    sizes = PassSizes(sorted({1, *options.sizes}), options.context, prompts, options.rounds)
    with progress_bar(stderr(), "measuring") as progress:
        rows = measure(models, sizes, progress=progress)
    report = Report.of("What passes cost", options, "passes")
    add_passes(report, rows, options.context)
    report.end()


class BufferReader:
    """Sums 64-bit integers, which need the least arithmetic, with all of torch's threads."""

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self._buffer = torch.ones(max(1, size // 8), dtype=torch.int64, device=device)
        self.nbytes = self._buffer.nbytes

    def __call__(self) -> None:
        self._buffer.sum().item()


class Multiplier:
    """Multiplies two square matrices that fit into caches, by torch's fastest product; int8 is summed as int32."""

    operations = 2 * SIDE**3  # multiplications and additions of a call

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._matrix = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
        self._product = torch._int_mm if dtype == torch.int8 else torch.mm

    def __call__(self) -> None:
        self._product(self._matrix, self._matrix)[0, 0].item()


def weight_operations(model: PreTrainedModel) -> int:
    """Count multiplications and additions of a token in linear layers, without attention and experts."""
    sizes = ((getattr(module, "in_features", 0), getattr(module, "out_features", 0)) for module in model.modules())
    return 2 * sum(inputs * outputs for inputs, outputs in sizes)


def weight_bytes(model: PreTrainedModel) -> int:
    """Count the bytes of weights that a pass over one token reads: all, except an input embedding that is only looked
    up in, and experts that the token does not use."""
    used = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    found = {
        weight.data_ptr(): weight.nbytes * used // len(weight) if used and ".experts." in name else weight.nbytes
        for name, weight in model.named_parameters()
    }
    ends = (getattr(model, f"get_{side}_embeddings")() for side in ("input", "output"))
    inputs, outputs = (getattr(end, "weight", None) for end in ends)
    if inputs is not None and (outputs is None or outputs.data_ptr() != inputs.data_ptr()):
        found.pop(inputs.data_ptr(), None)
    return sum(found.values())


@dataclass(frozen=True)
class PassSizes:
    """Tokens of passes, of the cache before them, and of prompts; rounds, and bytes to read for the bandwidth."""

    passes: Sequence[int]
    context: int
    prompts: Sequence[int]
    rounds: int
    buffer: int = BUFFER

    @property
    def longest(self) -> int:
        return max([self.context + max([*self.passes, *THEIR_SIZES]), *self.prompts])


@dataclass
class Work:
    """A ``pass``, ``prompt``, ``read`` or ``multiply`` that reads ``nbytes`` and needs ``operations``, and its seconds.

    ``undo`` cuts off what a run appended to a cache.
    """

    dtype: str
    who: str
    kind: str
    tokens: int
    nbytes: int
    run: Callable[[], None]
    undo: Callable[[], None] = lambda: None
    operations: int = 0
    seconds: list[float] = field(default_factory=list)

    def once(self, clock: Callable[[], float]) -> float:
        begin = clock()
        self.run()
        seconds = clock() - begin
        self.undo()
        return seconds


@torch.inference_mode()
def measure(
    models: Sequence[PreTrainedModel],
    sizes: PassSizes,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Return a row for each work; ``models`` are one model in the types to compare. Raise ValueError if it has too few
    positions."""
    limit = position_limit(models[0])
    if limit is not None and sizes.longest > limit:
        raise ValueError(f"{sizes.longest} tokens are to be measured and the model has {limit} positions")
    reader = BufferReader(models[0].device, sizes.buffer)
    works = [Work("-", MEMORY, "read", 0, reader.nbytes, reader)]
    for name in dict.fromkeys(map(dtype_name, models)):
        if name in PEAKS:
            multiplier = Multiplier(PEAKS[name], models[0].device)
            works.append(Work(name, MATMUL, "multiply", 0, 0, multiplier, operations=multiplier.operations))
    works += [work for model in models for work in _works(model, sizes)]
    runs = {number: functools.partial(work.once, clock) for number, work in enumerate(works)}
    for number, seconds in in_turns(runs, sizes.rounds + 1, progress).items():
        works[number].seconds = seconds
    return summarise(works)


def _works(model: PreTrainedModel, sizes: PassSizes) -> Iterator[Work]:
    dtype = dtype_name(model)
    engine = Engine(model, "none")
    text = np.random.default_rng(0).integers(0, engine.target.vocabulary, sizes.longest + 1)
    nbytes, each = weight_bytes(model), weight_operations(model)
    for count, run in _our_passes(engine, text, sizes):
        yield Work(dtype, FORERUN, "pass", count, nbytes, run, operations=count * each)
    for count, run, undo in _their_passes(model, text, sizes.context):
        yield Work(dtype, TRANSFORMERS, "pass", count, nbytes, run, undo, count * each)
    for count in sizes.prompts:
        ours = functools.partial(_our_prefill, engine, text[: count + 1].tolist())
        yield Work(dtype, FORERUN, "prompt", count, nbytes, ours)
        theirs = functools.partial(_call, model, text[:count], logits_to_keep=1)
        yield Work(dtype, TRANSFORMERS, "prompt", count, nbytes, lambda theirs=theirs: theirs(cache=DynamicCache()))


def _our_passes(engine: Engine, text: np.ndarray, sizes: PassSizes) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield Forerun's passes over a draft chain; nothing of it stays in the cache."""
    cache = engine.prefill(text[: sizes.context + 1].tolist(), max(sizes.passes) + 1)
    for count in sizes.passes:
        tokens = text[sizes.context : sizes.context + count]
        block = Block(tokens[:1], DraftTree.chain(tokens[1:]), cache.length)
        yield count, lambda block=block: engine.target.score([block], [cache])[0][-1, -1].item()


def _their_passes(
    model: PreTrainedModel, text: np.ndarray, context: int
) -> Iterator[tuple[int, Callable[[], None], Callable[[], None]]]:
    """Yield the model's own calls with a ``DynamicCache``, and what cuts off their tokens."""
    cache = DynamicCache()
    if context:
        _call(model, text[:context], cache, logits_to_keep=1)
    for count in THEIR_SIZES:
        tokens = text[context : context + count]
        yield count, lambda tokens=tokens: _call(model, tokens, cache), functools.partial(cache.crop, -count)


def _our_prefill(engine: Engine, tokens: list[int]) -> None:
    """Prefill all tokens but the last, as the engine does."""
    engine.prefill(tokens)
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize(engine.target.device)


def _call(model: PreTrainedModel, tokens: np.ndarray, cache: DynamicCache, **options: Any) -> None:
    ids = torch.from_numpy(tokens)[None].to(model.device)
    if not model._supports_logits_to_keep():
        options = {}
    model(input_ids=ids, past_key_values=cache, use_cache=True, **options).logits[0, -1, -1].item()


def summarise(works: Sequence[Work]) -> list[Row]:
    """Return a row of medians for each work, without the first round, which is a warm-up."""
    times = [median(work.seconds[1:]) for work in works]
    ones = {(w.dtype, w.who): t for w, t in zip(works, times, strict=True) if (w.kind, w.tokens) == ("pass", 1)}
    speed = next(w.nbytes / t for w, t in zip(works, times, strict=True) if w.who == MEMORY)
    peaks = {w.dtype: w.operations / t for w, t in zip(works, times, strict=True) if w.who == MATMUL}
    return [_row(work, seconds, ones, speed, peaks) for work, seconds in zip(works, times, strict=True)]


def _row(work: Work, seconds: float, ones: dict[tuple[str, str], float], speed: float, peaks: dict[str, float]) -> Row:
    one = ones.get((work.dtype, work.who))
    reads = work.kind in ("read", "pass")  # a prompt is bound by arithmetic, not by reading
    peak = peaks.get(work.dtype) if work.operations else None
    return {
        **{name: getattr(work, name) for name in ("dtype", "who", "kind", "tokens")}, "milliseconds": 1000 * seconds,
        "slowest": 1000 * max(work.seconds[1:]), "fastest": 1000 * min(work.seconds[1:]),
        "ratio_to_one_token": seconds / one if one and work.kind == "pass" else None,
        "tokens_per_second": work.tokens / seconds if work.tokens else None, "bytes_read": work.nbytes,
        "gigabytes_per_second": work.nbytes / seconds / 1e9 if reads else None,
        "share_of_bandwidth": work.nbytes / seconds / speed if reads else None,
        "gigaflops": work.operations / seconds / 1e9 if work.operations else None,
        "share_of_peak": work.operations / seconds / peak if peak else None,
    }  # fmt: skip


def add_passes(report: Report, rows: Sequence[Row], context: int) -> None:
    read = next(row for row in rows if row["who"] == MEMORY)
    passes = [_shown(row) for row in rows if row["kind"] == "pass"]
    prompts = [_shown(row) for row in rows if row["kind"] == "prompt"]
    said = f"This machine reads {read['gigabytes_per_second']:.1f} GB/s, measured in the same rounds.\n"
    heading = f"Passes after {context:,} tokens"
    peaks = [row for row in rows if row["who"] == MATMUL]
    types = {row["dtype"]: "int8" if row["dtype"] == STORED else row["dtype"] for row in peaks}
    speeds = ", ".join(f"{row['gigaflops']:.0f} GFLOP/s in {types[row['dtype']]}" for row in peaks)
    said += f"Torch multiplies matrices here at {speeds}.\n" if peaks else ""
    report.add("passes", heading, [*passes, read, *peaks], said, listing(passes, PASSES))
    frame = Frame(heading, "tokens in the pass", "milliseconds", log=True)
    report.lines("times", frame, plots.by(passes, "line", "tokens", "milliseconds", ("fastest", "slowest")))
    if prompts:
        report.add("prompts", "Prefill", prompts, listing(prompts, PROMPTS))


def _shown(row: Row) -> Row:
    more = {"line": f"{row['who']}, {row['dtype']}", "megabytes": round(row["bytes_read"] / 1e6, 1)}
    shares = {"share": row["share_of_bandwidth"], "peak": row["share_of_peak"]}
    return row | more | {name: None if share is None else f"{100 * share:.0f} %" for name, share in shares.items()}
