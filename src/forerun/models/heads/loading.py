"""From a name to a head: a folder's configuration says of which kind it is."""

from __future__ import annotations

from pathlib import Path

from forerun.core.long_context import MTP
from forerun.models.heads.dflash import DFlashHead, is_dflash
from forerun.models.heads.eagle3 import Eagle3Head, is_eagle3
from forerun.models.heads.gemma4_assistant import Gemma4AssistantHead, is_gemma4_assistant
from forerun.models.heads.head import Head, config_of
from forerun.models.heads.mtp import MtpHead


def load_head(folder: str | Path) -> Head:
    """The head in a folder, or ``MTP``. Its weights are read once it is bound to a target.

    Raises:
        ValueError: if the folder holds none, or one of a kind that is not known.
    """
    if folder == MTP:
        return MtpHead()
    config = config_of(Path(folder))
    if is_dflash(config):
        return DFlashHead(folder)
    if is_eagle3(config):
        return Eagle3Head(folder)
    if is_gemma4_assistant(config):
        return Gemma4AssistantHead(folder)
    raise ValueError(
        f"{folder} holds no head that is known: by its config.json neither EAGLE-3, nor DFlash, nor a Gemma 4 assistant"
    )


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds a head that is known, by its configuration."""
    try:
        config = config_of(Path(folder))
    except ValueError:
        return False
    return is_dflash(config) or is_eagle3(config) or is_gemma4_assistant(config)
