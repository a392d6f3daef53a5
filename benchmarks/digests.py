"""Digests of logits, texts and drafts, to be compared before and after code is moved or kernels are merged.

    python -m benchmarks.digests --out before.json [--quick] [--real FOLDER] [--threads 1]
    python -m benchmarks.digests --out after.json --compare before.json

Equal digests mean equal bits. No clock decides anything that is digested: every draft is scored whole, draft lengths
are fixed, and of ``auto``, which goes by times, only the text counts. A text does not depend on drafts, so the trees
that a drafter proposes have a digest of their own. Two files are comparable if they come from one kind of processor and
one version of torch; the number of threads does not matter.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import itertools
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forerun
from forerun import DraftTree, Engine
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.verify import Outcome, Verdict
from forerun.drafting.drafter import trees_of
from forerun.drafting.recipes import RECIPES, build_drafter
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.load import load
from forerun.reference import demo_prompts
from tests.support import tiny


def stored_writer() -> Any:
    """``store`` of the tests of GGUF weights, or None where the packages for it are missing."""
    tests = Path(forerun.__file__).parents[2] / "tests"
    sys.path += [str(tests), str(tests / "models")]
    try:
        return importlib.import_module("test_as_stored").store
    except BaseException as reason:  # pytest's own way to skip is no Exception
        print(f"stored weights are left out: {reason!r}", file=sys.stderr)
        return None


Pairs = Iterator[tuple[str, str]]
DTYPES = ("float32", "bfloat16", "float64")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 12, "seed": 11},
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 4096}
"""Heads of whole vectors, as compiled forward passes want them."""
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
KINDS = {"sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]}
COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, compiled": ("LlamaForCausalLM", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "mistral, compiled": ("MistralForCausalLM", {**WIDE, "sliding_window": 37}),
    "qwen2, compiled": ("Qwen2ForCausalLM", {**WIDE, **WINDOWS}),
    "qwen3, compiled": ("Qwen3ForCausalLM", {**WIDE, "tie_word_embeddings": True}),
    "gemma3, compiled": ("Gemma3ForCausalLM", {**WIDE, **KINDS, "query_pre_attn_scalar": 20}),
}
KNOWN = (COMPILED, tiny.LAYOUTS, tiny.FAMILIES, tiny.ARCHITECTURES)
OTHERS = (
    "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "mistral", "phi3", "gpt2", "gpt_neox", "opt", "cohere", "qwen3_moe",
    "deepseek_v2", "llama, yarn", "smollm3, without positions", "glm, partial and interleaved",
)  # fmt: skip
QUICK = ("llama, compiled", "mistral, compiled", "gemma2", "mixtral", "deepseek_v3")
SMALL: dict[str, Any] = {
    "gamma1": 2,
    "gamma2": 5,
    "cache_budget": 16,
    "chunk": 2,
    "sinks": 1,
    "window": 8,
    "paced": False,
}
LONG = 700
"""Tokens of a long prompt."""


def main() -> None:
    """Write a file of digests, and compare it with another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="another file; exit with 1 if a digest differs")
    parser.add_argument("--real", type=Path, help="folder of a real model")
    parser.add_argument("--quick", action="store_true", help="a sixth of the texts, of fewer models")
    parser.add_argument("--threads", type=int, default=1, help="more only cost, for models so small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began, digests, done = time.perf_counter(), dict[str, str](), set[str]()
    for key, found in everything(options.quick, options.real):
        digests[key] = found
        if (model := key.partition(";")[0]) not in done:
            print(f"{time.process_time():6.1f} s: {model}", file=sys.stderr, flush=True)
            done.add(model)
    options.out.write_text(json.dumps({"torch": torch.__version__, "digests": digests}, indent=1) + "\n")
    times = f"{time.perf_counter() - began:.0f} s, of which {time.process_time():.0f} of a processor"
    print(f"{len(digests)} digests in {times}")
    if options.compare is not None:
        sys.exit(compare(json.loads(options.compare.read_text())["digests"], digests))


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print what differs and what only one has; 1 if anything differs."""
    both = before.keys() & after.keys()
    groups = {
        "different": {key for key in both if before[key] != after[key]},
        "missing after": before.keys() - after.keys(),
        "missing before": after.keys() - before.keys(),
    }
    for name, keys in groups.items():
        for key in sorted(keys):
            print(f"{name}: {key}")
    print(", ".join([f"equal {len(both) - len(groups['different'])}", *(f"{n} {len(k)}" for n, k in groups.items())]))
    return 1 if groups["different"] else 0


def everything(quick: bool, real: Path | None) -> Pairs:
    """Keys and digests."""
    target, tokenizer = load("bundled")
    small, _ = load("bundled-draft")
    texts = [tokenizer(each["prompt"])["input_ids"] for each in demo_prompts()]
    yield from trees(texts, tokenizer)
    yield from of_model("bundled", target, small, [text[:60] for text in texts[:3]], 6 if quick else 1)
    yield from of_long_text("bundled", target, small, (list(itertools.chain(*texts)) * 9)[:LONG], 128, quick)
    for name in QUICK if quick else (*COMPILED, *OTHERS):
        model = tiny.build(*next(known[name] for known in KNOWN if name in known), seed=len(name))
        one_in = 6 if quick else 1 if name == next(iter(COMPILED)) else 3
        yield from of_model(name, model, near(model), [list(prompt) for prompt in tiny.PROMPTS], one_in)
        if name in COMPILED:
            long = np.random.default_rng(3).integers(6, tiny.VOCABULARY, 50).tolist() * (LONG // 50)
            yield from of_long_text(name, model, near(model), long, 64, quick)
    yield from of_stored(quick)
    if real is not None:
        model, tokenizer = load(str(real))
        texts = [tokenizer(each["prompt"])["input_ids"] for each in demo_prompts()]
        yield from of_model("real", model, model, [text[:60] for text in texts[:3]], 6)


def of_model(name: str, model: Any, small: Any, prompts: list[list[int]], one_in: int) -> Pairs:
    """Logits by both scorers, and texts by every drafter, alone and in a ragged batch; a share of these."""
    for dtype in DTYPES:
        engine, draft = Engine(typed(model, dtype), "none", prefill_block=8, prune_drafts=False), typed(small, dtype)
        for kind, scorer in (("target", engine.target), ("plain", Scorer(engine.target.model))):
            yield from logits(f"{name}; {dtype}; {kind}", scorer, prompts)
        for drafter, sampling in itertools.product(RECIPES, SAMPLING):
            key = f"{name}; {dtype}; {sampling}; {drafter}"
            if turn(key, one_in) == 0:
                built = build_drafter(drafter, LongContextConfig(draft_model=draft, **SMALL))
                yield from generated(key, engine, built, prompts, sampling)
    engine = Engine(typed(model, "float32"), "auto")
    yield from generated(f"{name}; float32; greedy; auto that prunes", engine, None, prompts, "greedy")


def of_long_text(name: str, model: Any, small: Any, prompt: list[int], budget: int, quick: bool) -> Pairs:
    """Texts of drafters over sparse caches that hold a part of a long prompt."""
    for dtype in DTYPES[: 1 if quick else 3]:
        engine = Engine(typed(model, dtype), "none", prune_drafts=False)
        config = LongContextConfig(
            draft_model=typed(small, dtype), cache_budget=budget, gamma2=6, window=60, paced=False
        )
        for drafter in [each for each, recipe in RECIPES.items() if recipe.sparse or recipe.small]:
            if not quick or drafter in ("low-rank", "retrieval", "triforce", "triforce-trie"):
                sampling, built = list(SAMPLING)[turn(dtype + drafter, 2)], build_drafter(drafter, config)
                key, prompts = f"{name}, long; {dtype}; {sampling}; {drafter}", [prompt[:-40], prompt, prompt[9:]]
                yield from generated(key, engine, built, prompts, sampling, 16)


def of_stored(quick: bool) -> Pairs:
    """Logits and texts with weights as GGUF stores them."""
    store = stored_writer()
    for kind, name in itertools.product(("Q4_1",) if quick else ("mixed", "Q4_1", "Q8_0"), ("llama", "gemma3_text")):
        if store is not None:
            with tempfile.TemporaryDirectory() as folder:
                engine = Engine(store(Path(folder) / "model.gguf", name, kind)[0], "trie", prune_drafts=False)
                prompts = [list(prompt) for prompt in tiny.PROMPTS]
                yield from logits(f"stored {kind}; {name}", engine.target, prompts)
                yield from generated(f"stored {kind}; {name}; sampled; trie", engine, None, prompts, "sampled")


def generated(
    key: str, engine: Engine, drafter: Any, prompts: list[list[int]], sampling: str, tokens: int = 24
) -> Pairs:
    """A text alone and a ragged batch with this drafter, or with the engine's own, and the trees it proposed."""
    trees = None if drafter is None else record(drafter)
    if drafter is not None:
        engine.set_drafter(drafter)
    for together, rows in (("alone", prompts[1]), ("batch", prompts)):
        result = engine.generate(rows, **SAMPLING[sampling], max_new_tokens=tokens, eos_token_id=None)
        yield f"{key}; {together}", digest(*(request.tokens for request in result.requests))
    if trees is not None and not key.endswith("; auto"):
        yield f"{key}; drafts", trees.hexdigest()


def record(drafter: Any) -> Any:
    """A digest that takes in every tree that the drafter will propose."""
    total, propose = hashlib.sha256(), drafter.propose

    def proposed(context: PassContext) -> list[DraftTree]:
        found: list[DraftTree] = propose(context)
        total.update("".join(map(shape, found)).encode())
        return found

    drafter.propose = proposed
    return total


@torch.inference_mode()
def logits(key: str, scorer: Any, prompts: list[list[int]]) -> Pairs:
    """At every token of each text, read in one pass; then at every node of their trees, in one pass for all."""
    caches, blocks = [FullCache() for _ in prompts], []
    for row, (cache, prompt) in enumerate(zip(caches, prompts, strict=True)):
        block = Block(np.array(prompt[:1]), DraftTree.chain(prompt[1:]), 0)
        yield f"{key}; logits of text {row}", digest(scorer.score([block], [cache])[0])
        cache.commit(block, range(len(prompt) - 1))
        branches = [[7, 8, 9 + row, 10], [7, 8, 30], [12]][: 1 + row]
        blocks.append(Block(np.array([20 + row]), DraftTree.from_branches(branches, 16), cache.length))
    yield f"{key}; logits of trees", digest(*scorer.score(blocks, caches))


def trees(texts: list[list[int]], tokenizer: Any) -> Pairs:
    """What is proposed at each token of a text, after others were learned, knowing how words are spelled."""
    for name, budget in itertools.product((each for each in RECIPES if each.startswith(("trie", "lookup"))), (8, 64)):
        drafter, total = build_drafter(name), hashlib.sha256()
        drafter.spell(tokenizer.backend_tokenizer)
        if name.startswith("trie"):
            drafter.warm("default", texts[1:3])
        for text in (texts[0], texts[3], texts[0]):
            request = Request(text[: len(text) // 2], len(text))
            drafter.begin(request)
            for token in text[len(text) // 2 :]:
                total.update(shape(trees_of(drafter, PassContext.decoding([request], budget))[0]).encode())
                request.append(token)
                nothing_scored = Outcome(DraftTree.empty(), Verdict([], [token]), torch.zeros(1, 0))
                drafter.observe(request, nothing_scored)
            drafter.finish(request)
        yield f"trees; {name}; {budget} nodes", total.hexdigest()


def turn(key: str, count: int) -> int:
    """A number below ``count`` that stays when other keys come and go."""
    return zlib.crc32(key.encode()) % count


def near(model: Any) -> Any:
    """A model that often agrees with this one: the same with noise on its weights."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for weight in twin.parameters():
        weight.data += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator).to(weight)
    return twin


def typed(model: Any, dtype: str) -> Any:
    """A copy in this type."""
    return copy.deepcopy(model).to(getattr(torch, dtype))


def shape(tree: DraftTree) -> str:
    """A digest of a tree: its tokens, its parents, and the bits of its probabilities."""
    return digest(tree.tokens, tree.parents, *([] if tree.probability is None else [tree.probability]))


def digest(*arrays: Any) -> str:
    """SHA-256 of the shapes, types and bytes of arrays or tensors."""
    total = hashlib.sha256()
    for each in arrays:
        raw = each.contiguous().view(torch.uint8).numpy() if isinstance(each, torch.Tensor) else each
        total.update(f"{each.dtype}{tuple(each.shape)}".encode() + np.ascontiguousarray(raw).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
