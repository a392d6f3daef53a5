"""Chat templates of families of models, shortened, for a model that has none; tools, and schemas of answers."""

from typing import Any

QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{{ tools | tojson }}</tools>\n"
    'Call as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen 2.5's."""
THINKING = QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}{# </think> #}")
"""One that begins each answer with reasoning."""
TOOLS = [
    {"type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city.",
            "parameters": {"type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"]}}},
    {"type": "function",
        "function": {"name": "add",
            "parameters": {"type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
                "required": ["a"]}}},
]  # fmt: skip
"""Tools whose calls are short, whatever a model writes."""


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The ``response_format`` of an answer that follows a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
