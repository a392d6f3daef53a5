"""Whether compressed keys and values would draft better than the low-rank cache (QuantSpec, arXiv 2502.10424).

    python -m benchmarks.compressed_keys --text book.txt --context 60000 --tokens 192 --out runs/compressed

The model drafts one token at a time over copies of its cache, rounded to 8, 4 and 2 bits, and over the low-rank cache;
the text goes on as the full cache says. Counted is how often the draft is right. Copies are rounded as in QuantSpec:
keys by channel in groups of 64 tokens, values by token in groups of 64 numbers, with a least number and a step each.
Written are also the bytes that a draft reads, and the time that memory takes to deliver them: no kernel is faster.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.bandwidth import Reader
from forerun.core.block import Block
from forerun.core.sampling import Salt, gumbel
from forerun.core.tree import DraftTree, IntArray
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.models.forward.compiled_scorer import inner
from forerun.models.forward.gate import admit
from forerun.models.forward.level import read
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.load import load

GROUP = 64
"""Numbers that share a least number and a step, of two bytes each."""
BITS = (8, 4, 2)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=60000)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=Path("runs/compressed"))
    options = parser.parse_args()
    model, tokenizer = load(options.model, options.dtype)
    ids = np.array(tokenizer(options.text.read_text("utf-8"))["input_ids"][: options.context], np.int64)
    if len(ids) < options.context:
        parser.error(f"--context is {options.context}; the text has {len(ids)} tokens")
    target = admit(model)
    target.keeps_queries = True
    result = measure(target, ids, options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "compressed.json").write_text(json.dumps(vars(options) | result, indent=2, default=str) + "\n")
    print(json.dumps(result, indent=2))


@torch.inference_mode()
def measure(target: Scorer, ids: IntArray, tokens: int) -> dict[str, object]:
    """Share of right drafts by cache and temperature, and what a draft reads."""
    full, drafting = FullCache(len(ids) + tokens + GROUP), inner(target)
    read(target, full, ids[:-1])
    caches: dict[str, Cache] = {f"{bits} bits": rounded(full, bits, tokens) for bits in BITS}
    caches["low-rank"] = LowRankCache(full, LowRankConfig())
    found: dict[str, object] = {}
    for temperature in (0, 1):
        right = dict.fromkeys(caches, 0)
        lengths = {name: cache.length for name, cache in caches.items() if isinstance(cache, FullCache)}
        last, begin = int(ids[-1]), full.length
        for position in range(tokens):
            noise = gumbel(7, position, target.vocabulary, Salt.TARGET) if temperature else 0
            drafts = {name: follow(drafting, cache, last, noise) for name, cache in caches.items()}
            last = follow(target, full, last, noise)
            for name, draft in drafts.items():
                right[name] += draft == last
        found[f"right at temperature {temperature}"] = {name: count / tokens for name, count in right.items()}
        full.truncate(begin)
        for name, length in lengths.items():
            caches[name].truncate(length)
    speed = bandwidth(target)
    sizes = {f"{bits} bits": full.token_bytes * len(ids) * (bits + 32 / GROUP) / 8 / width(full) for bits in BITS}
    return found | {
        "megabytes a draft reads": {name: round(size / 1e6, 1) for name, size in sizes.items()},
        "gigabytes a second": round(speed / 1e9, 1),
        "least milliseconds": {name: round(1e3 * size / speed, 2) for name, size in sizes.items()},
    }


def bandwidth(scorer: Scorer) -> float:
    """Bytes that memory delivers in a second."""
    reader, times = Reader(scorer.device), []
    for _ in range(9):
        began = time.perf_counter()
        reader()
        times.append(time.perf_counter() - began)
    return reader.nbytes / min(times)


def width(cache: FullCache) -> int:
    """Bytes of a number."""
    return cache.shape.layers[0].width


def follow(scorer: Scorer, cache: Cache, last: int, noise: torch.Tensor | int) -> int:
    """The token that a model draws after ``last``, which the cache then holds."""
    if isinstance(cache, LowRankCache):
        cache.sync()
    block = Block(np.array([last]), DraftTree.empty(), cache.length)
    logits = scorer.score([block], [cache])[0][0]
    cache.commit(block, [])
    return int((logits.double() + noise).argmax())


def rounded(full: FullCache, bits: int, more: int) -> FullCache:
    """A copy whose numbers have so many bits, with room for ``more`` tokens."""
    copy, layers = FullCache(), full.layers
    keys = full.read(layers[0], 0, full.length)[0]
    store = copy.reserve(len(layers), keys.shape[1], keys.shape[3], keys.dtype, full.length + more)
    for layer in layers:
        keys, values = full.read(layer, 0, full.length)
        whole = full.length // GROUP * GROUP
        store[layer, 0, :, : full.length] = keys[0]
        cut = keys[0, :, :whole].unflatten(1, (-1, GROUP))
        store[layer, 0, :, :whole] = to_bits(cut, bits, 2).flatten(1, 2)
        parted = values[0].unflatten(2, (-1, min(GROUP, values.shape[3])))
        store[layer, 1, :, : full.length] = to_bits(parted, bits, 3).flatten(2, 3)
    copy.length = full.length
    return copy


def to_bits(numbers: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rounded to 2 ** bits even steps between the least and the greatest along a dimension."""
    least, most = numbers.amin(group, keepdim=True), numbers.amax(group, keepdim=True)
    step = ((most - least) / (2**bits - 1)).clamp_min(1e-12)
    return ((numbers - least) / step).round().mul_(step).add_(least)


if __name__ == "__main__":
    main()
