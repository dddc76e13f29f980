"""Skeletons of chats: the text that a chat template writes around the contents, learnt once for all chats of the same roles.

Rendering a short chat takes a third of the time of tokenizing it, and finding its turns takes as long again. Most
templates only write the contents out, and the text around them depends on the roles alone: then a chat is the skeleton
with the contents inserted. `only_writes_contents` proves this from the template's syntax. Other templates are rendered,
and the skeleton only finds their turns, where it matches exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import nodes

Messages = list[dict[str, str]]


class Turn(NamedTuple):
    """Range of characters of an assistant's turn. ``ends``: the last of them are its end-of-turn token."""

    start: int
    stop: int
    ends: bool


class Part(NamedTuple):
    """A turn: the text before its content and, for an assistant's turn, its range relative to its content."""

    lead: str
    trims: bool
    around: Turn | None


class Skeleton(NamedTuple):
    """The parts of a chat, and the text after the last. ``whole``: every chat of these roles equals the filled skeleton."""

    parts: list[Part]
    tail: str
    whole: bool = False

    def fill(self, messages: Messages) -> tuple[str, list[Turn]]:
        """Return the chat as text, and the assistant's turns in it."""
        pieces: list[str] = []
        turns: list[Turn] = []
        at = 0
        for (lead, trims, around), message in zip(self.parts, messages, strict=True):
            content = message["content"].strip() if trims else message["content"]
            pieces += (lead, content)
            start = at + len(lead)
            at = start + len(content)
            if around:
                turns.append(Turn(start + around.start, at + around.stop, around.ends))
        pieces.append(self.tail)
        return "".join(pieces), turns

    def place(self, messages: Messages, text: str) -> list[Turn] | None:
        """Return the assistant's turns in ``text``; None where ``text`` is not exactly the filled skeleton."""
        filled, turns = self.fill(messages)
        return turns if filled == text else None


def only_writes_contents(tree: nodes.Template) -> bool:
    """Return whether a chat template only writes the contents of messages and never inspects them.

    True only where every use of a content can be traced to the output, and at most joins the content to other text and
    trims it at both ends. A use that cannot be traced, such as a macro or a whole message passed on, gives False.
    """
    unfollowed = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Include, nodes.Import,
                  nodes.EvalContextModifier)  # fmt: skip
    if any(tree.find_all(unfollowed)):
        return False
    parents = {id(child): node for node in _all(tree) for child in node.iter_child_nodes()}
    held: set[str] = {"messages"}  # names of messages and lists of them
    spoken: set[str] = set()  # names of texts made of contents
    while True:
        names = len(held), len(spoken)
        for node in _all(tree):
            if _holds(node, held) and not _passed_on(node, parents[id(node)], held):
                return False
            if _speaks(node, spoken) and not _written(node, parents, spoken):
                return False
        if names == (len(held), len(spoken)):
            return True


_ASKS_NO_CONTENT = {"defined", "undefined", "none", "string"}  # tests whose answer is known: a content is always a string


def _all(tree: nodes.Node) -> Iterator[nodes.Node]:
    for child in tree.iter_child_nodes():
        yield child
        yield from _all(child)


def _key(node: nodes.Node) -> Any:
    """Return the constant key that ``node`` looks up; None where there is none."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _holds(node: nodes.Node, held: set[str]) -> bool:
    """Return whether ``node`` is a message or a list of messages."""
    if isinstance(node, nodes.Name):
        return node.name in held and node.ctx == "load"
    return isinstance(node, nodes.Getitem) and not isinstance(_key(node), str) and _holds(node.node, held)


def _passed_on(node: nodes.Node, parent: nodes.Node, held: set[str]) -> bool:
    """Return whether the use of a message, or of a list of them, can be traced. Add the names of its variables to ``held``."""
    target = parent.target if isinstance(parent, nodes.For | nodes.Assign) else None
    if target is not None and not (isinstance(parent, nodes.For) and node is not parent.iter):
        if isinstance(target, nodes.Name):
            held.add(target.name)
        return isinstance(target, nodes.Name)
    if isinstance(parent, nodes.Getitem | nodes.Getattr) and node is parent.node:
        return isinstance(parent, nodes.Getitem) or _key(parent) in ("role", "content")
    if isinstance(parent, nodes.Filter):
        return parent.name == "length"
    return isinstance(parent, nodes.Test) and parent.name in ("defined", "undefined", "none")


def _speaks(node: nodes.Node, spoken: set[str]) -> bool:
    """Return whether ``node`` is a content, or a variable whose text includes contents."""
    if isinstance(node, nodes.Name):
        return node.name in spoken and node.ctx == "load"
    return _key(node) == "content"


def _written(node: nodes.Node, parents: dict[int, nodes.Node], spoken: set[str]) -> bool:
    """Return whether a text with contents reaches the output, at most joined and trimmed. Add its variables to ``spoken``."""
    parent = parents[id(node)]
    if isinstance(parent, nodes.Output):
        return True
    if isinstance(parent, nodes.Test):
        return parent.name in _ASKS_NO_CONTENT and _key(node) == "content"
    if isinstance(parent, nodes.Assign):
        if isinstance(parent.target, nodes.Name):
            spoken.add(parent.target.name)
        return isinstance(parent.target, nodes.Name)
    joins = isinstance(parent, nodes.Add | nodes.Concat) or (isinstance(parent, nodes.CondExpr) and node is not parent.test)
    trims = isinstance(parent, nodes.Filter) and parent.name == "trim" and not (parent.args or parent.kwargs)
    if isinstance(parent, nodes.Getattr) and parent.attr == "strip":
        parent = parents[id(parent)]
        trims = isinstance(parent, nodes.Call) and not (parent.args or parent.kwargs or parent.dyn_args or parent.dyn_kwargs)
    return (joins or trims) and _written(parent, parents, spoken)
