"""Several clients at once, each with the text that it would get alone.

forerun serve, then python examples/server/clients.py
"""

import asyncio
import os

from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=os.environ.get("FORERUN_URL", "http://127.0.0.1:8000/v1"), api_key="none")
PROMPTS = ["def add(a, b):", "Once upon a time", "The sun", "2 + 2 =", '{"name": "', "She said"]


async def ask(model: str, prompt: str) -> str:
    """A client's text; its seed names it."""
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0.8, seed=1)
    return answer.choices[0].text


async def main() -> None:
    """All at once, and then one after the other."""
    async with client:
        model = (await client.models.list()).data[0].id
        together = await asyncio.gather(*(ask(model, prompt) for prompt in PROMPTS))
        alone = [await ask(model, prompt) for prompt in PROMPTS]
        for prompt, text in zip(PROMPTS, together, strict=True):
            print(f"{prompt!r}: {text!r}")
        print("the same texts together and alone:", together == alone)


asyncio.run(main())
