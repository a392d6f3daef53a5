"""Generate with the bundled model, and see what the trie drafted: python examples/generate.py

It prints:

    [
     {"room": 153, "author": "Jonas Skeiduck", "price": 207},
     {"room": 85, "author": "Paula Braflob", "price": 391}
    ]
    4.43 tokens per step, 5% of drafts accepted
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.reference import bundled

path = bundled("target")
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(path)

# Whole drafts are scored here, whatever a pass costs, so that the count is the same on every machine.
engine = forerun.Engine(model, "trie", tokenizer=tokenizer, prune_drafts=False)
prompt = "Table:\nroom,author,price\n153,Jonas Skeiduck,207\n85,Paula Braflob,391\n\nWrite the table as JSON.\nAnswer:"
result = engine.generate(prompt, max_new_tokens=80)
print(result.text.strip())
print(f"{result.stats[0].tokens_per_step:.2f} tokens per step, {result.stats[0].acceptance:.0%} of drafts accepted")
