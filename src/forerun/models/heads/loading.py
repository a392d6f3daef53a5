"""Load a head, of the kind that its folder's configuration states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.core.long_context import MTP
from forerun.models.heads.dflash import DFlashHead, is_dflash
from forerun.models.heads.dflash2 import DFlash2Head, is_dflash2
from forerun.models.heads.dspark import DSparkHead, is_dspark
from forerun.models.heads.eagle3 import Eagle3Head, is_eagle3
from forerun.models.heads.entries import config_of
from forerun.models.heads.gemma4_assistant import Gemma4AssistantHead, is_gemma4_assistant
from forerun.models.heads.head import Head
from forerun.models.heads.mtp import MtpHead
from forerun.models.heads.peagle import PEagleHead, is_peagle

HEAD_KINDS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[str | Path], Head]], ...] = (
    (is_dflash2, DFlash2Head), (is_dspark, DSparkHead), (is_dflash, DFlashHead), (is_peagle, PEagleHead),
    (is_eagle3, Eagle3Head), (is_gemma4_assistant, Gemma4AssistantHead),
)  # fmt: skip
"""How each kind is recognised, specialised kinds before those that they extend."""


def load_head(folder: str | Path) -> Head:
    """Return the head in a folder, or ``MTP``, without its weights; raise ValueError for an unsupported kind."""
    if folder == MTP:
        return MtpHead()
    kind = _kind(config_of(Path(folder)))
    if kind is None:
        raise ValueError(
            f"{folder} has no supported head, by its config.json; supported are EAGLE-3, P-EAGLE, DFlash, DFlash2, "
            "DSpark, and Gemma 4 assistants"
        )
    return kind(folder)


def is_head(folder: str | Path) -> bool:
    """Return whether a folder has a head of a supported kind."""
    try:
        config = config_of(Path(folder))
    except ValueError:
        return False
    return _kind(config) is not None


def _kind(config: Mapping[str, Any]) -> Callable[[str | Path], Head] | None:
    return next((kind for fits, kind in HEAD_KINDS if fits(config)), None)
