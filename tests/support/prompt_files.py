"""Files of prompts, and a word tokenizer with a chat template for them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from support.tiny import VOCABULARY

TEMPLATE = "{{ bos_token }}{% for m in messages %}{% if m.role == 'owl' %}{{ raise_exception('no owls') }}{% endif %}"
TEMPLATE += "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
WORDS = ["<unk>", "<s>", "user", "assistant", "system", "</s>", *"abcdefghij"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(len(WORDS), VOCABULARY))])}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


def written(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file
