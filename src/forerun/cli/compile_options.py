"""Options of ``forerun compile``."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.cli.options import DebugOptions, KVDtype, ModelOptions


@dataclass(frozen=True)
class CompileOptions(ModelOptions, DebugOptions):
    """Compile now what the first request would wait for, for this processor and user.

    Use it for container images, and for machines that start often. The code is stored next to the package, or in
    NUMBA_CACHE_DIR if set. For the bundled model, the default, this compiles float32 and bfloat16; name your own model
    if it needs other kernels.
    """

    kv_dtype: KVDtype = "auto"
