"""Nothing that depends on a clock decides what engines draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.models.forward.runtime import Runtime, StartupCache, runtime_as_default
from forerun.policy.cost_curve import CostCurve
from forerun.trie.recycled import NO_ROWS


@contextmanager
def fixed_runtime(folder: Path | None = None) -> Iterator[None]:
    """Engines draft by a fixed cost curve and a clock that stands still, and test each model once; with a folder, also
    each one that is loaded again from the same file."""
    kept = StartupCache(lambda: folder)
    fixed = Runtime(
        lambda: 0.0,
        lambda scorer: CostCurve.linear(24),
        kept.exactness,
        kept.self_test,
        static_lists=lambda scorer: NO_ROWS,
    )
    with runtime_as_default(fixed):
        yield
