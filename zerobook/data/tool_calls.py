"""Calls of tools in a chat, in the forms that chat templates differ about: arguments, and which result answers which call."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]


def has_calls(messages: list[Message]) -> bool:
    """Return whether any turn calls a tool."""
    return any("tool_calls" in message for message in messages)


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return the chat with the arguments of every call as JSON text. Some templates join them to other text."""
    changed = []
    for message in messages:
        if "tool_calls" in message:
            message = message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        changed.append(message)
    return changed


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": text}}


def has_python_arguments(text: str, messages: list[Message]) -> bool:
    """Return whether a rendered chat has arguments as Python writes a dictionary, with ``'`` where JSON has ``"``.

    A template does so that writes out the arguments and expects them to be text.
    """
    contents = [message["content"] for message in messages]
    for message in messages:
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            python = str(arguments)
            if python == json.dumps(arguments, ensure_ascii=False):
                continue
            # A content may have the same text.
            if text.count(python) > sum(content.count(python) for content in contents):
                return True
    return False


def in_order_of_calls(messages: list[Message]) -> list[Message]:
    """Return the chat with the identifiers of results moved into the order of the calls; the contents stay.

    Where the results already stand in that order, this is the same chat.
    """
    changed = list(messages)
    calls: list[dict[str, Any]] = []
    answered = 0
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            calls = message.get("tool_calls", [])
            answered = 0
            continue
        # A result of no known call stays as it is.
        is_known = any(call.get("id") == message.get("tool_call_id") for call in calls if "id" in call)
        if is_known and answered < len(calls):
            changed[index] = _as_answer_to(message, calls[answered])
        answered += 1
    return changed


def _as_answer_to(message: Message, call: dict[str, Any]) -> Message:
    identifiers = {"tool_call_id": call.get("id")}
    if "name" in message:
        identifiers["name"] = call["function"]["name"]
    return message | identifiers
