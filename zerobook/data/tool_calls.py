"""Arguments of tool calls: an object or JSON text, about which chat templates differ."""

import json
from typing import Any

Message = dict[str, Any]


def with_text_contents(messages: list[Message]) -> list[Message]:
    """Return the chat with an empty text in place of every content that is null."""
    return [message | {"content": message["content"] or ""} for message in messages]


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return the chat with the arguments of every call as JSON text. Some templates join them to other text."""
    changed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = call["function"]
                # Other alphabets stay readable, as the model is to write them.
                text = json.dumps(function["arguments"], ensure_ascii=False)
                calls.append(call | {"function": function | {"arguments": text}})
            message = message | {"tool_calls": calls}
        changed.append(message)
    return changed


def has_python_arguments(text: str, messages: list[Message]) -> bool:
    """Return whether a rendered chat has arguments as Python writes a dictionary, with ``'`` where JSON has ``"``.

    A template does so that writes out the arguments and expects them to be text.
    """
    contents = [message["content"] or "" for message in messages]
    for message in messages:
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            python = str(arguments)
            # Empty arguments look the same in both, and tell nothing.
            if python == json.dumps(arguments, ensure_ascii=False):
                continue
            # A content may have the same text.
            if text.count(python) > sum(content.count(python) for content in contents):
                return True
    return False
