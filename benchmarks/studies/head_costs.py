"""``python -m benchmarks heads``: what a trained head costs, in plain passes of its target.

Weights are random, of the shapes of published models: an EAGLE-3 head of the target's width over the target's output
matrix, as MTP layers have it. Targets have attention in all layers, and few of them: passes of one and of
``SLOPE_LAYERS`` layers give the cost of each further layer. All take turns; medians count.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.reporting.common_options import ListOptions, list_option, names_of
from benchmarks.reporting.study_report import Report, listing
from benchmarks.reporting.turns import in_turns
from forerun.bench.machine import Row
from forerun.cli.options import Out, OutputOptions, Rounds
from forerun.cli.terminal import progress_bar, stderr
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.decoding.sources.head_source import WIDTH
from forerun.kv.full_cache import FullCache
from forerun.models.forward import gate
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.static_lists import LISTED_TOKENS
from forerun.models.heads.head import Growth, Head
from forerun.models.heads.loading import load_head
from forerun.models.heads.shortlist import OWN_TOKENS, Shortlist

MODELS = {name: ModelShape.parse(name) for name in ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "gemma-4-e2b")}
"""Output matrices share memory with the embeddings: that changes no time."""
SLOPE_LAYERS = 3
CONTEXT = 64
"""Tokens before a pass. With 512, attention in all layers would make plain passes too expensive."""
NAMED_TOKENS = 2048  # tokens that static lists name beyond the first ones, assumed
COLUMNS = {
    "model": "shape", "matrix": "logits over", "plain_ms": "plain pass, ms", "read": "read a token",
    "level": f"level of {WIDTH} nodes", "tree": "tree of 6 levels",
}  # fmt: skip


@dataclass(frozen=True)
class HeadsOptions(ListOptions, OutputOptions):
    """What a trained head costs on this machine, in plain passes of its target; random weights of published shapes.

    Writes JSON and Markdown.
    """

    models: Annotated[str, list_option("Model", f"Of {', '.join(MODELS)}.")] = ",".join(MODELS)
    rounds: Rounds = 7
    out: Out = Path("runs/heads")

    names = names_of("models", MODELS)


def random_head(shape: ModelShape, layers: int, folder: Path) -> Head:
    """Return an EAGLE-3 head of a target's width, without matrices of the vocabulary."""
    size, kv = shape.hidden, shape.kv_heads * shape.head_dim
    wide = shape.heads * shape.head_dim
    parts = {"q": (wide, 2 * size), "k": (kv, 2 * size), "v": (kv, 2 * size), "o": (size, wide)}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 3 * size), "norm.weight": (size,)}
    shapes |= {f"midlayer.self_attn.{part}_proj.weight": each for part, each in parts.items()}
    shapes |= {f"midlayer.mlp.{part}_proj.weight": (shape.intermediate, size) for part in ("gate", "up")}
    shapes["midlayer.mlp.down_proj.weight"] = size, shape.intermediate
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (size,)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": size, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary, "draft_vocab_size": shape.vocabulary, "max_position_embeddings": 4096,
        "rope_theta": 1e4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, layers, layers]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.empty(each, dtype=torch.bfloat16) for name, each in shapes.items()}
    for tensor in tensors.values():
        tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(std=0.02)
    save_file(tensors, folder / "model.safetensors")
    return load_head(folder)


class HeadCosts:
    """Plain passes of two targets of a shape, and its head with all logits and over a shortlist."""

    def __init__(self, shape: ModelShape, folder: Path, clock: Callable[[], float]) -> None:
        self.shape, self._clock = shape, clock
        self.targets = {
            layers: gate.admit(random_model(replace(shape, layers=layers, tied=True), torch.bfloat16))
            for layers in (1, SLOPE_LAYERS)
        }
        self.head = random_head(shape, 1, folder)
        self.head.bind(self.targets[1])
        assert self.head.output is not None
        self.head.output.shorten(np.arange(LISTED_TOKENS + NAMED_TOKENS))
        self._rng = np.random.default_rng(0)
        self._tokens = self._rng.integers(0, shape.vocabulary, CONTEXT + 1)
        self._sequence, self._end = self.head.open(FullCache()), CONTEXT
        self.head.record(self._sequence, self._tokens, 0, self._states(CONTEXT))
        self.head.read([self._sequence])
        self.shortlist = Shortlist(self.head.output)
        self.shortlist.add(np.arange(shape.vocabulary - OWN_TOKENS // 2, shape.vocabulary))

    def _states(self, count: int) -> torch.Tensor:
        return torch.randn(count, 3 * self.shape.hidden, dtype=torch.float32)

    def works(self) -> dict[str, Callable[[], float]]:
        """Return what is timed, by name; each returns its seconds."""
        found = {f"pass {layers}": self._plain(target) for layers, target in self.targets.items()}
        found["read"] = self._read
        for name, shortlist in (("all", None), ("shortlist", self.shortlist)):
            found[f"level {name}"] = partial(self._level, shortlist, 1)
            found[f"tree {name}"] = partial(self._level, shortlist, self.head.levels)
        return found

    def _plain(self, target: Scorer) -> Callable[[], float]:
        cache = target.adopt(FullCache())
        block = Block(self._tokens[:CONTEXT], DraftTree.empty(), 0)
        target.score([block], [cache])
        cache.commit(block, [])
        one = Block(self._tokens[CONTEXT:], DraftTree.empty(), CONTEXT)

        def run() -> float:
            began = self._clock()
            target.score([one], [cache])[0][-1, -1].item()
            return self._clock() - began

        return run

    def _read(self) -> float:
        """Time the record of a committed token."""
        tokens = np.append(self._tokens, self._rng.integers(0, self.shape.vocabulary, self._end + 2 - CONTEXT))
        states, began = self._states(1), self._clock()
        self.head.record(self._sequence, tokens[: self._end + 2], self._end, states)
        self.head.read([self._sequence])
        self._end += 1
        return self._clock() - began

    def _level(self, shortlist: Shortlist | None, levels: int) -> float:
        """Time the root's logits and those of further levels; a single level is timed alone."""
        self._sequence.shortlist = shortlist
        began = self._clock()
        growths, logits = self.head.start([self._sequence])
        float(logits[-1, -1])
        for level in range(max(levels - 1, 1)):
            if levels == 1:
                began = self._clock()
            self._extend(growths, level)
        return self._clock() - began

    def _extend(self, growths: Sequence[Growth], level: int) -> None:
        parents = [0] * WIDTH if level == 0 else list(range(1 + WIDTH * (level - 1), 1 + WIDTH * level))
        logits = self.head.extend(growths, [parents], [self._rng.integers(0, self.shape.vocabulary, WIDTH).tolist()])
        float(logits.softmax(-1).topk(WIDTH).values[-1, -1])


@torch.inference_mode()
def measure(name: str, rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """Return a row for all logits, and one for a shortlist; costs are in plain passes."""
    shape, rows = MODELS[name], list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        works = HeadCosts(shape, Path(folder), clock).works()
    times = {name: median(seconds[1:]) for name, seconds in in_turns(works, rounds + 1).items()}
    each = (times[f"pass {SLOPE_LAYERS}"] - times["pass 1"]) / (SLOPE_LAYERS - 1)
    plain = times["pass 1"] + (shape.layers - 1) * each
    shared: Row = {"model": name, "plain_ms": 1000 * plain, "layer_ms": 1000 * each}
    for matrix in ("all", "shortlist"):
        costs = {part: times[f"{part} {matrix}"] / plain for part in ("level", "tree")}
        rows.append(shared | {"matrix": matrix, "read": times["read"] / plain} | costs)
    return rows


def run(options: HeadsOptions) -> None:
    report, rows = Report.of("What a trained head costs", options, "heads"), list[Row]()
    with progress_bar(stderr(), "measuring") as show:
        for done, name in enumerate(options.names):
            show(done, len(options.names))
            rows += measure(name, options.rounds)
    said = (
        f"In plain passes of the target, scaled up from passes of 1 and {SLOPE_LAYERS} layers after {CONTEXT} tokens. "
        f"Shortlists have {LISTED_TOKENS + NAMED_TOKENS:,} tokens in common "
        f"and {OWN_TOKENS // 2:,} of the sequence's own.\n"
    )
    report.add("heads", "In plain passes", rows, said, listing(rows, COLUMNS))
    report.end()
