"""Texts that follow a JSON schema: the tokens that may come next, by llguidance.

A matcher is walked to the ids that it is asked about, and back: what it says depends on them alone. So one matcher
serves a row, its drafts, the branches of its trees, and its forks.

JSON is written on one line, with a space behind commas and colons, as ``json.dumps`` writes it. Then all that stands
between two values is certain, and costs no pass of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun.core.constraint import Constraint
from forerun.core.tree import IntArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

ResponseFormat = Mapping[str, Any]
"""As OpenAI has it: ``{"type": "text"}``, ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema":
{"name": ..., "schema": {...}}}``."""
TYPES = ("text", "json_object", "json_schema")
WRITING: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written, in llguidance's words."""
KEPT = 64
"""Grammars that are kept, those used last: an application has a handful of schemas, and each takes kilobytes."""
REMAINDERS = 50_000
"""Of all divisors in a schema together, at most. A state is compiled for each: 50,000 took up to 1.3 seconds, and
9,999,991 more than a minute."""
LONGEST = 1 << 16
"""Characters of a schema, at most. One of 5,000 optional properties, in twice as many, took 3.7 seconds to compile."""


class SchemaError(ValueError):
    """A response format that cannot be met: it has a wrong shape, or its schema has."""


class GrammarError(RuntimeError):
    """A text cannot go on by its grammar."""


@dataclass(frozen=True)
class Grammar:
    """A compiled schema.

    Attributes:
        matcher: at the beginning of a text; it is copied, never walked.
    """

    matcher: LLMatcher

    def follow(self, start: int) -> Constraint:
        """A constraint for one row, whose text begins at its id number ``start``."""
        return _Walker(self.matcher, start)


class Grammars:
    """Compiles response formats for one tokenizer.

    Threads may share it. What llguidance needs of the tokenizer is made at first use; that took 0.8 seconds for 49,152
    tokens, and half a second of it no other thread of Python ran. So a server makes it before it serves (``prepare``).

    Args:
        tokenizer: a fast one.
        vocabulary: tokens that the model gives logits for.
        ends: tokens that end a text, beside the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, ends: Sequence[int]) -> None:
        self.tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._known: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._made: LLTokenizer | None = None
        self._making, self._keeping = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        """Grammars that are kept."""
        return len(self._known)

    def of(self, response_format: ResponseFormat, namespace: str = "default") -> Grammar | None:
        """The grammar of a response format; None for plain text.

        Args:
            response_format: see ``ResponseFormat``.
            namespace: whose it is. Nobody else can tell from the time it takes that it was compiled before.

        Raises:
            SchemaError: for another shape, or a schema that is wrong, cannot be met, or asks for what llguidance lacks.
            ValueError: for a tokenizer that llguidance cannot use.
            ModuleNotFoundError: if llguidance is not installed.
        """
        schema = _schema(response_format)
        if schema is None:
            return None
        key = (namespace, schema)
        with self._keeping:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        grammar = Grammar(_compile(self.prepare(), schema))
        with self._keeping:
            self._known[key] = grammar
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return grammar

    def prepare(self) -> LLTokenizer:
        """What llguidance needs of the tokenizer.

        Raises:
            ValueError, ModuleNotFoundError: see ``of``.
        """
        with self._making:
            if self._made is None:
                self._made = _of_tokenizer(self.tokenizer, self._vocabulary, self._ends)
            return self._made


class _Walker:
    """Where a matcher stands, and how it gets elsewhere.

    llguidance's matcher never leaves a state of error; then a new one takes its place, so that an error on trial is
    none of the text's.
    """

    def __init__(self, matcher: LLMatcher, start: int) -> None:
        self._origin, self._start = matcher, start
        self._begin()

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See ``Constraint.mask``."""
        self._go(ids)
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        rest = torch.from_numpy(allowed[: len(scores)]) == 0
        return scores.masked_fill(rest.to(scores.device), -torch.inf)

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        """See ``Constraint.forced``."""
        try:
            self._go(ids)
        except GrammarError:
            return []
        return self._matcher.compute_ff_tokens()[:most]

    def complete(self, ids: torch.Tensor) -> bool:
        """See ``Constraint.complete``."""
        self._go(ids)
        return self._matcher.is_stopped()

    def on_trial(self) -> Constraint:
        """See ``Constraint.on_trial``."""
        return _OnTrial(self)

    def _begin(self) -> None:
        self._matcher = self._origin.deep_copy()
        self._walked: IntArray = np.empty(0, np.int64)

    def _go(self, ids: torch.Tensor) -> None:
        """Take the matcher to where a text ends."""
        if self._matcher.is_error():
            self._begin()
        text = ids[self._start :].numpy()
        common = min(len(text), len(self._walked))
        unlike = np.flatnonzero(text[:common] != self._walked[:common])
        common = int(unlike[0]) if len(unlike) else common
        if common < len(self._walked):
            self._matcher.rollback(len(self._walked) - common)
        new = text[common:].tolist()
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._walked = text[: common + taken].copy()
        self._check()
        if taken < len(new):
            raise GrammarError(f"token {new[taken]} may not follow by the grammar; a logits processor chose it")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


@dataclass(frozen=True)
class _OnTrial:
    """A walker for drafts: where it fails, all may come."""

    walker: _Walker

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        try:
            return self.walker.mask(ids, scores)
        except GrammarError:
            return scores.clone()

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        return self.walker.forced(ids, most)

    def complete(self, ids: torch.Tensor) -> bool:
        try:
            return self.walker.complete(ids)
        except GrammarError:
            return False

    def on_trial(self) -> Constraint:
        return self


def _schema(response_format: Any) -> str | None:
    """The schema as JSON; its properties keep their order. None for plain text."""
    if not isinstance(response_format, Mapping) or response_format.get("type") not in TYPES:
        kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
        raise SchemaError(f"response_format has the type {kind!r}; allowed are {', '.join(TYPES)}")
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return '{"type": "object"}'
    told = response_format.get("json_schema")
    if not isinstance(told, Mapping) or not isinstance(told.get("schema"), Mapping):
        raise SchemaError('response_format needs {"json_schema": {"schema": {...}}}')
    try:
        schema = json.dumps(told["schema"], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from None
    if len(schema) > LONGEST:
        raise SchemaError(f"the schema has {len(schema):,} characters; {LONGEST:,} are the most")
    remainders = sum(map(_remainders, _divisors(told["schema"])))
    if remainders > REMAINDERS:
        raise SchemaError(f"multipleOf has {remainders:,} remainders in all; {REMAINDERS:,} are the most")
    return schema


def _divisors(schema: Any) -> Iterator[Any]:
    """Each value of ``multipleOf`` in a schema."""
    if isinstance(schema, Mapping):
        yield from (value for key, value in schema.items() if key == "multipleOf")
    if isinstance(schema, Mapping | list):
        for inner in schema.values() if isinstance(schema, Mapping) else schema:
            yield from _divisors(inner)


def _remainders(divisor: Any) -> int:
    """How many there are, in units of its last decimal; 0 for what is no number, which llguidance refuses."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 0
    exact = Decimal(str(divisor)).normalize()
    exponent = exact.as_tuple().exponent
    return int(abs(exact.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else exact))


def _compile(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """A matcher that has worked out what may come first, so that no step waits for that."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema, overrides=WRITING), log_level=0)
    except ValueError as error:
        raise SchemaError(f"the schema cannot be used: {error}") from None
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        told = _first_line(matcher.get_error())
        told = "no text fits it" if told.startswith("NoExtension") else told
        raise SchemaError(f"the schema cannot be used: {told}")
    return matcher


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, ends: Sequence[int]) -> LLTokenizer:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = "none" if tokenizer is None else type(tokenizer).__name__
        raise ValueError(f"response_format needs a fast tokenizer, which the tokenizers library runs; there is {kind}")
    try:
        import llguidance.hf
    except ModuleNotFoundError:
        told = "response_format needs llguidance; install it by: pip install 'forerun[grammar]'"
        raise ModuleNotFoundError(told, name="llguidance") from None
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    every = list(dict.fromkeys([*ends, *own]))
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=every or None)
    except Exception as error:  # it may raise anything
        raise ValueError(f"response_format cannot use this tokenizer: {_first_line(str(error))}") from error


def _first_line(message: str) -> str:
    """What is wrong; the lines below it describe the matcher."""
    return message.split("\n", 1)[0]
