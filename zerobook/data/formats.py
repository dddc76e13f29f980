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

`detect` tries the formats in this order. Formats with more specific columns come first. So a table of chats that also has a
``prompt`` column is read as chats, and a table of ``text`` and ``summary`` as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zerobook.data.chats import checked_chat, decode_turns, read_chat, read_tools, read_turns, unread_keys
from zerobook.data.folders import same_split
from zerobook.data.samples import BadSample, Chat, EmptyText, Pair, Sample, Segment, Text, Tokens
from zerobook.data.tokens import TOKEN_COLUMNS, check_columns, read_tokens
from zerobook.data.values import is_empty, kind_of, listed, read_text, shared_length
from zerobook.errors import DataError

__all__ = [
    "FORMATS",
    "BadSample",
    "Chat",
    "EmptyText",
    "Format",
    "Pair",
    "Sample",
    "Segment",
    "Text",
    "Tokens",
    "check_split",
    "check_unread",
    "detect",
    "formats_of",
    "list_unread",
    "parse",
    "read_chat",
    "read_preference",
]


def formats_of(encoder: object) -> Mapping[str, Format]:
    """Return the encoder's own formats, by name."""
    return getattr(encoder, "formats", {})


def parse(
    format: str,
    row: object,
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    encoder_formats: Mapping[str, Format] | None = None,
) -> Sample:
    """Convert one row to a sample.

    Args:
        format: a name of `FORMATS` or of ``encoder_formats``.
        row: a mapping of columns to values. Anything else is a bad sample.
        text_column, summary_column: the columns of a pair, for ``pairs``; both or neither.
        encoder_formats: the encoder's own formats, by name.

    Raises:
        BadSample: a row that is not of the format, or that cannot be trained on.
        DataError: an unknown format, or one column of a pair without the other.
    """
    entry = _resolve_format(format, text_column, summary_column, encoder_formats or {})
    columns = entry.columns
    if not isinstance(row, Mapping):
        raise BadSample(f"it is {kind_of(row)}, expected an object with {_either(columns)}")
    for needed in columns:
        if all(column in row for column in needed):
            return entry.read(row, needed)
    raise BadSample(f"expected {_either(columns)}, it has {listed(row)}")


def detect(
    columns: Iterable[str],
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    encoder_formats: Mapping[str, Format] | None = None,
) -> str:
    """Return the format of rows with these columns: the first of ``encoder_formats``, then of `FORMATS`, that has its columns.

    If the columns of a pair are named, only ``pairs`` is tried.

    Raises:
        DataError: no format fits, the named columns are not there, or the columns are those of preference data.
    """
    names = list(columns)
    # The rejected answer must not be learnt, so such data needs an encoder that reads both.
    if {"chosen", "rejected"} <= set(names) and not encoder_formats:
        raise DataError(
            "the samples have the columns chosen and rejected, so this is preference data. This recipe trains on one answer; "
            "docs/how-to/dpo.md has one that trains on both. To train on other columns alone, name their format with --format."
        )
    has_named_pair = text_column is not None or summary_column is not None
    formats = {**(encoder_formats or {}), **FORMATS}
    # If several formats fit, their order decides.
    candidates = ["pairs"] if has_named_pair else list(formats)
    for candidate in candidates:
        entry = _resolve_format(candidate, text_column, summary_column, encoder_formats or {})
        if any(set(needed) <= set(names) for needed in entry.columns):
            return candidate
    if has_named_pair:
        raise DataError(
            f"--text_column {text_column} --summary_column {summary_column}: the samples have the columns {listed(names)}."
        )
    if "prompt" in names:
        raise DataError(
            f"the samples have the columns {listed(names)}: prompts without answers. Add a column completion or response, or "
            "name the two columns with --text_column and --summary_column."
        )
    lines = "\n".join(f"  {name}: {_either(entry.columns)}" for name, entry in formats.items())
    raise DataError(
        f"the samples have the columns {listed(names)}, which fit no known format:\n{lines}\n"
        "Rename the columns, name a pair with --text_column and --summary_column, or the format with --format."
    )


class Format(NamedTuple):
    """A row format. ``columns``: alternative sets of columns that a row needs, the preferred first.

    ``read(row, columns)`` gets the first of these sets that the row has. It returns a sample that the encoder takes, or raises
    `BadSample` with the reason. ``optional``: further columns that ``read`` uses if they are there. ``has_turns``: the columns
    hold turns of chats.
    """

    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Mapping[str, Any], tuple[str, ...]], Any]
    optional: tuple[str, ...] = ()
    has_turns: bool = False


def list_unread(
    format: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    text_column: str | None = None,
    summary_column: str | None = None,
    encoder_formats: Mapping[str, Format] | None = None,
) -> list[str]:
    """Return the columns that the format does not read, and the keys of turns that it does not read, as ``messages[].key``."""
    entry = _resolve_format(format, text_column, summary_column, encoder_formats or {})
    names: dict[str, None] = {}  # a set that keeps its order
    for row in rows:
        needed = next((needed for needed in entry.columns if set(needed) <= set(row)), ())
        names |= dict.fromkeys(column for column in row if column not in needed and column not in entry.optional)
        turn_columns = needed if entry.has_turns else ()
        for column in turn_columns:
            names |= dict.fromkeys(f"{column}[].{key}" for key in unread_keys(row[column]))
    # pandas writes the numbers of the rows into a column without a name.
    names.pop("", None)
    return list(names)


# Columns of data for models that read more than text.
MEDIA = ("image", "images", "audio", "audios", "video", "videos")


# Columns of KTO data that say whether an answer is good.
VERDICTS = ("label", "kto_tag")


def _is_verdict(value: object, *, of_answer: bool) -> bool:
    """Return whether a value is a verdict: a boolean, also as text; 0 and 1 only ``of_answer``, since they may be classes.

    Args:
        of_answer: the row has an answer to a prompt.
    """
    if isinstance(value, bool):
        return True
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false") or (of_answer and value in ("0", "1"))
    return of_answer and isinstance(value, int | float) and value in (0, 1)


def check_unread(row: Mapping[str, Any], sample: object) -> None:
    """Refuse a row with something that its sample lacks and that may change its meaning, if the user did not name the format.

    Raises:
        BadSample: an image or the like, a placeholder for one, a verdict on the answer, or turns before a pair.
    """
    advice = "Name the format with --format to train on the text alone"
    for column in MEDIA:
        if row.get(column):
            raise BadSample(f"the column {column} is not read: the recipes train on text. {advice}")
    for column in VERDICTS:
        value = row.get(column)
        if _is_verdict(value, of_answer=isinstance(sample, Chat) or "completion" in row):
            raise BadSample(
                f"the column {column} is {str(value).lower()}, a verdict on the answer, and every answer would be learnt. "
                f"{advice}"
            )
    if isinstance(sample, Tokens):
        check_columns(row)
    if isinstance(sample, Pair) and row.get("history"):
        raise BadSample(
            "the column history is not read, and the answer may depend on it. Rename the columns of the pair to instruction "
            "and output to train on chats, or name the format with --format to train without it"
        )
    # The target of a pair is not searched: a model may well be taught to write the placeholder.
    texts = []
    if isinstance(sample, Chat):
        texts = [message["content"] or "" for message in sample.messages]
    elif isinstance(sample, Pair):
        texts = [sample.source]
    if any("<image>" in text for text in texts):
        raise BadSample(f"the text has <image>, which stands for an image that is not read. {advice}")


# Columns that name the split of a sample.
SPLIT_COLUMNS = ("split", "data_split", "partition", "subset", "set")


def check_split(row: Mapping[str, Any]) -> None:
    """Refuse a training row that is marked as a held-out one.

    Raises:
        BadSample: a column of `SPLIT_COLUMNS` names a validation or test split, in a spelling that `datasets` knows.
    """
    for column in SPLIT_COLUMNS:
        value = row.get(column)
        if isinstance(value, str) and same_split(value.strip().lower()) in ("validation", "test"):
            raise BadSample(
                f"the column {column} is {value!r:.40}, and every sample would be trained on. Move such samples to a file of "
                "their own, leave them out with --on_bad_sample skip, or name the format with --format to train on all"
            )


def _resolve_format(
    name: str, text_column: str | None, summary_column: str | None, encoder_formats: Mapping[str, Format]
) -> Format:
    """Return a format by its name. ``pairs`` has the columns of a pair that the user named, if any."""
    if name in encoder_formats:
        return encoder_formats[name]
    if name not in FORMATS:
        raise DataError(f"--format {name}: no such format. There are: {', '.join([*encoder_formats, *FORMATS])}.")
    if name != "pairs" or (text_column is None and summary_column is None):
        return FORMATS[name]
    # If the user named only one column of a pair, the other cannot be known.
    if text_column is None or summary_column is None:
        raise DataError(f"--text_column is {text_column} and --summary_column is {summary_column}. Give both, or neither.")
    return FORMATS[name]._replace(columns=((text_column, summary_column),))


# --- readers


def read_preference(row: Mapping[str, Any], columns: tuple[str, ...]) -> list[Pair | Chat]:
    """Return the chosen and the rejected answer of preference data, each with the prompt before it.

    Texts become pairs, and lists of turns become chats. The prompt, which is not supervised, is the column ``prompt``. If there
    is no such column, or the chats repeat it, the prompt is the beginning that both answers have in common.

    Args:
        columns: the columns of the chosen and of the rejected answer.
    """
    prompt = decode_turns(row.get("prompt"))
    answers = [decode_turns(row[column]) for column in columns]
    if not all(isinstance(answer, str | list) for answer in answers):
        raise BadSample(f"{' and '.join(columns)} are {' and '.join(map(kind_of, answers))}, expected two strings or two lists")
    shared = _shared_beginning(*answers)
    # A prompt that is a text becomes the user's turn before answers that are turns.
    if prompt and isinstance(prompt, str) and isinstance(shared, list):
        prompt = [{"role": "user", "content": prompt}]
    # If there is no prompt, or both chats repeat it, the prompt is what the answers have in common.
    if is_empty(prompt) or (isinstance(prompt, list) and prompt == shared[: len(prompt)]):
        prompt = shared
        answers = [answer[len(shared) :] for answer in answers]
    return [
        _read_prompt_completion({**row, "prompt": prompt, column: answer}, ("prompt", column))
        for column, answer in zip(columns, answers, strict=True)
    ]


# Read the formats messages and sharegpt.
def _read_chat_row(row: Mapping[str, Any], columns: tuple[str, ...]) -> Chat:
    messages, unsupervised = read_turns(row[columns[0]], columns[0])
    if not is_empty(row.get("system")):
        if messages and messages[0]["role"] == "system":
            raise BadSample(f"{columns[0]} begins with a system turn, and there is a column system; drop one")
        messages.insert(0, {"role": "system", "content": read_text(row["system"], "system")})
        # All other turns now come one later.
        unsupervised = {index + 1 for index in unsupervised}
    return checked_chat(messages, unsupervised, read_tools(row.get("tools")))


# Read a prompt and a completion: two texts as a pair, two lists of turns as a chat.
def _read_prompt_completion(row: Mapping[str, Any], columns: tuple[str, ...]) -> Pair | Chat:
    prompt_column, completion_column = columns
    prompt = row[prompt_column]
    completion = row[completion_column]
    # Only if both are turns, also as JSON text, are they read as turns. JSON text beside another text is a text.
    turns = [decode_turns(value) for value in (prompt, completion)]
    if all(isinstance(value, list) for value in turns):
        prompt, completion = turns
        prompt_turns, _ = read_turns(prompt, prompt_column)
        completion_turns, masked_turns = read_turns(completion, completion_column)
        # The turns of the prompt are context.
        unsupervised = set(range(len(prompt_turns)))
        unsupervised |= {len(prompt_turns) + index for index in masked_turns}
        return checked_chat([*prompt_turns, *completion_turns], unsupervised, read_tools(row.get("tools")))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadSample(
            f"{prompt_column} is {kind_of(prompt)} and {completion_column} is {kind_of(completion)}; "
            "expected two strings or two lists"
        )
    return Pair(read_text(prompt, prompt_column), read_text(completion, completion_column))


def _shared_beginning(chosen: Any, rejected: Any) -> Any:
    """Return what two texts, or two lists of turns, begin with. Each keeps at least a character or a turn as its answer."""
    length = shared_length(chosen[:-1], rejected[:-1])
    # Cut texts before white space: answers begin with the space before a word, as tokens do.
    if isinstance(chosen, str):
        length = max(0, chosen.rfind(" ", 0, length), chosen.rfind("\n", 0, length))
    return chosen[:length]


# Read an instruction and its output as a chat.
def _read_instruction(row: Mapping[str, Any], columns: tuple[str, ...]) -> Chat:
    instruction, output = columns
    # The dataset Dolly calls the column of the input ``context``.
    question_columns = [column for column in (instruction, "input", "context") if not is_empty(row.get(column))]
    # If all are empty, `read_text` raises the error for the instruction.
    question_columns = question_columns or [instruction]
    question = "\n\n".join(read_text(row[column], column) for column in question_columns)
    answer = read_text(row[output], output)
    turns = [*_read_history(row.get("history")), ("user", question), ("assistant", answer)]
    if not is_empty(row.get("system")):
        turns.insert(0, ("system", read_text(row["system"], "system")))
    return checked_chat([{"role": role, "content": content} for role, content in turns])


def _read_history(pairs: object) -> list[tuple[str, str]]:
    """Return the turns of a column ``history``, (role, text) each. It has pairs of a question and an answer."""
    if is_empty(pairs) or pairs == []:
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadSample(f"history is {kind_of(pairs)}, expected a list of pairs, each a question and an answer")
    turns = []
    for number, (question, answer) in enumerate(pairs, 1):
        turns.append(("user", read_text(question, f"history {number}")))
        turns.append(("assistant", read_text(answer, f"history {number}")))
    return turns


def _read_pair(row: Mapping[str, Any], columns: tuple[str, ...]) -> Pair:
    source, target = columns
    return Pair(read_text(row[source], source), read_text(row[target], target))


# Read a document, or a part of a long one.
def _read_document(row: Mapping[str, Any], columns: tuple[str, ...]) -> Text:
    text = row[columns[0]]
    # A row that is not a `Segment` is a complete text.
    begins = getattr(row, "begins", True)
    ends = getattr(row, "ends", True)
    # A complete text must not be blank. A part of a long text may be.
    is_complete = begins and ends
    is_blank = is_empty(text) or (isinstance(text, str) and not text.strip())
    if is_blank and is_complete:
        raise EmptyText(f"{columns[0]} is empty")
    return Text(read_text(text, columns[0], blank=not is_complete), begins, ends)


# Column names of (source, target). The first pair that is there is used.
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

FORMATS = {
    "tokenized": Format((("input_ids",),), read_tokens, TOKEN_COLUMNS),
    "messages": Format((("messages",),), _read_chat_row, ("system", "tools"), has_turns=True),
    "sharegpt": Format((("conversations",),), _read_chat_row, ("system", "tools"), has_turns=True),
    "prompt_completion": Format((("prompt", "completion"),), _read_prompt_completion, ("tools",), has_turns=True),
    "instruction": Format(
        (("instruction", "output"), ("instruction", "response")), _read_instruction, ("input", "context", "system", "history")
    ),
    "pairs": Format(PAIR_COLUMNS, _read_pair),
    "text": Format((("text",), ("content",)), _read_document),
}


# Return alternative sets of columns in words.
def _either(columns: tuple[tuple[str, ...], ...]) -> str:
    return " or ".join(map(" + ".join, columns))
