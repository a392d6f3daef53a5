"""Nothing that depends on a clock decides what engines draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.models.forward.fingerprint import unknowable_code
from forerun.models.forward.runtime import Runtime, StartupCache, runtime_as_default
from forerun.policy.cost_curve import CostCurve
from forerun.trie.recycled import NO_ROWS


class CacheOfEqualModels(StartupCache):
    """Tests a model once, and no copy of it: as for other processes, equal fingerprints mean equal results."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(lambda: folder)
        self._equal: dict[tuple[str, str], Any] = {}

    def _of(self, scorer: Any, name: str) -> Any:
        result = super()._of(scorer, name)
        if unknowable_code(scorer.model) is None:
            result._results = self._equal
        return result


@contextmanager
def fixed_runtime(folder: Path | None = None) -> Iterator[None]:
    """Engines draft by a fixed cost curve and a clock that stands still, and test each model once; with a folder, also
    each one that is loaded again from the same file."""
    kept = CacheOfEqualModels(folder)
    fixed = Runtime(
        lambda: 0.0,
        lambda scorer: CostCurve.linear(24),
        kept.exactness,
        kept.self_test,
        static_lists=lambda scorer: NO_ROWS,
    )
    with runtime_as_default(fixed):
        yield
