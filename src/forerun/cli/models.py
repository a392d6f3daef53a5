"""The target of a command, and the small model if a drafter needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.cli.memory_options import MemoryOptions
from forerun.cli.options import LongOptions
from forerun.core.long_context import LongContextConfig
from forerun.drafting.recipes import RECIPES, Recipe
from forerun.kv.kv_tiers import KVMemory
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load_draft


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """A function from a text of any length to its token ids, without special tokens."""

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    return encode


def memory_of(options: MemoryOptions) -> KVMemory | None:
    """How much keys and values may take, if that is given."""
    sizes = options.sizes()
    if "kv_memory" not in sizes:
        return None
    return KVMemory(sizes["kv_memory"], sizes.get("kv_host_memory"), options.kv_folder, sizes.get("simulate_bandwidth"))


def settings(
    options: LongOptions,
    model: str,
    drafters: Sequence[str],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
    recipes: Mapping[str, Recipe] = RECIPES,
) -> LongContextConfig:
    """Settings for the named drafters. The small model is loaded if one of them needs it, or if it was named.

    Args:
        model: the target's name; the bundled target has its own small model.
        recipes: by name.
    """
    name = options.draft_model or (BUNDLED_DRAFT if model == BUNDLED else None)
    needed = options.draft_model is not None or any(
        recipes[drafter].small for drafter in drafters if drafter in recipes
    )
    if name is None or not needed:
        return options.settings()
    return options.settings(load_draft(name, target, tokenizer, trust_remote_code=trust_remote_code))
