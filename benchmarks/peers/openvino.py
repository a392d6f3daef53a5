"""OpenVINO GenAI: plain, or with its prompt lookup.

It reads GGUF files in float16 only, so its graph is made from such a file and then gets the exact weights.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # draft length and matched tokens, as in OpenVINO's own example of prompt lookup


class Engine:
    """One pipeline inside this process. ``folder`` holds ``graph.gguf`` in float16, and ``model.safetensors`` and
    ``scalars.json`` with exact values; ``dtype`` is float32 or bfloat16, also of keys and values."""

    def __init__(self, folder: str, threads: int, dtype: str, ends: list[int], lookup: bool = False) -> None:
        import openvino
        import openvino_genai

        self._library, self._tensor = openvino_genai, openvino.Tensor
        precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = False  # each turn reads its prompt again
        schedule.max_num_batched_tokens = 1 << 30
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        options |= {"INFERENCE_NUM_THREADS": threads, "scheduler_config": schedule, "prompt_lookup": lookup}
        self._pipeline = openvino_genai.LLMPipeline(str(exact(Path(folder), threads)), "CPU", **options)
        self._ends, self._lookup = ends, lookup
        drafts = f"; prompt lookup of {LOOKUP_TOKENS} tokens behind {LOOKUP_NGRAM}" if lookup else ""
        self.said = f"openvino-genai {metadata.version('openvino-genai')}, keys and values in {dtype}{drafts}"

    def generate(self, ids: list[int], new: int) -> dict[str, Any]:
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = new, False, False
        config.ignore_eos = not self._ends
        if self._ends:
            config.eos_token_id, config.stop_token_ids = self._ends[0], set(self._ends)
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        prompt = self._tensor(np.array([ids], np.int64))
        mask = self._tensor(np.ones((1, len(ids)), np.int64))
        found = self._pipeline.generate(self._library.TokenizedInputs(prompt, mask), config)
        tokens = [int(token) for token in found.tokens[0]]
        return {"tokens": tokens, "count": len(tokens), "first": found.perf_metrics.get_ttft().mean / 1000}

    def forget(self) -> None:
        """Do nothing: it keeps nothing."""


def exact(folder: Path, threads: int) -> Path:
    """Return the folder of a graph with exact weights; the first process makes it."""
    import openvino
    import openvino_genai

    made = folder / "openvino"
    if made.is_dir():
        return made
    half = {"INFERENCE_NUM_THREADS": threads, "enable_save_ov_model": True}
    openvino_genai.LLMPipeline(str(folder / "graph.gguf"), "CPU", **half)
    graph = openvino.Core().read_model(folder / "openvino_model.xml")
    restore(graph, folder)
    scratch = folder / "openvino.part"
    scratch.mkdir(exist_ok=True)
    openvino.save_model(graph, scratch / "openvino_model.xml", compress_to_fp16=False)
    for file in folder.glob("openvino_*token*"):
        file.rename(scratch / file.name)
    scratch.rename(made)
    return made


def restore(graph: Any, folder: Path) -> None:
    """Restore every constant that was rounded to float16; raise RuntimeError if its exact value is not known."""
    import openvino
    from openvino import opset13
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    scalars = json.loads((folder / "scalars.json").read_text())
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_output_element_type(0) == openvino.Type.f16:
            rounded = node.get_data()
            value = _unrounded(node.get_friendly_name(), rounded, weights, scalars)
            new = opset13.constant(value.reshape(rounded.shape).astype(np.float32))
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(new.output(0))


def _unrounded(name: str, rounded: Any, weights: dict[str, Any], scalars: dict[str, float]) -> Any:
    """Find a constant's exact value by its name or by its rounded value."""
    plain = name.replace("[", ".").replace("]", "")
    if plain in weights:
        return weights[plain]
    flat = rounded.reshape(-1)
    candidates = [np.array([value], np.float32) for value in scalars.values()] if flat.size == 1 else weights.values()
    for value in candidates:
        if value.size == flat.size and np.array_equal(value.reshape(-1).astype(np.float16), flat):
            return value
    if np.array_equal(flat, np.rint(flat)):
        return rounded
    raise RuntimeError(f"the constant {name}, {rounded.shape}, of OpenVINO's graph was rounded and is not known")
