"""A conversation with a served chat model: forerun serve --model FOLDER, then python examples/server/chat.py"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("FORERUN_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "system", "content": "Answer in one sentence."}]
for question in ("What is a trie?", "What is it good for?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, temperature=0)
    said = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": said})
    print(f"> {question}\n{said}")
    print(f"[{answer.usage.forerun['mean_acceptance_length']:.2f} tokens per step]\n")
