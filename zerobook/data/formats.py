"""Conversion of published rows to one of four canonical samples.

``tokenized``          ``input_ids``, optional ``labels``                          -> `Tokens`
``messages``           ``messages``: turns of ``role`` and ``content``             -> `Chat`
``sharegpt``           ``conversations``: turns of ``from`` and ``value``          -> `Chat`
                       both with optional ``system`` and ``tools``
``prompt_completion``  ``prompt`` and ``completion``, strings or lists of turns    -> `Pair` or `Chat`
``instruction``        ``instruction``, ``output``, optional ``input``, ``system``,
                       ``history``                                                 -> `Chat`
``pairs``              ``source`` and ``target``, or as `PAIR_COLUMNS` names them  -> `Pair`
``text``               ``text`` or ``content``                                     -> `Text`

`detect` tries them in this order, the more specific columns first: a table of chats that also has
a ``prompt`` column is read as chats, a table of ``text`` and ``summary`` as pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zerobook.constants import IGNORE
from zerobook.errors import DataError


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or a part of a long one. Every token is supervised.

    ``begins`` and ``ends`` say whether the document begins and ends here. Only its beginning gets a BOS, and only its end an
    end-of-text token.
    """

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns of ``{"role", "content"}``: an optional system turn, then user and assistant in alternation.

    ``tool`` turns come between two assistant turns. Turns after the last assistant turn are
    allowed, but not supervised. At least one turn is the assistant's. An assistant turn may also have ``tool_calls``, in the
    form that chat templates read, and thoughts under one of `THOUGHTS`.

    Attributes:
        unsupervised: indices of assistant turns that are context only.
        tools: JSON schemas of the tools that the assistant may call.
    """

    messages: list[dict[str, Any]]
    unsupervised: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A source text, and the target text that the model learns to answer."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids that were made elsewhere, and as many ``labels``; `IGNORE` where a token is not supervised."""

    input_ids: list[int]
    labels: list[int]


Sample = Text | Chat | Pair | Tokens


class Stretch(dict[str, str]):
    """A row ``{"text": ...}`` that may be a part of a longer text. ``begins``, ``ends``: whether it begins or ends here."""

    def __init__(self, text: str = "", begins: bool = True, ends: bool = True):
        super().__init__(text=text)
        self.begins, self.ends = begins, ends


class BadSample(Exception):
    """One sample that cannot be used. The message is the reason alone; the caller adds the file and the line."""


class EmptyText(BadSample):
    """A document without text. Corpora with one line per row have many of them; they are left out without loss."""


def own_of(encoder: object) -> Mapping[str, Format]:
    """Return the encoder's own formats, by name."""
    return getattr(encoder, "formats", {})


def parse(
    format: str,
    row: object,
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    own: Mapping[str, Format] | None = None,
) -> Sample:
    """Convert one row to a sample.

    Args:
        format: a name of `FORMATS` or of ``own``.
        row: a mapping of columns to values. Anything else is a bad sample.
        text_column, summary_column: the columns of a pair, for ``pairs``; both or neither.
        own: the encoder's own formats.

    Raises:
        BadSample: a row that is not of the format, or that cannot be trained on.
        DataError: an unknown format, or one column of a pair without the other.
    """
    columns, read, _ = _named(format, text_column, summary_column, own or {})
    if not isinstance(row, Mapping):
        raise BadSample(f"it is {_kind(row)}, expected an object with {_either(columns)}")
    for needed in columns:
        if all(column in row for column in needed):
            return read(row, needed)
    raise BadSample(f"expected {_either(columns)}, it has {_list(row)}")


def detect(
    columns: Iterable[str],
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    own: Mapping[str, Format] | None = None,
) -> str:
    """Return the format of rows with these columns: the first of ``own``, and then of `FORMATS`, whose columns are there.

    Where the columns of a pair are named, only ``pairs`` is tried.

    Raises:
        DataError: no format fits, the named columns are not there, or the columns are those of preference data.
    """
    there = list(columns)
    if {"chosen", "rejected"} <= set(there) and not own:
        raise DataError(
            "the samples have the columns chosen and rejected, so this is preference data. This recipe trains on one answer; "
            "docs/how-to/dpo.md has one that trains on both. To train on other columns alone, name their format with --format."
        )
    by_hand = text_column is not None or summary_column is not None
    known = {**(own or {}), **FORMATS}
    for name in ["pairs"] if by_hand else known:
        if any(set(needed) <= set(there) for needed in _named(name, text_column, summary_column, own or {}).columns):
            return name
    if by_hand:
        raise DataError(
            f"--text_column {text_column} --summary_column {summary_column}: the samples have the columns {_list(there)}."
        )
    if "prompt" in there:
        raise DataError(
            f"the samples have the columns {_list(there)}: prompts without answers. Add a column completion or response, or "
            "name the two columns with --text_column and --summary_column."
        )
    lines = "\n".join(f"  {name}: {_either(entry.columns)}" for name, entry in known.items())
    raise DataError(
        f"the samples have the columns {_list(there)}, which fit no known format:\n{lines}\n"
        "Rename the columns, name a pair with --text_column and --summary_column, or the format with --format."
    )


class Format(NamedTuple):
    """A row format. ``columns``: alternative sets of columns, the preferred first. ``read(row, columns)`` takes one of them.

    ``read`` returns a sample that the encoder takes, or raises `BadSample` with the reason. ``optional``: further columns that
    ``read`` uses where they are there.
    """

    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Mapping[str, Any], tuple[str, ...]], Any]
    optional: tuple[str, ...] = ()


def ignored(
    format: str,
    columns: Iterable[str],
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    own: Mapping[str, Format] | None = None,
) -> list[str]:
    """Return the columns of a row that the format does not read."""
    there = list(columns)
    entry = _named(format, text_column, summary_column, own or {})
    needed = next((needed for needed in entry.columns if set(needed) <= set(there)), ())
    return [column for column in there if column not in needed and column not in entry.optional]


MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Columns of data for models that read more than text."""


def check_unread(row: Mapping[str, Any], sample: object) -> None:
    """Check that a row holds nothing besides the sample that changes its meaning. For formats that the user did not name.

    Raises:
        BadSample: an image or the like, a placeholder for one, or a verdict on the answer.
    """
    way_out = "Name the format with --format to train on the text alone"
    for column in MEDIA:
        if row.get(column):
            raise BadSample(f"the column {column} is not read: the recipes train on text. {way_out}")
    if isinstance(row.get("label"), bool):
        raise BadSample(
            f"the column label is {str(row['label']).lower()}, a verdict on the answer, and every answer would be learnt. "
            f"{way_out}"
        )
    texts = [m["content"] for m in sample.messages] if isinstance(sample, Chat) else []
    texts += [sample.source] if isinstance(sample, Pair) else []
    if any("<image>" in text for text in texts):
        raise BadSample(f"the text has <image>, which stands for an image that is not read. {way_out}")


def _named(name: str, text_column: str | None, summary_column: str | None, own: Mapping[str, Format]) -> Format:
    if name in own:
        return own[name]
    if name not in FORMATS:
        raise DataError(f"--format {name}: no such format. There are: {', '.join([*own, *FORMATS])}.")
    if name != "pairs" or (text_column is None and summary_column is None):
        return FORMATS[name]
    if text_column is None or summary_column is None:
        raise DataError(f"--text_column is {text_column} and --summary_column is {summary_column}. Give both, or neither.")
    return FORMATS[name]._replace(columns=((text_column, summary_column),))


# --- readers


def _tokenized(row: Mapping[str, Any], columns: tuple[str, ...]) -> Tokens:
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadSample("input_ids is empty")
    if min(ids) < 0:
        raise BadSample(f"input_ids has the negative id {min(ids)}")
    if row.get("labels") is None:
        return Tokens(ids, list(ids))
    labels = _integers(row["labels"], "labels")
    if len(ids) != len(labels):
        raise BadSample(f"{len(ids)} input_ids but {len(labels)} labels; they must match")
    wrong = [label for label in labels if label < 0 and label != IGNORE]
    if wrong:
        raise BadSample(f"labels has {wrong[0]}; negative labels other than {IGNORE} (not supervised) mean nothing")
    return Tokens(ids, labels)


def _turns(row: Mapping[str, Any], columns: tuple[str, ...]) -> Chat:
    messages, unsupervised = _read_turns(row[columns[0]], columns[0])
    if row.get("system") not in (None, ""):
        if messages and messages[0]["role"] == "system":
            raise BadSample(f"{columns[0]} begins with a system turn, and there is a column system; drop one")
        messages.insert(0, {"role": "system", "content": _string(row["system"], "system")})
        unsupervised = {index + 1 for index in unsupervised}
    return _chat(messages, unsupervised, _tools(row.get("tools")))


def read_chat(turns: object, column: str) -> Chat:
    """Return a list of turns, ``role`` and ``content`` or ``from`` and ``value``, as a chat.

    Args:
        column: the column that holds the turns; errors name it.

    Raises:
        BadSample: a turn is not of that form, the roles do not alternate, or no turn is the assistant's.
    """
    return _chat(*_read_turns(turns, column))


def _prompt_completion(row: Mapping[str, Any], columns: tuple[str, ...]) -> Pair | Chat:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, _ = _read_turns(prompt, "prompt")
        answered, unsupervised = _read_turns(completion, "completion")
        context = {index for index, turn in enumerate(asked) if turn["role"] == "assistant"}
        return _chat([*asked, *answered], context | {len(asked) + i for i in unsupervised}, _tools(row.get("tools")))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadSample(f"prompt is {_kind(prompt)} and completion is {_kind(completion)}; expected two strings or two lists")
    return Pair(_string(prompt, "prompt"), _string(completion, "completion"))


def _instruction(row: Mapping[str, Any], columns: tuple[str, ...]) -> Chat:
    instruction, output = columns
    question = _string(row[instruction], instruction)
    more = "input" if output == "output" else "context"
    if row.get(more) not in (None, ""):
        question += "\n\n" + _string(row[more], more)
    turns = [("user", question), ("assistant", _string(row[output], output))]
    turns = [*_history(row.get("history")), *turns]
    if row.get("system") not in (None, ""):
        turns.insert(0, ("system", _string(row["system"], "system")))
    return _chat([{"role": role, "content": content} for role, content in turns])


def _history(pairs: object) -> list[tuple[str, str]]:
    """Return the turns of a column ``history``: pairs of a question and an answer, before the instruction."""
    if pairs in (None, [], ""):
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadSample(f"history is {_kind(pairs)}, expected a list of pairs, each a question and an answer")
    return [
        (role, _string(text, f"history {number}"))
        for number, pair in enumerate(pairs, 1)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _pairs(row: Mapping[str, Any], columns: tuple[str, ...]) -> Pair:
    source, target = columns
    return Pair(_string(row[source], source), _string(row[target], target))


def _text(row: Mapping[str, Any], columns: tuple[str, ...]) -> Text:
    text = row[columns[0]]
    begins, ends = (row.begins, row.ends) if isinstance(row, Stretch) else (True, True)
    if text is None or (isinstance(text, str) and not text.strip() and begins and ends):
        raise EmptyText(f"{columns[0]} is empty")
    return Text(_string(text, columns[0], blank=not (begins and ends)), begins, ends)


PAIR_COLUMNS = (
    ("source", "target"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("context", "response"),
    ("input", "output"),
    ("input_text", "target_text"),
    ("article", "highlights"),
    ("article", "summary"),
    ("document", "summary"),
    ("dialogue", "summary"),
    ("text", "summary"),
    ("description", "abstract"),
    ("texts", "labels"),
)
"""Column names of (source, target). The first pair that is there is used."""

FORMATS = {
    "tokenized": Format((("input_ids",),), _tokenized, ("labels",)),
    "messages": Format((("messages",),), _turns, ("system", "tools")),
    "sharegpt": Format((("conversations",),), _turns, ("system", "tools")),
    "prompt_completion": Format((("prompt", "completion"),), _prompt_completion, ("tools",)),
    "instruction": Format(
        (("instruction", "output"), ("instruction", "response")), _instruction, ("input", "context", "system", "history")
    ),
    "pairs": Format(PAIR_COLUMNS, _pairs),
    "text": Format((("text",), ("content",)), _text),
}


# --- parts of a row

_ROLES = {
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
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold the model's thoughts, by the names that chat templates read."""
_CALL = "function_call"
"""An older key for one call of a tool, and the role of a ShareGPT turn that is one."""
_MAY_FOLLOW = {  # role -> roles that may come before it; None is the start of the chat
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _read_turns(turns: object, column: str) -> tuple[list[dict[str, Any]], set[int]]:
    """Return (the turns; indices of assistant turns that are marked as not to be learnt)."""
    if not isinstance(turns, list):
        raise BadSample(f"{column} is {_kind(turns)}, expected a list of turns")
    read = [_turn(turn, f"turn {number} of {column}") for number, turn in enumerate(turns, 1)]
    return [message for message, _ in read], {i for i, (_, learnt) in enumerate(read) if not learnt}


def _turn(turn: object, where: str) -> tuple[dict[str, Any], bool]:
    """Return (the turn; False for an assistant turn that is marked as not to be learnt)."""
    if not isinstance(turn, dict):
        raise BadSample(f"{where} is {_kind(turn)}, expected an object")
    # published chats use both spellings under either column
    for role, content in (("role", "content"), ("from", "value")):
        if role in turn and content in turn:
            break
    else:
        raise BadSample(f"{where} has {_list(turn)}, expected role and content (or from and value)")
    name, value = turn[role], turn[content]
    calls = turn.get("tool_calls") or ([turn[_CALL]] if turn.get(_CALL) else [])
    if name == _CALL:  # a ShareGPT turn whose value is the call, as JSON
        name, value, calls = "assistant", "", _json(value, where)
    if not isinstance(name, str) or name not in _ROLES:
        shown = repr(name) if isinstance(name, str) else _kind(name)
        raise BadSample(f"{where} has the {role} {shown}, expected one of {', '.join([*_ROLES, _CALL])}")
    message: dict[str, Any] = {"role": _ROLES[name]}
    learnt = True
    if message["role"] == "assistant":
        learnt = _learnt(turn, where)
        if calls:
            message["tool_calls"] = _calls(calls, where)
        message |= {key: _string(turn[key], f"{key} of {where}") for key in THOUGHTS if turn.get(key)}
    if isinstance(value, list):
        value = "".join(_part(part, where) for part in value)
    message["content"] = "" if calls and not value else _string(value, f"the {content} of {where}")
    return message, learnt


def _learnt(turn: Mapping[str, Any], where: str) -> bool:
    """Return whether an assistant turn is supervised, by its ``weight``, ``train`` or ``training``."""
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise BadSample(f"{where} has the weight {weight!r}; a turn is supervised (1) or not (0)")
    return weight != 0 and turn.get("train") is not False and turn.get("training") is not False


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Return calls of tools as chat templates read them: the arguments are an object, not text."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample(f"{where} has a tool call without a function's name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            (arguments,) = _json(arguments or "{}", where)
        if not isinstance(arguments, dict):
            raise BadSample(f"{where} has a tool call whose arguments are {_kind(arguments)}, expected an object")
        found.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def _json(text: object, where: str) -> list[Any]:
    """Return a text of JSON as a list: a JSON list, or the one value."""
    try:
        value = json.loads(_string(text, f"the tool call of {where}"))
    except ValueError as error:
        raise BadSample(f"the tool call of {where} is not valid JSON: {error}") from None
    return value if isinstance(value, list) else [value]


def _tools(value: object) -> list[dict[str, Any]] | None:
    """Return the column ``tools``: a list of JSON schemas, or the same as text."""
    if value in (None, "", []):
        return None
    tools = _json(value, "the column tools") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample(f"tools is {_kind(value)}, expected a list of objects")
    return tools or None


def _part(part: object, where: str) -> str:
    text = next((part[key] for key in ("text", "value") if key in part), None) if isinstance(part, dict) else None
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text, str):
        kind = f"of type {part.get('type')!r:.40}" if isinstance(part, dict) else _kind(part)
        raise BadSample(f"{where} has a part that is {kind}; only parts of type 'text' with a text can be used")
    return text


def _chat(messages: list[dict[str, Any]], unsupervised: Iterable[int] = (), tools: list[dict[str, Any]] | None = None) -> Chat:
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if before not in _MAY_FOLLOW[role]:
            if role == "system":
                reason = "a chat may have one system turn, as its first"
            elif "tool" in (role, before):
                reason = "tool turns stand between two assistant turns"
            else:
                reason = "user and assistant must alternate, and the user begins"
            raise BadSample(f"turn {number} is {role} {f'after {before}' if before else 'at the start'}: {reason}")
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise BadSample(f"none of the {len(messages)} turns is the assistant's, so there is nothing to learn")
    return Chat(messages, frozenset(unsupervised), tools)


def _string(value: object, name: str, *, blank: bool = False) -> str:
    if not isinstance(value, str):
        raise BadSample(f"{name} is {_kind(value)}, expected a string")
    if not value.strip() and not blank:
        raise BadSample(f"{name} is empty")
    if "\0" in value:
        raise BadSample(f"{name} has a NUL character at position {value.index(chr(0))}; is the file text?")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadSample(f"{name} has an unpaired surrogate at position {error.start}, which is not a character") from None
    return value


def _integers(values: object, name: str) -> list[int]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list):
        raise BadSample(f"{name} is {_kind(values)}, expected a list of integers")
    for value in values:
        if type(value) is not int:
            raise BadSample(f"{name} has {_kind(value)} in it, expected integers")
    return values


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _list(columns: Iterable[Any]) -> str:
    names = sorted(map(str, columns))
    return ", ".join(name if name.isprintable() else repr(name) for name in names) or "nothing"


def _either(columns: tuple[tuple[str, ...], ...]) -> str:
    return " or ".join(" + ".join(needed) for needed in columns)
