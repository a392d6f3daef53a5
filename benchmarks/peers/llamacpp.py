"""llama.cpp through ``xllamacpp``: plain, or with one of its n-gram speculations at its own settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

KINDS = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16"}  # types of keys and values


def make_params(library: Any, file: str, threads: int, positions: int, dtype: str) -> Any:
    params = library.CommonParams()
    params.model.path, params.n_ctx = file, positions
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.fit_params = 0, False
    params.cache_type_k = params.cache_type_v = getattr(library.ggml_type, KINDS[dtype])
    return params


class Engine:
    """One server inside this process, over ``folder/model.gguf``; ``speculation`` is NGRAM_SIMPLE, NGRAM_MOD, ..., or
    nothing."""

    def __init__(self, folder: str, threads: int, positions: int, dtype: str, speculation: str = "") -> None:
        import xllamacpp

        self._speculation = speculation
        self._params = make_params(xllamacpp, f"{folder}/model.gguf", threads, positions, dtype)
        self._params.verbosity, self._params.cache_ram_mib = -1, 0
        if speculation:
            name = f"COMMON_SPECULATIVE_TYPE_{speculation}"
            self._params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        self._make_server: Callable[[], Any] = lambda: xllamacpp.Server(self._params)
        self._server = self._make_server()
        able = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
        drafts = f", {speculation} at its own settings" if speculation else ""
        version = metadata.version("xllamacpp")
        self.said = f"llama.cpp by xllamacpp {version}, built for {', '.join(able)}, keys and values in {dtype}{drafts}"

    def generate(self, ids: list[int], new: int) -> dict[str, Any]:
        order = {"prompt": ids, "n_predict": new, "temperature": 0.0, "cache_prompt": False}
        found = self._server.handle_completions(order)
        if "choices" not in found:
            raise RuntimeError(str(found))
        first = found["timings"]["prompt_ms"] / 1000
        return {"text": found["choices"][0]["text"], "count": found["usage"]["completion_tokens"], "first": first}

    def forget(self) -> None:
        """Empty NGRAM_MOD's table of all requests, by a new server."""
        if self._speculation == "NGRAM_MOD":
            self._server = None
            self._server = self._make_server()
