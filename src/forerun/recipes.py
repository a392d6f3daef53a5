"""From a name, as the command line takes it, to a freshly built drafter."""

from __future__ import annotations

from collections.abc import Callable

from forerun.drafters.base import Drafter, NoDrafter
from forerun.drafters.jacobi import JacobiDrafter
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.trie import TrieDrafter
from forerun.trie import TrieConfig

RECIPES: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "lookup": LookupDrafter,
    "jacobi": JacobiDrafter,
    "trie": TrieDrafter,
    "trie-hierarchical": lambda: TrieDrafter(TrieConfig(form="hierarchical")),
    "trie-single": lambda: TrieDrafter(TrieConfig(form="single")),
    "trie-parallel": lambda: TrieDrafter(TrieConfig(form="parallel")),
}
"""``trie`` merges all it knows by probability; the others are the Lookahead paper's forms; ``none`` drafts nothing."""


def build_drafter(name: str) -> Drafter:
    """A drafter of this name.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if name not in RECIPES:
        raise ValueError(f"drafter is {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]()
