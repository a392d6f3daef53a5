"""A tiny tokenizer and models for it: with a chat template, or saved in a folder as users have them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

WORDS = ["again and again and again", "the quick brown fox"]


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


def save_model(folder: Path) -> Path:
    """A tiny random decoder in bfloat16, whose texts never end by themselves, with its tokenizer."""
    tokenizer = small_tokenizer()
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **shape, **ends)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **shape, **ends)
    return LlamaForCausalLM(config).double().eval()
