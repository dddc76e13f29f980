"""Skeletons of chats: the text that a chat template writes around the contents, learnt once for all chats of the same roles.

Rendering a short chat takes a third of the time of tokenizing it, and finding its turns takes as long again. Most
templates only write the contents out, and the text around them depends on the roles alone: then a chat is the skeleton
with the contents inserted. `only_writes_contents` proves this from the template's syntax. Other templates are rendered,
and the skeleton only finds their turns, where it matches exactly.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jinja2 import nodes

Messages = list[dict[str, str]]


class TurnSpan(NamedTuple):
    """Range of characters of an assistant's turn. ``has_end``: the last of them are its end-of-turn token."""

    start: int
    stop: int
    has_end: bool


class TurnSlot(NamedTuple):
    """A turn of a skeleton: the text before its content and, for an assistant's turn, its span.

    ``trims``: the template trims the content. ``span``: relative to the content, ``start`` to its first character and
    ``stop`` to its end.
    """

    lead: str
    trims: bool
    span: TurnSpan | None


class Skeleton(NamedTuple):
    """The turns of a chat, and the text after the last. ``fits_all``: every chat of these roles equals the filled skeleton."""

    slots: list[TurnSlot]
    tail: str
    fits_all: bool = False

    def fill(self, messages: Messages) -> tuple[str, list[TurnSpan]]:
        """Return the chat as text, and the assistant's turns in it."""
        pieces: list[str] = []
        spans: list[TurnSpan] = []
        position = 0
        for slot, message in zip(self.slots, messages, strict=True):
            content = message["content"].strip() if slot.trims else message["content"]
            pieces += (slot.lead, content)
            start = position + len(slot.lead)
            position = start + len(content)
            if slot.span:
                spans.append(TurnSpan(start + slot.span.start, position + slot.span.stop, slot.span.has_end))
        pieces.append(self.tail)
        return "".join(pieces), spans

    def find_turns(self, messages: Messages, text: str) -> list[TurnSpan] | None:
        """Return the assistant's turns in ``text``; None where ``text`` is not exactly the filled skeleton."""
        filled, spans = self.fill(messages)
        return spans if filled == text else None


_NOT_TRACED = (
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.AssignBlock,
    nodes.Include,
    nodes.Import,
    nodes.EvalContextModifier,
)
_Kind = Literal["messages", "text", "strip"]
"""A message or a list of messages; a text that contents are in; the method ``strip`` of such a text."""


class _UntracedUse(Exception):
    """A message or a content is used in a way that cannot be traced to the output."""


def only_writes_contents(tree: nodes.Template) -> bool:
    """Return whether a chat template only writes the contents of messages and never inspects them.

    True only where every use of a content can be traced to the output, and at most joins the content to other text and
    trims it at both ends. A use that cannot be traced, such as a macro or a whole message passed on, gives False.
    """
    if any(tree.find_all(_NOT_TRACED)):
        return False
    variables: dict[str, _Kind] = {"messages": "messages"}
    traced_variables = 0
    try:
        # A line may read a variable that a later one sets, in the pass of a loop before: repeat until no variable is new.
        while traced_variables < len(variables):
            traced_variables = len(variables)
            _trace(tree, variables)
    except _UntracedUse:
        return False
    return True


def _trace(node: nodes.Node, variables: dict[str, _Kind]) -> _Kind | None:
    """Return the kind of the node's value; None for one without messages and contents. Add variables that are set to one.

    Raises:
        _UntracedUse: a use that is not in the list below.
    """
    if isinstance(node, nodes.Name):
        return variables.get(node.name) if node.ctx == "load" else None
    value: _Kind | None = "text" if _key(node) == "content" else None
    for child in node.iter_child_nodes():
        kind = _trace(child, variables)
        match kind, node:
            case None, _:
                pass
            case "messages" | "text", nodes.Assign(target=nodes.Name(name=variable)):
                _set_kind(variable, kind, variables)
            case "messages", nodes.For(target=nodes.Name(name=variable)) if child is node.iter:
                _set_kind(variable, kind, variables)
            case "messages", nodes.Getattr(attr="role" | "content"):
                pass
            case "messages", nodes.Getitem() if child is node.node:
                # A key that is no constant text is an index into the list.
                if not isinstance(_key(node), str):
                    value = "messages"
            case "messages", nodes.Filter(name="length") | nodes.Test(name="defined" | "undefined" | "none"):
                pass
            case "text", nodes.Output():
                pass
            case "text", nodes.Test(name="defined" | "undefined" | "none" | "string") if _key(child) == "content":
                # The answer is known: a content is always a string.
                pass
            case "text", nodes.Add() | nodes.Concat():
                value = "text"
            case "text", nodes.CondExpr() if child is not node.test:
                value = "text"
            case "text", nodes.Filter(name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                value = "text"
            case "text", nodes.Getattr(attr="strip"):
                value = "strip"
            case "strip", nodes.Call(args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                value = "text"
            case _:
                raise _UntracedUse
    return value


def _set_kind(name: str, kind: _Kind, variables: dict[str, _Kind]) -> None:
    # A variable of both kinds, which no template needs, is not traced.
    if variables.setdefault(name, kind) != kind:
        raise _UntracedUse


def _key(node: nodes.Node) -> Any:
    """Return the constant key that ``node`` looks up; None where there is none."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    return None
