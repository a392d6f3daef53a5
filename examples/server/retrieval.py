"""Answers out of documents, which quote them, so that much of each is drafted from its prompt.

forerun serve, then python examples/server/retrieval.py
"""

import os
import re

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("FORERUN_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id

DOCUMENTS = [
    "The Alder Bridge was designed by Ruth Halden and finished in 1871. The Alder Bridge is 412 metres long.",
    "The Marlow Library was founded on 14 March 1836 by Edith Carrow. It keeps 61250 volumes about maps.",
    "The Silver Heron was commanded by Captain Ivan Brask until 1902. It carried 840 tons of timber from Norhaven.",
    "The Copper Kite Festival is held every Sunday of June in Elmsted. Some 17300 people visit it each year.",
]


def words(text: str) -> set[str]:
    """Its words but for short ones."""
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}


def best(question: str, count: int = 2) -> list[str]:
    """The documents that share the most words with a question."""
    return sorted(DOCUMENTS, key=lambda document: -len(words(document) & words(question)))[:count]


for question in ("What is known about the Marlow Library?", "What is known about the Silver Heron?"):
    found = "\n".join(f"[{number}] {document}" for number, document in enumerate(best(question), start=1))
    prompt = f"Documents:\n{found}\n\nQuestion: {question}\nAnswer:"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=60, temperature=0, stop=["\n\n"])
    drafts = answer.usage.forerun
    print(f"> {question}\n{answer.choices[0].text.strip()}")
    print(f"[{drafts['accepted']} of {answer.usage.completion_tokens} tokens were drafted]\n")
