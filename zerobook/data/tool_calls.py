"""Arguments of tool calls: an object or JSON text, about which chat templates differ."""

import json
from typing import Any

Message = dict[str, Any]


def with_text_contents(messages: list[Message]) -> list[Message]:
    """Return the chat with an empty text in place of every content that is null."""
    return [message | {"content": message["content"] or ""} for message in messages]


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return the chat with the arguments of every call as JSON text, which some templates join to other text."""
    changed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = call["function"]
                # The model is to write the characters of other alphabets themselves, and not as escapes.
                text = json.dumps(function["arguments"], ensure_ascii=False)
                calls.append(call | {"function": function | {"arguments": text}})
            message = message | {"tool_calls": calls}
        changed.append(message)
    return changed


def has_python_arguments(text: str, messages: list[Message], other_text: str = "") -> bool:
    """Return whether a rendered chat has arguments as Python writes a dictionary, with ``'`` where JSON has ``"``.

    Such a template expects the arguments to be text, and writes out whatever they are.

    Args:
        other_text: the chat with arguments as JSON text. What it has too, such as a content that quotes Python, does not count.
    """
    for message in messages:
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            python_text = str(arguments)
            # Some arguments, such as empty ones, are written in the same way by Python and as JSON.
            if python_text == json.dumps(arguments, ensure_ascii=False):
                continue
            if text.count(python_text) > other_text.count(python_text):
                return True
    return False
