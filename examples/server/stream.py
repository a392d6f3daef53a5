"""A text as it is written, drafted tokens in green: forerun serve, then python examples/server/stream.py"""

import os

from openai import OpenAI

GREEN, PLAIN = "\033[32m", "\033[0m"
client = OpenAI(base_url=os.environ.get("FORERUN_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id

prompt = "class Shelf:\n    def add(self, book):\n        self.books.append(book)\n\n    def remove(self, book):\n"
steps = tokens = 0
stream = client.completions.create(
    model=model, prompt=prompt, max_tokens=80, temperature=0, stream=True, extra_body={"forerun": {"trace": True}}
)
for chunk in stream:
    step = chunk.model_extra.get("forerun")
    if step is None:  # the end of the text
        print(chunk.choices[0].text, end="")
        continue
    steps, tokens = steps + 1, tokens + len(step["tokens"])
    for token in step["tokens"]:
        colour = PLAIN if token["source"] == "target" else GREEN
        print(colour + token["text"] + PLAIN, end="", flush=True)
print(f"\n[{tokens} tokens in {steps} steps]")
