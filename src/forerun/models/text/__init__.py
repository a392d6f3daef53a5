"""Between text and token ids: prompts, chat templates, grammars, logits processors."""
