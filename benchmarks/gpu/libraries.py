"""Plain decoding of the same shapes by other libraries, with random weights of the same sizes."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache

from benchmarks.gpu.gpu_bench import GpuBench
from benchmarks.papers.simulated_acceptance import llama_config
from forerun.bench.machine import Row

ANSWERED = ("_attn_implementation_internal", "_experts_implementation_internal")
"""Attributes of transformers' configurations that Forerun answers by thread (``models/forward/scorer.py``)."""
VLLM_TOKENS = 32
"""Tokens of vLLM's longer answer; the shorter one has one."""


@torch.inference_mode()
def transformers(bench: GpuBench) -> Iterator[Row]:
    """transformers' pass over one token with a static cache, compiled, as its documentation advises."""
    for name, context in bench.texts():
        with _as_without_forerun():
            seconds = bench.seconds(_compiled(bench, name, context))
        yield bench.decoded(name, context, "transformers, compiled", seconds)
        torch.compiler.reset()
        gc.collect()


@contextmanager
def _as_without_forerun() -> Iterator[None]:
    """A context without Forerun's attributes of configurations, which torch cannot compile in one graph."""
    ours = {name: vars(PreTrainedConfig)[name] for name in ANSWERED}
    for name in ours:
        delattr(PreTrainedConfig, name)
    try:
        yield
    finally:
        for name, attribute in ours.items():
            setattr(PreTrainedConfig, name, attribute)


def _compiled(bench: GpuBench, name: str, context: int) -> Callable[[], Any]:
    model: PreTrainedModel = bench.shaped(name)
    shape = bench.shapes[name]
    cache = StaticCache(config=model.config, max_cache_len=context + bench.rounds + 8)
    sizes = {"batch_size": 1, "num_heads": shape.kv_heads, "head_dim": shape.head_dim}
    cache.early_initialization(**sizes, dtype=bench.dtype, device=bench.device)
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)  # type: ignore[union-attr]
    how: dict[str, Any] = {"mode": "reduce-overhead"} if bench.device.type == "cuda" else {"backend": "eager"}
    call = torch.compile(model.forward, fullgraph=True, **how)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=bench.device)
    return lambda: call(input_ids=ids, past_key_values=cache, use_cache=True)


def vllm(bench: GpuBench) -> Iterator[Row]:
    """vLLM's: an answer of many tokens, less one of one token, after a prompt that it keeps."""
    if find_spec("vllm") is None:
        bench.skipped["vllm"] = "not installed: pip install vllm"
        return
    from vllm import LLM, SamplingParams

    for name, shape in bench.shapes.items():
        contexts = [context for each, context in bench.texts() if each == name]
        if not contexts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = llama_config(shape)
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(folder)
            model = LLM(
                model=folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=1,
                dtype=str(bench.dtype).removeprefix("torch."), max_model_len=max(contexts) + VLLM_TOKENS + 1,
                enable_prefix_caching=True, gpu_memory_utilization=0.95,
            )  # fmt: skip
        for context in contexts:
            ids = np.random.default_rng(0).integers(0, shape.vocabulary, context).tolist()

            def seconds(tokens: int, model: Any = model, ids: list[int] = ids) -> float:
                how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                began = time.perf_counter()
                model.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)
                return time.perf_counter() - began

            seconds(1)  # reads the prompt
            one, many = (min(seconds(count) for _ in range(bench.rounds)) for count in (1, VLLM_TOKENS + 1))
            yield bench.decoded(name, context, "vLLM", (many - one) / VLLM_TOKENS)
        del model
        gc.collect()
