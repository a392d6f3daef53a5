"""Writes a model as a folder for transformers: bfloat16 weights, both configurations, the tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.training import checkpoint


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Replace `folder` by the model and its tokenizer, in one step."""
    eos = int(tokenizer.eos_token_id)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=eos, pad_token_id=eos, do_sample=False)

    def write(new: Path) -> None:
        half.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in new.iterdir():
            path.chmod(0o644)

    checkpoint.replace(folder, write)
