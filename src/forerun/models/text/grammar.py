"""Constrain outputs to a JSON schema, a regular expression or a grammar: llguidance finds the tokens that may follow.

A matcher is moved to the ids of each query and back, so one serves a row, its drafts, its trees' branches, and its
forks. Where only one text may follow, all its tokens are computed once, and need no mask. JSON is written as by
``json.dumps``, on one line with a space after commas and colons, so what is between two values is certain.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun.core.fairness import eviction, owner_of
from forerun.core.install_command import install_command
from forerun.core.sampling import Constraint
from forerun.core.tree import IntArray
from forerun.models.text.grammar_limits import check_lark, check_regex, checked_schema
from forerun.models.text.prompts import compiled_tokenizer
from forerun.models.text.schemas import SchemaError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

ResponseFormat = Mapping[str, Any]
"""As OpenAI has it: ``{"type": "text"}``, ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema":
{"name": ..., "schema": {...}}}``. Also ``{"type": "regex", "regex": ...}``, and ``{"type": "grammar", "grammar": ...}``
with a grammar in llguidance's form of Lark."""
FORMAT_TYPES = ("text", "json_object", "json_schema", "regex", "grammar")
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""How JSON is written, in llguidance's words; choices may overlap."""
KEPT_GRAMMARS = 64
"""Most recently used grammars that are kept: an application has a handful of schemas of kilobytes each."""
MAX_FORCED_TOKENS = 2_000
MAX_TRIAL_SECONDS = 0.02
"""CPU time for masks of a row's drafts per step. Later drafts of the step are made without masks."""


class GrammarError(RuntimeError):
    """An output cannot continue by its grammar."""


class GrammarSource(NamedTuple):
    """What llguidance compiles: a JSON schema, a regular expression, or a grammar in Lark."""

    kind: Literal["json", "regex", "lark"]
    text: str


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; ``matcher`` is at the start of a text, and copied, never moved."""

    matcher: LLMatcher

    def follow(self, start: int) -> Constraint:
        return _Walker(self.matcher, start)


class Grammars:
    """A compiler of response formats for one fast tokenizer; threads may share it.

    llguidance's tokenizer is made at first use, or by ``prepare``: in 0.8 seconds for 49,152 tokens, half of it with
    the GIL held. ``vocabulary``: number of tokens with logits; ``ends``: end-of-sequence tokens beyond the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, ends: Sequence[int]) -> None:
        self.tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._grammars: OrderedDict[tuple[str, GrammarSource], Grammar] = OrderedDict()
        self._made: LLTokenizer | None = None
        self._making, self._keeping = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return len(self._grammars)

    def of(self, response_format: ResponseFormat, namespace: str = "default") -> Grammar | None:
        """Return a response format's grammar; None for plain text. Timing does not reveal another namespace's grammars.

        Raises:
            SchemaError: for another shape, or a schema that is wrong, cannot be met, or needs what llguidance lacks.
            ValueError: for a tokenizer that llguidance cannot use.
            ModuleNotFoundError: if llguidance is not installed.
        """
        source = grammar_source(response_format)
        if source is None:
            return None
        key = (namespace, source)
        with self._keeping:
            if key in self._grammars:
                self._grammars.move_to_end(key)
                return self._grammars[key]
        grammar = Grammar(_compile(self.prepare(), source))
        with self._keeping:
            self._grammars[key] = grammar
            if len(self._grammars) > KEPT_GRAMMARS:
                del self._grammars[eviction([(each, owner_of(each[0]), 1) for each in self._grammars])]  # type: ignore[arg-type]
        return grammar

    def has(self, source: GrammarSource, namespace: str = "default") -> bool:
        with self._keeping:
            return (namespace, source) in self._grammars

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Return arguments of ``llguidance.LLTokenizer``, for any process; ``prepare`` checks the tokenizer."""
        tokenizer = self.tokenizer
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        backend = compiled_tokenizer(tokenizer)
        assert backend is not None
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ends = list(dict.fromkeys([*self._ends, *own]))
        size = max(self._vocabulary, len(tokenizer))
        return {"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": ends or None}

    def prepare(self) -> LLTokenizer:
        """Make llguidance's tokenizer at the first call; raises as ``of`` does."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> LLTokenizer:
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            kind = "none" if self.tokenizer is None else type(self.tokenizer).__name__
            needed = "a fast tokenizer, which the tokenizers library runs"
            raise ValueError(f"response_format needs {needed}; there is {kind}")
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            told = f"response_format needs llguidance; install it by: {install_command('grammar')}"
            raise ModuleNotFoundError(told, name="llguidance") from None
        try:
            return LLTokenizer(**self.tokenizer_arguments())
        except Exception as error:  # it may raise anything
            raise ValueError(f"response_format cannot use this tokenizer: {_first_line(str(error))}") from error


class _Walker:
    """A matcher that can be moved to any ids. A new one replaces one in an error state, which it never leaves."""

    def __init__(self, matcher: LLMatcher, start: int) -> None:
        self._origin, self._start = matcher, start
        self._run_begin, self._run_is_long = 0, False
        self._run_text: IntArray = np.empty(0, np.int64)
        self.trial_seconds = 0.0
        """CPU time of drafts' masks since the last token."""
        self._begin()

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        run = self._forced_run(ids)
        if not len(run):
            self._go(ids)
            allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check()
            if allowed.sum() == 1:
                run = self._find_run(ids)
            if not len(run):
                rest = torch.from_numpy(allowed[: len(scores)]) == 0
                return scores.masked_fill(rest.to(scores.device), -torch.inf)
        if self._run_is_long:
            raise GrammarError(f"the grammar forces more than {MAX_FORCED_TOKENS:,} tokens in a row")
        masked = torch.full_like(scores, -torch.inf)
        masked[int(run[0])] = scores[int(run[0])]
        return masked

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        run = self._forced_run(ids)
        if not len(run):
            try:
                self._go(ids)
            except GrammarError:
                return []
            run = self._find_run(ids)
        return [int(token) for token in run[:most]]

    def certain(self, ids: torch.Tensor) -> int | None:
        run = self._forced_run(ids)
        return int(run[0]) if len(run) and not self._run_is_long else None

    def complete(self, ids: torch.Tensor) -> bool:
        self.trial_seconds = 0.0
        if len(self._forced_run(ids)):
            return False
        self._go(ids)
        return self._matcher.is_stopped()

    def on_trial(self) -> Constraint:
        return _SpeculativeGrammar(self)

    def _begin(self) -> None:
        self._matcher = self._origin.deep_copy()
        self._walked: IntArray = np.empty(0, np.int64)

    def _find_run(self, ids: torch.Tensor) -> IntArray:
        run = np.array(self._matcher.compute_ff_tokens(), np.int64)
        if len(run):
            text = ids[self._start :].numpy()
            self._run_begin, self._run_text = len(text), np.concatenate([text, run])
            self._run_is_long = len(run) > MAX_FORCED_TOKENS
        return run

    def _forced_run(self, ids: torch.Tensor) -> IntArray:
        """Return the rest of the kept run if ``ids`` end inside it, else nothing."""
        length = len(ids) - self._start
        inside = self._run_begin <= length < len(self._run_text)
        if not inside or not np.array_equal(ids[self._start :].numpy(), self._run_text[:length]):
            return self._run_text[:0]
        return self._run_text[length:]

    def _go(self, ids: torch.Tensor) -> None:
        if self._matcher.is_error():
            self._begin()
        text = ids[self._start :].numpy()
        common = min(len(text), len(self._walked))
        unlike = np.flatnonzero(text[:common] != self._walked[:common])
        common = int(unlike[0]) if len(unlike) else common
        if common < len(self._walked):
            self._matcher.rollback(len(self._walked) - common)
        new = text[common:].tolist()
        count = self._matcher.try_consume_tokens(new) if new else 0
        self._walked = text[: common + count].copy()
        self._check()
        if count < len(new):
            raise GrammarError(f"the grammar does not allow token {new[count]}, which a logits processor chose")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


@dataclass(frozen=True)
class _SpeculativeGrammar:
    """A walker for drafts: if it fails or exceeds its time, all tokens are allowed."""

    walker: _Walker

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.walker.trial_seconds > MAX_TRIAL_SECONDS:
            return scores.clone()
        began = time.thread_time()
        try:
            return self.walker.mask(ids, scores)
        except GrammarError:
            return scores.clone()
        finally:
            self.walker.trial_seconds += time.thread_time() - began

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        return self.walker.forced(ids, most)

    def certain(self, ids: torch.Tensor) -> int | None:
        return self.walker.certain(ids)

    def complete(self, ids: torch.Tensor) -> bool:
        try:
            return self.walker.complete(ids)
        except GrammarError:
            return False

    def on_trial(self) -> Constraint:
        return self


def grammar_source(response_format: Any) -> GrammarSource | None:
    """Return what llguidance compiles, with properties in order; None for plain text. Raise SchemaError."""
    if not isinstance(response_format, Mapping) or response_format.get("type") not in FORMAT_TYPES:
        kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
        raise SchemaError(f"response_format has the type {kind!r}; allowed are {', '.join(FORMAT_TYPES)}")
    kind = response_format["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSource("json", '{"type": "object"}')
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
            raise SchemaError('response_format needs {"json_schema": {"schema": {...}}}')
        return GrammarSource("json", checked_schema(named["schema"]))
    text = response_format.get(kind)
    if not isinstance(text, str) or not text:
        raise SchemaError(f'response_format needs {{"type": "{kind}", "{kind}": "..."}}')
    if kind == "regex":
        check_regex(text)
        return GrammarSource("regex", text)
    check_lark(text)
    return GrammarSource("lark", text)


def _compile(tokenizer: LLTokenizer, source: GrammarSource) -> LLMatcher:
    from llguidance import LLMatcher

    what = {"json": "schema", "regex": "regex", "lark": "grammar"}[source.kind]
    try:
        if source.kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(source.text, overrides=JSON_STYLE)
        else:
            make = LLMatcher.grammar_from_regex if source.kind == "regex" else LLMatcher.grammar_from_lark
            grammar = make(source.text)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
    except ValueError as error:
        raise SchemaError(f"the {what} cannot be used: {_reason(str(error))}") from None
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        reason = "no text fits it" if reason.startswith("NoExtension") else reason
        raise SchemaError(f"the {what} cannot be used: {reason}")
    return matcher


def _reason(message: str) -> str:
    """Return the cause on one line; for a regular expression it is on a later line."""
    first, *more = message.strip().splitlines()
    if not first.endswith(":"):
        return first
    last = next((line for line in reversed(more) if line.strip().startswith("error:")), "")
    return f"{first} {last.strip().removeprefix('error:').strip()}".strip()


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0]
