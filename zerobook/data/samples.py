"""The four canonical samples that rows are converted to, and the errors about rows."""

from dataclasses import dataclass
from typing import Any


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

    Either of them may begin, but some chat templates refuse a chat that the assistant begins. ``tool`` turns follow an
    assistant turn, and may have ``tool_call_id`` and ``name``. Turns after the last assistant turn are allowed, but not
    supervised. At least one turn is the assistant's. An assistant turn may also have ``tool_calls``, in the form that chat
    templates read, with a content that may be None, and thoughts under one of `zerobook.data.chats.THOUGHTS`.

    Attributes:
        unsupervised: indices of turns that are only context: they are marked so, or belong to a prompt. All other turns of
            the assistant are supervised.
        tools: JSON schemas of the tools that the assistant may call.
    """

    messages: list[dict[str, Any]]
    unsupervised: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A source text, and the target text with which the model learns to answer it."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids that were made elsewhere, and as many ``labels``; `IGNORE` where a token is not supervised."""

    input_ids: list[int]
    labels: list[int]


Sample = Text | Chat | Pair | Tokens


class Segment(dict[str, str]):
    """A row ``{"text": ...}`` that may be a part of a longer text. ``begins``, ``ends``: whether it begins or ends here."""

    def __init__(self, text: str = "", begins: bool = True, ends: bool = True):
        super().__init__(text=text)
        self.begins = begins
        self.ends = ends


class BadSample(Exception):
    """One sample that cannot be used. The message is the reason alone; the caller adds the file and the line."""


class EmptyText(BadSample):
    """A document without text. Corpora with one line per row have many of them. They are left out, and not refused."""
