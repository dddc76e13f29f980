"""Turns, tool calls and tools of published chats, in the form that chat templates read."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from zerobook.data.samples import BadSample, Chat
from zerobook.data.values import is_empty, kind_of, listed, read_json, read_text

# Names of roles in published chats -> the names that chat templates know.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
# Keys of a turn that hold the model's thoughts, by the names that chat templates read.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# An older key for one call of a tool, and the role of a ShareGPT turn that is one.
CALL = "function_call"
# Keys of a tool turn that say which call it answers.
IDENTIFIERS = ("tool_call_id", "name")
# Keys of a turn that are true or 1 where it is supervised, by the names that other trainers read.
SUPERVISED_MARKS = (
    "loss",
    "loss_mask",
    "loss_scale",
    "loss_weight",
    "step_loss_mask",
    "train",
    "trainable",
    "training",
    "weight",
)
# Keys of a turn that are true or 1 where it is masked, which means that it is not supervised.
MASKED_MARKS = ("mask", "masked")
# Keys of a turn that mark parts of it as supervised. Such turns are refused.
PARTIAL_MARKS = ("train_detail", "training_detail")
_ANSWER_KEYS = ("tool_calls", CALL, *THOUGHTS)
_MARKS = (*SUPERVISED_MARKS, *MASKED_MARKS, *PARTIAL_MARKS)
_MAY_FOLLOW = {  # role -> roles that may come before it; None is the start of the chat
    "system": (None,),
    "user": (None, "system", "assistant", "tool"),
    "assistant": (None, "system", "user", "tool"),
    "tool": ("assistant", "tool"),
}
_TRUE = ("1", "1.0", "true", "yes")
_FALSE = ("0", "0.0", "false", "no")


def read_chat(turns: object, column: str) -> Chat:
    """Return a list of turns, ``role`` and ``content`` or ``from`` and ``value``, as a chat.

    Args:
        turns: the list, or its JSON text.
        column: the column that holds the turns; errors name it.

    Raises:
        BadSample: a turn is not of that form, two turns in succession are the user's or the assistant's, or no turn is the
            assistant's.
    """
    return checked_chat(*read_turns(turns, column))


def read_turns(turns: object, column: str) -> tuple[list[dict[str, Any]], set[int]]:
    """Return (the turns; indices of assistant turns that are marked as not to be learnt)."""
    if isinstance(turns, str):
        # Tables cannot hold lists, so chats are written there as JSON.
        try:
            turns = read_json(turns, "its text")
        except BadSample as error:
            raise BadSample(f"{column} is a string, expected a list of turns, or the JSON text of one: {error}") from None
    if not isinstance(turns, list):
        raise BadSample(f"{column} is {kind_of(turns)}, expected a list of turns")
    messages: list[dict[str, Any]] = []
    unsupervised = set()
    for number, turn in enumerate(turns, 1):
        message, is_supervised = _read_turn(turn, f"turn {number} of {column}")
        # An empty system turn is not a system turn.
        if message["role"] == "system" and not message["content"].strip():
            continue
        if not is_supervised:
            unsupervised.add(len(messages))
        messages.append(message)
    return messages, unsupervised


def decode_turns(value: Any) -> Any:
    """Return the list of turns if a value is the JSON text of one; otherwise the value. Tables have lists as JSON text."""
    with suppress(BadSample):
        turns = read_json(value, "its text")
        # A text that is JSON, but no list of turns, is the literal text of a sample: leave it as it is.
        is_chat = isinstance(turns, list) and all(
            isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns
        )
        if is_chat and turns:
            return turns
    return value


def checked_chat(
    messages: list[dict[str, Any]], unsupervised: Iterable[int] = (), tools: list[dict[str, Any]] | None = None
) -> Chat:
    """Return the turns as a chat. Raises `BadSample` if their order is not that of a chat, or no turn is the assistant's."""
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if before not in _MAY_FOLLOW[role]:
            if role == "system":
                reason = "a chat may have one system turn, as its first"
            elif role == "tool":
                reason = "a tool turn follows an assistant's turn or another tool turn"
            else:
                reason = "user and assistant must alternate"
            position = f"after {before}" if before else "at the start"
            raise BadSample(f"turn {number} is {role} {position}: {reason}")
        before = role
    # Check this last: if the order is wrong too, that is the better reason.
    if not any(message["role"] == "assistant" for message in messages):
        raise BadSample(f"none of the {len(messages)} turns is the assistant's, so there is nothing to learn")
    return Chat(messages, frozenset(unsupervised), tools)


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the JSON schemas in a column ``tools``, a list; None if there are none. JSON text is parsed."""
    if is_empty(value):
        return None
    tools = _read_objects(value, "the column tools")
    for tool in tools:
        if not isinstance(tool, dict):
            raise BadSample(f"tools has {kind_of(tool)} in it, expected a list of objects")
    return tools or None


def unread_keys(turns: object) -> list[str]:
    """Return the keys of turns that are not read and hold something."""
    if isinstance(turns, str):
        with suppress(BadSample):
            turns = read_json(turns, "the turns")
    keys: dict[str, None] = {}  # a set that keeps its order
    if not isinstance(turns, list):
        return []
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        known_keys = _list_known_keys(turn)
        for key, value in turn.items():
            # In a table, each turn has the keys of all turns. Those of other turns are empty.
            if key not in known_keys and not _holds_nothing(value):
                keys[str(key)] = None
    return list(keys)


# Return the keys that are read from a turn. They depend on the turn's role.
def _list_known_keys(turn: Mapping[str, Any]) -> set[str]:
    # The turn is not checked yet, so its role may be of any type.
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    keys = {"role", "content", "from", "value", *_MARKS}
    if role == "assistant":
        keys.update(_ANSWER_KEYS)
    if role == "tool":
        keys.update(IDENTIFIERS)
    return keys


def _holds_nothing(value: object) -> bool:
    return is_empty(value) or value == [] or value == {}


def _read_turn(turn: object, where: str) -> tuple[dict[str, Any], bool]:
    """Return (the turn; False for an assistant turn that is marked as not to be learnt)."""
    if not isinstance(turn, dict):
        raise BadSample(f"{where} is {kind_of(turn)}, expected an object")
    role_key, content_key = _role_and_content(turn, where)
    role_name = turn[role_key]
    content = turn.get(content_key)
    calls = turn.get("tool_calls") or turn.get(CALL)
    calls = [] if is_empty(calls) else _read_objects(calls, f"the tool call of {where}")
    # In ShareGPT, a call is a turn of its own, with the call as JSON text in its value.
    if role_name == CALL:
        role_name = "assistant"
        calls = _read_objects(content, f"the tool call of {where}")
        content = ""
    if not isinstance(role_name, str) or role_name not in ROLES:
        shown = repr(role_name) if isinstance(role_name, str) else kind_of(role_name)
        raise BadSample(f"{where} has the {role_key} {shown}, expected one of {', '.join([*ROLES, CALL])}")
    message: dict[str, Any] = {"role": ROLES[role_name]}
    is_supervised = True
    if message["role"] == "assistant":
        is_supervised = _is_supervised(turn, where)
        if calls:
            message["tool_calls"] = [_read_call(call, where) for call in calls]
        for key in THOUGHTS:
            if turn.get(key):
                message[key] = read_text(turn[key], f"{key} of {where}")
    # Some templates write the name or number of the call before its result.
    if message["role"] == "tool":
        message |= _identifiers(turn, IDENTIFIERS, where)
    if isinstance(content, list):
        content = "".join(_read_part(item, where) for item in content)
    # A tool may print nothing, and an answer may be only a call. The caller leaves out an empty system turn.
    may_be_empty = message["role"] in ("system", "tool") or "tool_calls" in message
    if may_be_empty and is_empty(content):
        # OpenAI writes null if an answer is only a call. For a text, even an empty one, some templates write a further turn.
        message["content"] = None if "tool_calls" in message else ""
    else:
        message["content"] = read_text(content, f"the {content_key} of {where}", blank=may_be_empty)
    return message, is_supervised


def _role_and_content(turn: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the keys of the turn's role and content. Published chats use either pair of keys under either column."""
    has_call = bool(turn.get("tool_calls") or turn.get(CALL))
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if role_key in turn and (content_key in turn or has_call):
            return role_key, content_key
    raise BadSample(f"{where} has {listed(turn)}, expected role and content (or from and value)")


def _is_supervised(turn: Mapping[str, Any], where: str) -> bool:
    """Return whether an assistant turn is supervised: by its marks, which are those of other trainers; without marks, True."""
    for key in PARTIAL_MARKS:
        if not _holds_nothing(turn.get(key)):
            raise BadSample(f"{where} has {key}, which marks parts of a turn; a turn is supervised as a whole, or not at all")
    is_supervised = True
    for key in (*SUPERVISED_MARKS, *MASKED_MARKS):
        mark = _read_mark(turn.get(key), key, where)
        # If several marks disagree, the turn is not learnt.
        if mark is not None and mark == (key in MASKED_MARKS):
            is_supervised = False
    return is_supervised


def _read_mark(value: object, key: str, where: str) -> bool | None:
    """Return a mark of a turn as a boolean; None if there is none. The mark may be a boolean, a number or a text."""
    if is_empty(value):
        return None
    # As texts, all types can be compared in the same way: True becomes "true", and 1.0 becomes "1.0".
    text = str(value).strip().lower()
    if isinstance(value, bool | int | float | str) and text in _TRUE:
        return True
    if isinstance(value, bool | int | float | str) and text in _FALSE:
        return False
    meaning = "masked (1) or not (0)" if key in MASKED_MARKS else "supervised (1) or not (0)"
    raise BadSample(f"{where} has the {key} {value!r:.40}; a turn is {meaning}")


def _read_call(call: object, where: str) -> dict[str, Any]:
    """Return a tool call in the form that chat templates read: the arguments are an object, not JSON text."""
    problem = f"{where} has a tool call without a function's name"
    if not isinstance(call, dict):
        raise BadSample(problem)
    # In OpenAI's older format, the name and the arguments are keys of the call itself.
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadSample(problem)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = read_json(arguments or "{}", f"the tool call of {where}")
    # In a table, a call of a function without parameters has null here.
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadSample(f"{where} has a tool call whose arguments are {kind_of(arguments)}, expected an object")
    identifier = _identifiers(call, ("id",), where)
    return {**identifier, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _identifiers(holder: Mapping[str, Any], keys: tuple[str, ...], where: str) -> dict[str, str]:
    """Return the identifiers that a call or a tool turn has under ``keys``, as texts. In some data they are numbers."""
    identifiers = {}
    for key in keys:
        value = holder.get(key)
        if not is_empty(value):
            # In Python a boolean is an integer, but it is no identifier.
            text = str(value) if type(value) is int else value
            identifiers[key] = read_text(text, f"{key} of {where}")
    return identifiers


def _read_objects(value: object, name: str) -> list[Any]:
    """Return a list of objects; a single object becomes a list. The list and each object may be JSON text, which is parsed.

    Arrow cannot hold objects with different keys in one column, so published tables have them as text.
    """
    if isinstance(value, str):
        value = read_json(value, name)
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    objects = []
    for item in items:
        if isinstance(item, str):
            item = read_json(item, name)
        objects.append(item)
    return objects


# Return the text of one part of a content that is a list of parts.
def _read_part(content: object, where: str) -> str:
    kind = kind_of(content)
    if isinstance(content, dict):
        text = content.get("text", content.get("value"))
        if content.get("type") == "text" and isinstance(text, str):
            return text
        kind = f"of type {content.get('type')!r:.40}"
    raise BadSample(f"{where} has a part that is {kind}; only parts of type 'text' with a text can be used")
