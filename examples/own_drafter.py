"""A drafter of your own, in ten lines: it can change the speed, never the text. python examples/own_drafter.py

It prints:

    1.00 tokens per step
    3.08 tokens per step
    same text: True
"""

from collections.abc import Sequence

from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.reference import bundled


class Echo(forerun.Source):
    """Guesses that the last eight tokens come again."""

    def propose(self, rows: Sequence[forerun.Row], limits: Sequence[forerun.Limit]) -> list[forerun.DraftTree]:
        """The last tokens of each row as a chain."""
        both = zip(rows, limits, strict=True)
        return [forerun.DraftTree.chain(row.request.tokens[-8:][: limit.nodes]) for row, limit in both]


path = bundled("target")
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(path)

texts = []
for drafter in ("none", Echo()):
    # Whole drafts are scored here, whatever a pass costs, so that the count is the same on every machine.
    engine = forerun.Engine(model, drafter, tokenizer=tokenizer, prune_drafts=False)
    result = engine.generate("one two three one two three one two", max_new_tokens=40)
    texts.append(result.text)
    print(f"{result.stats[0].tokens_per_step:.2f} tokens per step")
print("same text:", texts[0] == texts[1])
