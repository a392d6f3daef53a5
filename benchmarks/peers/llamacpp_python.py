"""llama.cpp through ``llama-cpp-python``, which pip builds for this machine: decoding, logits, and quantising.

The loop calls C functions and picks the highest logit with numpy: the binding costs microseconds a token.
"""

from __future__ import annotations

import ctypes
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PURE = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""Formats that all matrices of a file can have, and a llama.cpp file type of each."""
MIXED = {"Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17}  # file types that mix formats, as published files do
CACHE = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml's numbers of types
LOOKUP_TOKENS = 2  # draft length of prompt lookup; llama-cpp-python's README says it is best on CPUs


class Engine:
    """One model and context.

    Args:
        folder: holds ``model.gguf``, or is a GGUF file; without one, only ``quantise`` works.
        dtype: of keys and values; float16 is llama.cpp's default.
        lookup: whether to use the binding's prompt lookup.
    """

    def __init__(
        self, threads: int, folder: str = "", positions: int = 512, dtype: str = "float16", ends: tuple[int, ...] = (),
        lookup: bool = False,
    ) -> None:  # fmt: skip
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
        self._library, self._threads, self._ends = llama_cpp, threads, frozenset(ends)
        llama_cpp.llama_backend_init()
        if folder:
            file = Path(folder)
            self._load(str(file / "model.gguf" if file.is_dir() else file), positions, dtype)
        able = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        version = metadata.version("llama-cpp-python")
        drafts = f", prompt lookup of {LOOKUP_TOKENS} tokens" if lookup else ""
        built = f"llama.cpp by llama-cpp-python {version}, built for {', '.join(able)}"
        self.said = f"{built}, keys and values in {dtype}{drafts}"

    def generate(self, ids: list[int], new: int) -> dict[str, Any]:
        begin = time.perf_counter()
        self._clear()
        tokens = [self._next(ids)]
        first = time.perf_counter() - begin
        while len(tokens) < new and tokens[-1] not in self._ends:
            step = self._next_with_drafts([*ids, *tokens]) if self._lookup else [self._next(tokens[-1:])]
            end = next((i + 1 for i, token in enumerate(step) if token in self._ends), len(step))
            tokens += step[: min(end, new - len(tokens))]
        return {"tokens": tokens, "count": len(tokens), "first": first}

    def forget(self) -> None:
        """Do nothing: it keeps nothing."""

    def logits(self, ids: list[int], file: str) -> None:
        """Write the logits after each token, ``[n, V]`` in float32, to a ``.npy`` file."""
        self._clear()
        np.save(file, self._all_logits(ids, 0))

    def quantise(self, source: str, target: str, kind: str) -> None:
        """Write a file's weights in another format; ``kind`` is of ``PURE`` or ``MIXED``."""
        given = self._library.llama_model_quantize_default_params()
        given.nthread, given.ftype, given.pure = self._threads, (PURE | MIXED)[kind], kind in PURE
        failed = self._library.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(given))
        if failed:
            raise RuntimeError(f"llama.cpp cannot write {source} as {kind}")

    def _load(self, file: str, positions: int, dtype: str) -> None:
        library = self._library
        self._model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        given = library.llama_context_default_params()
        given.n_ctx = given.n_batch = positions  # a prompt is one call; it reads n_ubatch tokens at once, as by default
        given.n_threads = given.n_threads_batch = self._threads
        given.type_k = given.type_v = CACHE[dtype]
        self._context = library.llama_init_from_model(self._model, given)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {positions} positions for {file}")

    def _clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def _next(self, ids: list[int]) -> int:
        given = (self._library.llama_token * len(ids))(*ids)
        self._decode(self._library.llama_batch_get_one(given, len(ids)))
        found = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(found, shape=(self._vocabulary,)).argmax())

    def _next_with_drafts(self, text: list[int]) -> list[int]:
        """Return accepted drafts and one more token; the last token of ``text`` is not in the cache."""
        assert self._lookup is not None
        drafts = [int(token) for token in self._lookup(np.array(text, np.intc))]
        best = [int(token) for token in self._all_logits([text[-1], *drafts], len(text) - 1).argmax(-1)]
        accepted = next((i for i, token in enumerate(drafts) if token != best[i]), len(drafts))
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_seq_rm(memory, 0, len(text) + accepted, -1)
        return best[: accepted + 1]

    def _all_logits(self, ids: list[int], position: int) -> Any:
        """Return the logits after each of the tokens, ``[n, V]``; the first is at ``position``."""
        batch = self._library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        try:
            self._decode(batch)
        finally:
            self._library.llama_batch_free(batch)
        found = self._library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, shape=(len(ids), self._vocabulary))

    def _decode(self, batch: Any) -> None:
        if code := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")
