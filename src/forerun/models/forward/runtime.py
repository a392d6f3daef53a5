"""Measure at an engine's start whether the model's passes are correct, how exact they are, and what they cost.

Results are reproducible and need seconds, so they are kept in the process, and in a file in the user's cache folder,
under ``fingerprint.of_results``. Files are JSON and replaced atomically; an unreadable one counts as missing, and
failures to write are ignored. Static lists have a separate file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from forerun.models.forward import static_lists
from forerun.models.forward.exactness import LEVELS, Exactness, probe
from forerun.models.forward.fingerprint import of_results, unknowable_code
from forerun.models.forward.pass_timing import measure, seconds_of_passes, undisturbed
from forerun.models.forward.scorer import Scorer, SelfTest, is_sharded
from forerun.policy.cost_curve import CostCurve
from forerun.trie.recycled import NO_ROWS, RecycledRows

log = logging.getLogger(__name__)
COSTS_LAST_SECONDS = 7 * 86_400
"""Age at which costs are measured again: a week."""
FASTER = 0.7
"""A pass faster than this share of its measured time shows that the measurement was disturbed."""
KEPT_MODELS = 256
"""Files in the folder, of about a kilobyte each, and as many of 130 with static lists; the oldest are removed."""
LISTS_SUFFIX = ".lists.npy"


def user_folder() -> Path | None:
    """Return the user's folder for results that can be computed again, or None."""
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path.home() / ".cache"
        base = Path(os.environ.get("XDG_CACHE_HOME") or base)
    except RuntimeError:  # no home
        return None
    return base / "forerun" / "startup" if base.is_absolute() else None


class StartupCache:
    """Startup results, measured once per model and condition.

    ``folder`` returns the folder for results that outlive the process, or None; it is called at each lookup, because a
    program may change its environment. ``thread_clock`` returns this thread's CPU seconds.
    """

    def __init__(
        self,
        folder: Callable[[], Path | None] = user_folder,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._folder, self._thread_clock = folder, thread_clock
        self._results: WeakKeyDictionary[nn.Module, dict[tuple[str, str], Any]] = WeakKeyDictionary()

    def self_test(self, scorer: Scorer, test: Callable[[], str | None]) -> str | None:
        """Run ``test``: return why the scorer's logits are not the model's own, or None, which is remembered."""
        results = self._of(scorer, "self-test")
        if results.get() is not True:
            reason = test()
            if reason is not None:
                return reason
            results.keep(True)
        return None

    def exactness(self, scorer: Scorer, limit: int | None, offloads: bool) -> Exactness:
        """Return ``exactness.probe``'s result; one from the folder says so in its reason."""
        if is_sharded(scorer.model):  # all ranks must pass together
            return probe(scorer, limit, offloads)
        results = self._of(scorer, f"exactness, {limit} positions{', offloads' if offloads else ''}")
        with suppress(KeyError, TypeError, ValueError):
            kept = results.get()
            found = Exactness(kept["level"], kept["reason"])
            if found.level in LEVELS and isinstance(found.reason, str | None):
                return found if results.in_process else replace(found, reason=results.described(found.reason))
        found = probe(scorer, limit, offloads)
        results.keep(asdict(found))
        return found

    def costs(self, scorer: Scorer) -> CostCurve:
        """Return ``pass_timing.measure``'s result; a doubtful curve stays in the process, and is measured again."""
        results = self._of(scorer, "costs")
        with suppress(KeyError, TypeError, ValueError):
            kept = dict(results.get())
            fresh = 0 <= time.time() - kept.pop("measured") < COSTS_LAST_SECONDS
            fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
            curve = CostCurve(**fields)
            if results.in_process:
                believed = not (curve.doubtful and undisturbed(scorer, self._thread_clock))
            else:
                believed = fresh and not _disturbed(curve, scorer)
            if believed:
                results.keep(results.get(), in_file=False)
                return curve
        found = measure(scorer, thread_clock=self._thread_clock)
        if scorer.device.type != "cpu" or is_sharded(scorer.model):  # there a thread waits for others anyway
            found = replace(found, doubtful=False)
        results.keep(asdict(found) | {"measured": time.time()}, in_file=not found.doubtful)
        return found

    def static_lists(self, scorer: Scorer) -> RecycledRows:
        """Return static lists of earlier processes, extended once in this process by ``static_lists.extended``."""
        if is_sharded(scorer.model):  # all ranks must pass together
            return NO_ROWS
        results = self._of(scorer, "static lists")
        if not results.in_process:
            file = results.beside(LISTS_SUFFIX)
            known = NO_ROWS if file is None else static_lists.read(file, scorer.vocabulary)
            found = static_lists.extended(scorer, known)
            if file is not None and len(found.last) > len(known.last):
                with suppress(OSError):
                    _replace(file, static_lists.content(found))
            results.keep(found, in_file=False)
        lists: RecycledRows = results.get()
        return lists

    def _of(self, scorer: Scorer, name: str) -> _Result:
        model = scorer.model
        sharded = is_sharded(model)
        key = f"{model.dtype}, {model.device}" if sharded else of_results(model)
        folder = None if sharded or unknowable_code(model) is not None else self._folder()
        file = None if folder is None else folder / f"{key}.json"
        name = ", ".join((name, type(scorer).__name__, *([] if scorer.kv_dtype is None else [str(scorer.kv_dtype)])))
        return _Result(self._results.setdefault(model, {}), key, name, file)


class _Result:
    def __init__(self, results: dict[tuple[str, str], Any], key: str, name: str, file: Path | None) -> None:
        self._results, self._key, self._name, self._file = results, key, name, file

    @property
    def in_process(self) -> bool:
        return (self._key, self._name) in self._results

    def get(self) -> Any:
        if self.in_process:
            return self._results[self._key, self._name]
        return None if self._file is None else _read(self._file).get(self._name)

    def keep(self, value: Any, in_file: bool = True) -> None:
        self._results[self._key, self._name] = value
        if self._file is not None and in_file:
            with suppress(OSError):
                _write(self._file, _read(self._file) | {self._name: value})

    def beside(self, suffix: str) -> Path | None:
        return None if self._file is None else self._file.with_suffix(suffix)

    def described(self, reason: str | None) -> str:
        kept = f"measured earlier on this machine ({self._file})"
        return kept if reason is None else f"{reason}; {kept}"


def _disturbed(curve: CostCurve, scorer: Scorer) -> bool:
    """Return whether a pass of any size is much faster now than when the curve was measured."""
    if curve.unit is None:
        return True
    now = seconds_of_passes(scorer, curve.sizes)
    return any(seconds < FASTER * cost * curve.unit for seconds, cost in zip(now, curve.costs, strict=True))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: Path, results: dict[str, Any]) -> None:
    _replace(file, json.dumps(results, indent=1).encode())
    for old in sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-KEPT_MODELS]:
        old.unlink(missing_ok=True)
        old.with_suffix(LISTS_SUFFIX).unlink(missing_ok=True)


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(".tmp", ".", file.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


_startup = StartupCache()


@dataclass(frozen=True, eq=False)
class Runtime:
    """How an engine measures: by default, results are kept for later engines and processes (``StartupCache``).

    Tests use one with fixed answers, for reproducible drafting. A runtime equals only itself.

    Attributes:
        clock: returns seconds; by default the scorer's own.
        exactness: determines whether drafts can change a model's bits; called with the scorer, its position limit, and
            whether keys and values may be off the device.
        self_test: tests whether a scorer's logits are the model's own; called with the scorer and the test.
        waits_for_code: whether the first request waits for compiled code. Else early ones run without drafts.
        static_lists: likely successors of single tokens, for drafts from the trie.
    """

    clock: Callable[[], float] | None = None
    costs: Callable[[Scorer], CostCurve] = _startup.costs
    exactness: Callable[[Scorer, int | None, bool], Exactness] = _startup.exactness
    self_test: SelfTest = _startup.self_test
    waits_for_code: bool = True
    static_lists: Callable[[Scorer], RecycledRows] = _startup.static_lists


_defaults = [Runtime()]


def default_runtime() -> Runtime:
    """Return the default runtime of engines."""
    return _defaults[-1]


def without_folder(runtime: Runtime) -> Runtime:
    """Return this runtime, but with losslessness checked in this process."""
    cache = StartupCache(lambda: None)
    return replace(runtime, exactness=cache.exactness, self_test=cache.self_test)


@contextmanager
def runtime_as_default(runtime: Runtime) -> Iterator[None]:
    """Make this the default runtime in this context, in all threads."""
    _defaults.append(runtime)
    try:
        yield
    finally:
        _defaults.remove(runtime)
