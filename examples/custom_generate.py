"""Keep your own ``model.generate`` call and add one argument: python examples/custom_generate.py

It prints:

    It was a dark and stormy night.

    "I have not seen," said the old man. "I have not seen," said the old man. "I have not seen,"
    same ids as transformers: True
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.reference import bundled

path = bundled("target")
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("It was a dark and stormy night", return_tensors="pt")

plain = model.generate(**inputs, max_new_tokens=30, do_sample=False)
faster = model.generate(**inputs, max_new_tokens=30, do_sample=False, custom_generate=forerun.custom_generate)
print(tokenizer.decode(faster[0], skip_special_tokens=True))
print("same ids as transformers:", bool((plain == faster).all()))
