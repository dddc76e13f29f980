"""Conversion of published rows to one of four canonical samples.

``tokenized``          ``input_ids``, optional ``labels``                          -> `Tokens`
``messages``           ``messages``: turns of ``role`` and ``content``             -> `Chat`
``sharegpt``           ``conversations``: turns of ``from`` and ``value``          -> `Chat`
``prompt_completion``  ``prompt`` and ``completion``, strings or lists of turns    -> `Pair` or `Chat`
``instruction``        ``instruction``, ``output``, optional ``input``, ``system`` -> `Chat`
``pairs``              ``source`` and ``target``, or as `PAIR_COLUMNS` names them  -> `Pair`
``text``               ``text`` or ``content``                                     -> `Text`

`detect` tries them in this order, the more specific columns first: a table of chats that also has
a ``prompt`` column is read as chats, a table of ``text`` and ``summary`` as pairs.
"""

from __future__ import annotations

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
    allowed, but not supervised. At least one turn is the assistant's.
    """

    messages: list[dict[str, str]]


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
    columns, read = _named(format, text_column, summary_column, own or {})
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
        DataError: no format fits, or the named columns are not there.
    """
    there = list(columns)
    by_hand = text_column is not None or summary_column is not None
    known = {**(own or {}), **FORMATS}
    for name in ["pairs"] if by_hand else known:
        if any(set(needed) <= set(there) for needed in _named(name, text_column, summary_column, own or {}).columns):
            return name
    if by_hand:
        raise DataError(
            f"--text_column {text_column} --summary_column {summary_column}: the samples have the columns {_list(there)}."
        )
    lines = "\n".join(f"  {name}: {_either(entry.columns)}" for name, entry in known.items())
    raise DataError(
        f"the samples have the columns {_list(there)}, which fit no known format:\n{lines}\n"
        "Rename the columns, name a pair with --text_column and --summary_column, or the format with --format."
    )


class Format(NamedTuple):
    """A row format. ``columns``: alternative sets of columns, the preferred first. ``read(row, columns)`` takes one of them.

    ``read`` returns a sample that the encoder takes, or raises `BadSample` with the reason.
    """

    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Mapping[str, Any], tuple[str, ...]], Any]


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
    return read_chat(row[columns[0]], columns[0])


def read_chat(turns: object, column: str) -> Chat:
    """Return a list of turns, ``role`` and ``content`` or ``from`` and ``value``, as a chat.

    Args:
        column: the column that holds the turns; errors name it.

    Raises:
        BadSample: a turn is not of that form, the roles do not alternate, or no turn is the assistant's.
    """
    return _chat(_read_turns(turns, column))


def _prompt_completion(row: Mapping[str, Any], columns: tuple[str, ...]) -> Pair | Chat:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(_read_turns(prompt, "prompt") + _read_turns(completion, "completion"))
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
    if row.get("system") not in (None, ""):
        turns.insert(0, ("system", _string(row["system"], "system")))
    return _chat([{"role": role, "content": content} for role, content in turns])


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
)
"""Column names of (source, target). The first pair that is there is used."""

FORMATS = {
    "tokenized": Format((("input_ids",),), _tokenized),
    "messages": Format((("messages",),), _turns),
    "sharegpt": Format((("conversations",),), _turns),
    "prompt_completion": Format((("prompt", "completion"),), _prompt_completion),
    "instruction": Format((("instruction", "output"), ("instruction", "response")), _instruction),
    "pairs": Format(PAIR_COLUMNS, _pairs),
    "text": Format((("text",), ("content",)), _text),
}


# --- parts of a row

_ROLES = {
    "system": "system",
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
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold a part of the model's answer besides the content."""
_MAY_FOLLOW = {  # role -> roles that may come before it; None is the start of the chat
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _read_turns(turns: object, column: str) -> list[dict[str, str]]:
    if not isinstance(turns, list):
        raise BadSample(f"{column} is {_kind(turns)}, expected a list of turns")
    return [_turn(turn, f"turn {number} of {column}") for number, turn in enumerate(turns, 1)]


def _turn(turn: object, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise BadSample(f"{where} is {_kind(turn)}, expected an object")
    # published chats use both spellings under either column
    for role, content in (("role", "content"), ("from", "value")):
        if role in turn and content in turn:
            break
    else:
        raise BadSample(f"{where} has {_list(turn)}, expected role and content (or from and value)")
    name = turn[role]
    if not isinstance(name, str) or name not in _ROLES:
        shown = repr(name) if isinstance(name, str) else _kind(name)
        raise BadSample(f"{where} has the {role} {shown}, expected one of {', '.join(_ROLES)}")
    for key in _UNREAD:
        if turn.get(key):
            raise BadSample(f"{where} has {key}, which the recipe does not use; write it into the turn's content")
    left_out = turn.get("weight") not in (None, 1) or False in (turn.get("train"), turn.get("training"))
    if left_out and _ROLES[name] == "assistant":
        raise BadSample(
            f"{where} is marked as not to be learnt (weight, train or training), and every turn of the assistant is learnt; "
            "give input_ids and labels instead, or let the chat end before it"
        )
    value = turn[content]
    if isinstance(value, list):
        value = "".join(_part(part, where) for part in value)
    return {"role": _ROLES[name], "content": _string(value, f"the {content} of {where}")}


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = f"of type {part.get('type')!r:.40}" if isinstance(part, dict) else _kind(part)
        raise BadSample(f"{where} has a part that is {kind}; only parts of type 'text' with a text can be used")
    return part["text"]


def _chat(messages: list[dict[str, str]]) -> Chat:
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
    return Chat(messages)


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
