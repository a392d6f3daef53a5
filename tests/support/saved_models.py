"""A tiny tokenizer and models for it: with a chat template, or saved in a folder as users have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

WORDS = ["again and again and again", "the quick brown fox"]
ENDLESS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
"""Of a model whose texts end by length."""


def small_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def small_llama(tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> LlamaForCausalLM:
    """A random Llama of two layers for a tokenizer; further entries of its configuration take the place of these."""
    torch.manual_seed(3)
    shape = {"vocab_size": len(tokenizer or small_tokenizer()), "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**shape | config)).eval()


def save_model(folder: Path) -> Path:
    """A small Llama in bfloat16, whose texts never end by themselves, with its tokenizer."""
    return save(small_llama(**ENDLESS).to(torch.bfloat16), folder)


def save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or small_tokenizer()).save_pretrained(folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], Any] = lambda config: None, **entries: Any) -> None:
    """Change a folder's configuration."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config | entries))


def weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], file: str = "model.safetensors") -> None:
    """Change the tensors of a file."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


TEMPLATE = (
    "<start>{% for m in messages %}{% if m['role'] == 'ghost' %}{{ raise_exception('no ghosts') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One that begins every text with ``<start>``, as Llama's do, unless special tokens are left out."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<start>"})
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return small_llama(tokenizer, **ENDLESS | {"eos_token_id": tokenizer.eos_token_id}).double()
