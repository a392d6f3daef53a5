"""Generate with the bundled model, and see what the trie drafted: python examples/generate.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.reference import bundled

path = bundled("target")
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(path)

engine = forerun.Engine(model, "trie", tokenizer=tokenizer)
prompt = "Table:\nroom,author,price\n153,Jonas Skeiduck,207\n85,Paula Braflob,391\n\nWrite the table as JSON.\nAnswer:"
result = engine.generate(prompt, max_new_tokens=60)
print(result.text)
print(f"{result.stats[0].tokens_per_step:.2f} tokens per step, {result.stats[0].acceptance:.0%} of drafts accepted")
