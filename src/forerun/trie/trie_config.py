"""How the trie keeps texts, and how it drafts from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forerun.trie.arrays import ORDERS

Form = Literal["merged", "hierarchical", "parallel", "single"]


@dataclass(frozen=True)
class TrieConfig:
    """How texts are kept and drafted.

    Attributes:
        capacity: most bytes of a namespace; when it is reached, the oldest outputs give skip.
        namespaces: most namespaces. When there are more, the one used longest ago is dropped, unless a request is live
            in it. Together they take up to ``namespaces * capacity`` bytes: 4 GiB, by default.
        prompt_capacity: most tokens of a prompt that are indexed; of a longer prompt it is the end.
        learning_rate: of the weights in the ``merged`` form; with 0 nothing is learned about evidence.
        form: how a draft is built. ``merged``: best first by estimated probability, from all contexts of both sources.
            The paper's forms go by frequency behind the longest context: ``hierarchical`` merges branches on shared
            prefixes, ``parallel`` has them side by side, and ``single`` is the likeliest branch.
        branch_length: tokens of a branch in the paper's forms, context included (the paper's L_b).
        max_prefix: longest context matched in the paper's forms.
        min_matches: in the paper's forms, the next shorter context is used too while there are fewer nodes (N_m).
        prompt_weight: in the paper's forms, the weight of a count in the request's own text; in the shared one it is 1.
    """

    capacity: int = 1 << 26
    namespaces: int = 64
    prompt_capacity: int = 1 << 20
    learning_rate: float = 0.003
    form: Form = "merged"
    branch_length: int = 12
    max_prefix: int = ORDERS
    min_matches: int = 64
    prompt_weight: float = 2.0

    def __post_init__(self) -> None:
        _demand("capacity", self.capacity, 1 << 16 <= self.capacity <= 1 << 36, "2**16 to 2**36")
        _demand("namespaces", self.namespaces, self.namespaces >= 1, "at least 1")
        _demand("prompt_capacity", self.prompt_capacity, 1 <= self.prompt_capacity <= 1 << 24, "1 to 2**24")
        _demand("learning_rate", self.learning_rate, 0 <= self.learning_rate <= 0.1, "0 to 0.1")
        _demand("form", self.form, self.form in get_args(Form), f"one of {', '.join(get_args(Form))}")
        _demand("branch_length", self.branch_length, 2 <= self.branch_length <= 256, "2 to 256")
        _demand("max_prefix", self.max_prefix, 1 <= self.max_prefix <= ORDERS, f"1 to {ORDERS}")
        _demand("max_prefix", self.max_prefix, self.max_prefix < self.branch_length, "less than branch_length")
        _demand("min_matches", self.min_matches, self.min_matches >= 1, "at least 1")
        _demand("prompt_weight", self.prompt_weight, 0 < self.prompt_weight <= 1e6, "above 0, to 1e6")


def _demand(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
